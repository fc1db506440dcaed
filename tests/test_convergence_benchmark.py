"""The benchmark of quality: its runs, its table of paired differences, and its figure."""

import json
import re
import time
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from simulated import assert_same_end

from benchmarks.convergence import draw, main, report, rows_of
from benchmarks.runs import TASKS, WITH_ADAM, Task, simulate, summary_of, to_train
from dgc_training.config import ConfigError, load
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.build import build
from scripts.methods import LOCAL_STEPS

LANGUAGE = ("dense", "powersgd-4", "2bit-adaptive")


def summary(task: Task, quality: float, wire: int = 5) -> dict[str, Any]:
    sent = {"wire_bytes": wire, "dense_wire_bytes": 5, "payload_bytes": 2 * wire}
    return {
        "final": {task.metric: quality},
        **sent,
        "seconds": 2.0,
        "training_seconds": 1.0,
        f"{task.item}s": 3000,
    }


def test_simulated_ranks_train_alike_every_time(tmp_path: Path) -> None:
    def trained(name: str, *more: str, method: str = "configs/powersgd/rank2.py") -> Any:
        place = tmp_path / name
        words = ["--configs", "configs/digits/cnn.py", method, "--run-dir", str(place)]
        changes = ["--configs.train.num_epochs=1", "--configs.train.batch_size=90"]
        simulate(2, [*words, "--devices", "cpu", *changes, *more])
        return json.loads((place / "summary.json").read_text())

    first, again = trained("first"), trained("again")
    assert first["final"] == again["final"] and first["ranks"] == 2 and first["samples"] > 1000
    assert 0 < first["payload_bytes"] == again["payload_bytes"] < first["dense_wire_bytes"] / 4
    assert trained("other", "--configs.seed=7")["final"] != first["final"]
    with pytest.raises(ConfigError, match=r"train\.clip_norm limits averages"):
        trained("refused", "--configs.train.clip_norm=1.0", method="configs/dgc/wm5.py")
    assert not (tmp_path / "refused").exists()


def test_a_kept_run_is_not_repeated_and_not_taken_for_one_of_the_other_mode(tmp_path: Path) -> None:
    taken = []

    def simulated(ranks: int, words: Any) -> None:
        taken.append(words)
        (tmp_path / "kept").mkdir()
        (tmp_path / "kept" / "summary.json").write_text('{"seconds": 1}')

    started = Mock(side_effect=AssertionError("the kept run would be replaced"), __name__="started")
    for _ in range(2):
        assert summary_of(simulated, 2, ["--a"], tmp_path / "kept") == {"seconds": 1} and taken == [["--a"]]
    for train, ranks, words in ((started, 2, ["--a"]), (simulated, 3, ["--a"]), (simulated, 2, ["--b"])):
        with pytest.raises(SystemExit, match="has a run of the other mode or with other arguments"):
            summary_of(train, ranks, words, tmp_path / "kept")


PYSOURCE = ("--task", "pysource", "--model", "tiny")
ADAMS = ("onebit-adam", "zero-one-adam")
METHODS = {
    "digits": ("dense", "dgc", *ADAMS, "dgc-adam"),
    "numwords": (*LANGUAGE, "dgc-clipped", "sgp", "osgp"),
    "numwords-by-epoch": ("ar", "adpsgd"),
    "pysource": (*LANGUAGE, "dgc-residual", *ADAMS, "dgc-adam", "dgc-adam-0.1-percent"),
    "pysource-tiny": WITH_ADAM,
    "pysource-124m": WITH_ADAM,
    "pysource-long": (*LOCAL_STEPS, "zero-one-h10", "zero-one-h6"),
    "lstm": (*LANGUAGE, *ADAMS),
    "lstm-sgd": ("dense", "dgc", "powersgd-1"),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_a_task_is_a_stack_of_configs(name: str, tmp_path: Path) -> None:
    """The task names the config's metric and the key by which runs differ. A command line has the last word."""
    task = TASKS[name]
    given = Namespace(task=name, epochs=None, batch_size=None, overrides=["--configs.train.log_every=3"])
    for method in METHODS[name]:
        args, overrides = parse_arguments(to_train(given, method, 1, tmp_path))
        tree = load(args.configs, overrides)
        assert tree.train.metric == task.metric and tree.train.log_every == 3
        assert (tree.train.num_epochs, tree.train.batch_size) == (task.epochs, task.batch_size)
        assert (tree.seed, tree.dataset.get("fold")) == ((42, 1) if name == "digits" else (1, None))
        every = method.partition("-h")[2].partition("-")[0]
        if every.isdigit() and name == "pysource-long" and "zero" not in method:
            assert tree.train.local.average_every == int(every)


def test_differences_are_paired(capsys: pytest.CaptureFixture[str]) -> None:
    task = TASKS["digits"]
    one, other = summary(task, 99.0), summary(task, 98.0, wire=1)
    rows = rows_of(task, {"dense": [one], "dgc": [other]})
    report(task, rows)
    *_, head, dense, dgc, last = capsys.readouterr().out.splitlines()
    result = json.loads(last, parse_constant=pytest.fail)["methods"]
    assert result["dgc"]["standard_error"] is None and result["dgc"]["difference"] == -1
    assert len(head) == len(dense) == len(dgc)
    assert dense.split() == ["dense", "99.00", "0.00", "1.0", "0.00", "1.0", "0.00", "2.0", "3,000"]
    rows = rows_of(task, {"dense": [one, summary(task, 97.0)], "dgc": [other, summary(task, 97.0)]})
    assert rows["dgc"]["standard_error"] == 0.5 and rows["dgc"]["dense_over_wire"] == 10 / 6
    assert rows["dgc"]["runs"] == [98.0, 97.0]
    bits = TASKS["pysource"]
    plain, sign = [summary(bits, 2.0), summary(bits, 2.5)], [summary(bits, 2.1, 1), summary(bits, 2.5, 1)]
    row = rows_of(bits, {"dense": plain, "sign": sign})["sign"]
    assert row["difference"] == pytest.approx(2.5) and row["standard_error"] == pytest.approx(2.5)  # percent
    assert row["first_over_payload"] == row["dense_over_wire"] == 5


def test_the_figure_puts_better_methods_higher(tmp_path: Path) -> None:
    """Fewer bits per character are better: the axis is inverted."""
    for name, dgc_is_better in (("numwords", False), ("lstm", True)):
        task = TASKS[name]
        rows = rows_of(task, {"dense": [summary(task, 3.0)], "dgc": [summary(task, 2.0, wire=1)]})
        draw(task, rows, "title", tmp_path / "figure.svg")
        text = (tmp_path / "figure.svg").read_text()
        assert task.quality in text and "title" in text
        heights = {label: float(y) for y, label in re.findall(r'y="([\d.]+)"[^>]*>(dense|dgc)</text>', text)}
        assert (heights["dgc"] < heights["dense"]) == dgc_is_better  # SVG counts downwards


def test_what_cannot_be_simulated_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--simulate", "--methods", "ar", "adpsgd"])
    assert "adpsgd is asynchronous" in capsys.readouterr().err


def test_the_large_model_has_the_shape_of_gpt2_small(tmp_path: Path) -> None:
    given = Namespace(task="pysource-124m", epochs=None, batch_size=None, overrides=[], device="cuda")
    args, overrides = parse_arguments(to_train(given, "dense", 0, tmp_path))
    tree = load(args.configs, overrides)
    with torch.device("meta"):
        model = build(tree.model)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808 and model.context == 1024
    assert args.devices == "gpu" and tree.deterministic and tree.train.precision == "bf16"
    assert tree.train.scheduler.total_steps == 1000


@pytest.mark.usefixtures("no_type_checks")
def test_a_run_in_pieces_has_the_bits_of_one_in_a_single_piece(tmp_path: Path) -> None:
    """With no time left, each piece is one step, or until ranks that train alone agree to stop."""
    given = Namespace(task="pysource-tiny", epochs=None, batch_size=None, overrides=[])
    for name, least in (("powersgd-4", 6), ("diloco-h20", 2)):
        change = ["--configs.train.local.average_every=2"] if name == "diloco-h20" else []
        whole, pieces = tmp_path / f"{name}-whole", tmp_path / f"{name}-pieces"
        simulate(2, [*to_train(given, name, 0, whole), *change])
        starts = 0
        while not (pieces / "summary.json").exists():
            simulate(2, [*to_train(given, name, 0, pieces), *change, "--minutes", "0"])
            starts += 1
        assert least <= starts <= 9
        assert_same_end(whole, pieces)


def test_a_comparison_ends_with_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that ends in time leaves its summary alone. Others are continued. No run begins after it."""
    started = []

    def simulated(ranks: int, words: Any) -> None:
        started.append(words)
        (tmp_path / "run" / "checkpoints").mkdir(parents=True, exist_ok=True)
        if len(started) == 2:
            (tmp_path / "run" / "summary.json").write_text('{"seconds": 1}')

    def summary(seconds: float) -> Any:
        return summary_of(simulated, 2, ["--a"], tmp_path / "run", time.time() + seconds)

    assert summary(0) is None and not started
    assert summary(60) is None and (tmp_path / "run" / "checkpoints").exists()
    assert summary(60) == summary(0) == {"seconds": 1} and not (tmp_path / "run" / "checkpoints").exists()
    assert [words[:2] for words in started] == [["--a", "--minutes"]] * 2 and 0.9 < float(started[0][2]) <= 1
    with pytest.raises(SystemExit, match="75"):
        main([*PYSOURCE, "--methods", "dense", "fp16", "--simulate", "--minutes", "0", "--keep", str(tmp_path)])
    assert "2 of 2 runs are not finished: the same command continues" in capsys.readouterr().out


def test_what_a_comparison_needs_is_said_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, message in (
        (["--model", "tiny"], "add --task pysource"),
        ([*PYSOURCE, "--minutes", "8"], "--minutes needs --keep FOLDER"),
        ([*PYSOURCE, "--device", "cuda"], "torch finds no GPU here"),
        (["--device", "cuda", "--methods", "adpsgd"], "cannot be simulated"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert message in capsys.readouterr().err
