"""The study of sizes: its data, its search of learning rates, its runs, which continue exactly, its table."""

import json
import signal
import sys
import threading
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refuse

from benchmarks import scaling_study as study
from benchmarks._batched_ranks import BatchedRun
from benchmarks._runs import simulate
from benchmarks._scaling_plan import (
    ARMS,
    QUEUE,
    SIZES,
    Run,
    exponent,
    next_rates,
    optimum,
    transferred_rate,
    wanted,
)
from dgc_datasets import PackageSources, package_sources
from dgc_training.config import load
from dgc_training.faults.interruption import Interruption
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.build import build

TEXT = "def f(x):\n    return x + 1\n"
Printed = pytest.CaptureFixture[str]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library and a package of some files each, in place of the installed ones."""
    library, site = tmp_path / "lib", tmp_path / "site"
    for root, number in product((library, site / "one"), range(40)):
        (root / "sub").mkdir(parents=True, exist_ok=True)
        (root / "sub" / f"m{number}.py").write_text(TEXT * 20 + f"# {root.name} {number}\n")
    (site / "one" / "sub" / "copy.py").write_bytes((site / "one" / "sub" / "m1.py").read_bytes())
    for name in (
        "test_a.py",
        "b_test.py",
        "conftest.py",
        "version.py",
        "_vendor/c.py",
        "testing/d.py",
        "tests/e.py",
    ):
        (site / "one" / name).parent.mkdir(exist_ok=True)
        (site / "one" / name).write_text("left_out\n" * 100)
    monkeypatch.setattr(package_sources, "PACKAGES", {"one": ("One", "1.0")})
    monkeypatch.setattr(package_sources, "version", {"One": "1.0+cpu"}.__getitem__)
    paths = {"stdlib": str(library), "purelib": str(site)}
    monkeypatch.setattr(package_sources.sysconfig, "get_paths", lambda: paths)
    return tmp_path


def test_sources_of_packages_are_tokenized_once_and_their_tests_and_copies_are_left_out(packages: Path) -> None:
    root = str(packages / "data")
    data = PackageSources(64, root=root)
    assert data["train"].dtype == torch.uint8 and len(data["train"]) > len(data["test"]) > 0
    # each character of 80 files of 540 to 551 characters is in one of the splits
    files = package_sources.files_used()
    assert len(files) == data.about["files"] == 80 and "left_out" not in str(files)
    assert sum(data.about["characters"].values()) == sum(len(content) for _, content in files)
    # the same files have the same hash, and are not read again
    (packages / "site" / "one" / "sub" / "m2.py").write_text("another = 1\n")
    again = PackageSources(64, test_tokens=100, root=root)
    assert again.about == data.about and torch.equal(again["test"], data["test"][:100])
    other = PackageSources(64, root=str(packages / "other"))
    assert other.about["sha256"] != data.about["sha256"]


def test_subwords_keep_every_character_of_the_sources(packages: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    words = " ".join(f"name{i}_{i * i}" for i in range(300))
    for file in (packages / "lib" / "sub").iterdir():
        file.write_text(f"{words}\n\n\t  \u03b1 = '{file.name}'  \n")
    data = PackageSources(600, subwords=True, root=str(packages / "data"))
    folder = packages / "data" / "subwords-600"
    processor: Any = SentencePieceProcessor(model_file=str(folder / "subwords.model"))
    texts = package_sources.split(package_sources.files_used())
    for name, tokens in data.items():
        assert tokens.dtype == torch.int16 and processor.decode(tokens.tolist()) == "".join(texts[name])
    assert len(data["train"]) < data.about["characters"]["train"]


def test_other_versions_of_packages_are_refused_with_what_to_install(packages: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(package_sources, "version", {"One": "2.0"}.__getitem__)
    refuse(r"install One==1\.0 \(2\.0\)", PackageSources, root=str(packages / "data"))
    refuse("dataset.vocabulary_size is 300; it must be from 2 to 256", PackageSources, 300)
    refuse("dataset.vocabulary_size is 300; it must be from 512 to 32767", PackageSources, 300, subwords=True)
    refuse("dataset.test_tokens is 1", PackageSources, test_tokens=1)


# --- plan -----------------------------------------------------------------------------------------


def test_a_search_ends_when_both_neighbours_of_the_best_rate_are_worse() -> None:
    loss = {0.001 * 2**i: (i - 2.2) ** 2 for i in range(-2, 8)}
    found: dict[float, float] = {}
    while rates := next_rates(found, 0.016):
        found |= {rate: loss[rate] for rate in rates}
    assert sorted(found) == [0.002, 0.004, 0.008, 0.016]
    assert optimum(found) == pytest.approx(0.001 * 2**2.2)  # of a parabola, exactly
    # a search without an end stops, and its best rate is the optimum
    falling = {0.001 * 2**i: float(-i) for i in range(6)}
    assert next_rates(falling, 0.002) == [] and optimum(falling) == 0.032


def test_rates_fall_as_a_power_of_the_parameters_that_both_smaller_sizes_give() -> None:
    """Losses with optima at c N**-0.3 of every arm give the power, and the rate of the largest size."""
    losses = {}
    for size, arm in product(QUEUE[:2], ARMS):
        best = 0.4 * SIZES[size].parameters ** -0.3
        for octave in range(-8, 3):
            rate = 0.006 * 2.0**octave
            losses[Run(size, arm, rate, 0)] = 1 + float(np.log2(rate / best)) ** 2
    for optimizer in ("adamw", "muon"):
        assert exponent(losses, optimizer, QUEUE[:2]) == pytest.approx(0.3)
    expected = 0.4 * SIZES["8m"].parameters ** -0.3
    assert transferred_rate(losses, SIZES["8m"], ARMS["int8"]) == pytest.approx(expected, rel=0.05)


def test_the_queue_has_every_arm_and_seed_and_ends() -> None:
    """With losses that depend on the rate alone: all arms with 3 seeds, size by size."""
    losses: dict[Run, float] = {}
    order = []
    while run := next(wanted(losses, QUEUE, list(ARMS)), None):
        losses[run] = 1 + float(np.log2(run.rate / 0.004)) ** 2
        order.append(run)
    assert [size for size in QUEUE for run in order if run.size == size] == [run.size for run in order]
    for size, arm in product(QUEUE, ARMS):
        runs = [run for run in order if (run.size, run.arm) == (size, arm)]
        seeds = [run.seed for run in runs if run.rate == min((losses[r], r.rate) for r in runs)[1]]
        assert sorted(seeds) == list(range(SIZES[size].seeds)), (size, arm)
        assert len(runs) == (1 if size == "8m" else 5)


def test_every_size_and_arm_is_built_with_the_parameters_that_the_table_says(tmp_path: Path) -> None:
    for size, arm in zip(cycle(SIZES), ARMS, strict=False):  # all sizes, all arms
        words = study.to_train(Run(size, arm, 0.008, 1), tmp_path / "run", str(tmp_path))
        args, overrides = parse_arguments(words)
        tree = load(args.configs, overrides)
        with torch.device("meta"):
            model = build(tree.model)
        assert sum(p.numel() for p in model.parameters()) == SIZES[size].parameters
        assert (tree.train.optimizer.lr, tree.seed, tree.train.precision) == (0.002, 1, "bf16")
        steps = tree.train.num_epochs * tree.task.steps_per_epoch
        assert steps == SIZES[size].steps == tree.train.scheduler.total_steps
        assert 4 * tree.train.batch_size * tree.task.context * steps == SIZES[size].tokens
        assert model.context == tree.task.context


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """Tokens in place of the packages' tokens, which take half a minute."""
    folder = tmp_path / "data" / "characters-128"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    sizes = {"train": 150_000, "test": 4096}
    for name, size in sizes.items():
        steps = random.integers(1, 4, size)
        np.cumsum(steps, dtype=np.int64).__mod__(97).astype(np.uint8).tofile(folder / f"{name}.bin")
    about = {"sha256": "of the test", "tokens": sizes, "characters": sizes}
    (folder / "sources.json").write_text(json.dumps(about))
    return str(tmp_path / "data")


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of the steps, of all runs together, in which a run is stopped."""
    steps, begun = list[int](), [0]

    def watch(self: Any) -> None:
        if self.transport.rank == 0:
            begun[0] += 1
            if begun[0] in steps:
                self.received = signal.SIGALRM

    monkeypatch.setattr(Interruption, "_watch_time", watch)
    yield steps


# a second moment that freezes in step 10, and exchanges of models after steps 20, 40 and 60
@pytest.mark.parametrize("arm", ["dgc-adam", "muon-local-2-bits-h20"])
def test_a_run_that_is_cut_in_the_middle_continues_with_the_same_bits(
    arm: str, tmp_path: Path, tokens: str, cut: list[int]
) -> None:
    run = Run("tiny", arm, 0.006, 0)

    def train(keep: str) -> Any:
        return study.train(run, tmp_path / keep, tokens, 1e12)

    whole = train("whole")
    cut += [30 + SIZES["tiny"].steps + 8]  # in the middle of an epoch; checks after epochs count too
    stopped, continued = train("cut"), train("cut")
    assert stopped is None
    same = ("bits_per_character", "curve", "tokens", "wire_bytes", "payload_bytes", "train", "data")
    assert {key: continued[key] for key in same} == {key: whole[key] for key in same}
    assert len(whole["curve"]) == 8 and whole["tokens"] == SIZES["tiny"].tokens
    assert whole["cpu_ms_per_step"] > 0 and continued["cpu_ms_per_step"] is None
    assert whole["command"].endswith(f"--run {run.name}") and str(tmp_path) not in whole["train"]
    assert not list(tmp_path.glob("*/*/checkpoints"))


def test_the_command_trains_what_is_missing_and_leaves_runs_of_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, names = list[str](), [Run("tiny", arm, 0.006, 0).name for arm in ("muon", "dense", "int8")]
    results, keep = tmp_path / "results", tmp_path / "keep"

    def train(run: Run, *_: Any) -> Any:
        trained.append(run.name)
        if run.arm == "int8" and trained.count(run.name) == 1:
            return None  # it was stopped
        return {"bits_per_character": 1.0, "minutes": 1.0, "data": {"sha256": "a"}, **vars(run)}

    monkeypatch.setattr(study, "train", train)
    monkeypatch.setattr(study, "POLL", 0.05)
    words = ["--model", "tiny", "--arms", "muon", "dense", "int8"]
    words += ["--results", str(results), "--keep", str(keep)]
    with study.claimed(keep / names[0]) as is_mine:
        assert is_mine
        with pytest.raises(SystemExit, match="75"):
            study.main(words)
        assert trained == names[1:]
        with pytest.raises(SystemExit, match="75"):  # it waits for the other process until the time is over
            study.main([*words, "--minutes", "0.001"])
        assert trained == [*names[1:], names[2]]
    study.main(words)
    assert trained[3:] == names[:1] and sorted(file.stem for file in results.iterdir()) == sorted(names)
    study.main([*words, "--run", names[0]])  # finished
    assert len(trained) == 4
    study.main([*words, "--run", "tiny-dense-lr0.02-seed3"])
    assert trained[4:] == ["tiny-dense-lr0.02-seed3"]
    study.main([*words, "--arms", "muon", "--rate", "0.001"])
    assert trained[5:] == ["tiny-muon-lr0.001-seed0"]
    refuse("'30m-x-lr0.1-seed0' is not SIZE-ARM-lrRATE-seedN", Run.of, "30m-x-lr0.1-seed0")


def test_batched_ranks_train_as_ranks_of_their_own_do_and_send_the_same_bytes(tmp_path: Path, tokens: str) -> None:
    """Gradients in 4 bits, whose ranks share a model, and local steps: equal but for rounding."""
    for arm in ("muon-4-bits", "muon-local-2-bits-h20"):
        run = Run("tiny", arm, 0.006, 0)
        expected = study.train(run, tmp_path, tokens, 1e12)
        found = study.train_batched(run, tokens, torch.device("cpu"))
        assert expected is not None and found["wire_bytes"] == expected["wire_bytes"]
        same = ("payload_bytes", "dense_wire_bytes", "tokens", "train", "data")
        assert {key: found[key] for key in same} == {key: expected[key] for key in same}
        bits, own = ([at["bits_per_character"] for at in of["curve"]] for of in (found, expected))
        # the first exchange of models is after step 20: until then there is rounding alone
        assert bits[:2] == pytest.approx(own[:2], abs=2e-3) and bits == pytest.approx(own, rel=0.02)
        assert own[0] - own[-1] > 0.5


@pytest.mark.parametrize("arm", ["muon", "muon-local-2-bits-h20"])
def test_batched_ranks_make_a_third_of_the_calls(arm: str, tmp_path: Path, tokens: str) -> None:
    """Calls of Python and of C functions in a step, of a model of 12 layers."""

    def calls(act: Any) -> int:
        count = [0]

        def watch(frame: Any, event: str, _: Any) -> None:
            count[0] += event in ("call", "c_call")

        threading.setprofile(watch)
        sys.setprofile(watch)
        try:
            act()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        return count[0]

    def words(steps: int) -> list[str]:
        run = Run("tiny", arm, 0.006, 0)
        changes = {"model.layers": 12, "task.steps_per_epoch": steps, "train.num_epochs": 1, "train.batch_size": 1}
        changes |= {"train.scheduler.warmup_steps": 1}
        own = study.to_train(run, tmp_path / str(steps), tokens)
        return [*own, *(f"--configs.{key}={value}" for key, value in changes.items())]

    def batched(steps: int) -> None:
        args, overrides = parse_arguments(words(steps))
        BatchedRun(load(args.configs, overrides), 4, torch.device("cpu")).train()

    found = []
    for act in (lambda steps: simulate(4, words(steps)), batched):
        act(2)  # imports
        found.append((calls(lambda act=act: act(8)) - calls(lambda act=act: act(4))) / 4)
    assert found[0] > 3 * found[1] > 0, found


# --- what is drawn --------------------------------------------------------------------------------


def write_results(folder: Path, sha256: str = "a") -> None:
    """Results of all sizes, in which an arm's gap is its number in the list, and AdamW is 10 % behind Muon."""
    folder.mkdir(exist_ok=True)
    losses: dict[Run, float] = {}
    gap = {arm: 1 + number / 100 for number, arm in enumerate(ARMS)} | {"dense": 1.1}
    while run := next(wanted(losses, QUEUE, list(ARMS)), None):
        bits = (2 + run.seed) * gap[run.arm] * (1 + float(np.log2(run.rate / 0.004)) ** 2)
        losses[run] = bits
        curve = [
            {"step": step, "bits_per_character": bits * (1 + (2048 - step) / 2048), "wire_bytes": 10**6 * step}
            for step in range(256, 2049, 256)
        ]
        sent = {"wire_bytes": 2 * 10**9, "dense_wire_bytes": 8 * 10**9, "steps": 2048, "cpu_ms_per_step": 50.0}
        result = {
            "size": run.size,
            "arm": run.arm,
            "rate": run.rate,
            "seed": run.seed,
            "minutes": 1.0,
            "curve": curve,
        }
        result |= {"bits_per_character": bits, "data": {"sha256": sha256}, **sent}
        (folder / f"{run.name}.json").write_text(json.dumps(result))


def test_the_table_and_the_pictures_come_from_the_results(tmp_path: Path, capsys: Printed) -> None:
    write_results(tmp_path / "results")
    study.main(["--results", str(tmp_path / "results"), "--draw", str(tmp_path)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(found["sizes"]) == list(QUEUE) and found["data"] == ["a"]
    row = found["sizes"]["2m"]["4 bits per step, Muon"]
    assert row["to_muon"] == pytest.approx(2.0) and row["error_muon"] == pytest.approx(0.0, abs=1e-9)
    assert row["to_adamw"] == pytest.approx(100 * (1.02 / 1.1 - 1)) and row["seeds"] == 3
    assert row["dense_over_wire"] == 4.0
    gap, seconds = ((tmp_path / f"size_{name}.svg").read_text() for name in ("gap", "seconds"))
    assert all(arm.title in gap for arm in ARMS.values() if arm.method != "muon")
    assert all(arm.title in seconds for arm in ARMS.values())


def test_seconds_to_a_loss_are_those_of_the_steps_until_then_and_their_bytes() -> None:
    curve = [{"step": 100, "bits_per_character": 3.0}, {"step": 200, "bits_per_character": 2.0}]
    assert (
        study.step_of(curve, 2.5) == 150 and study.step_of(curve, 3.0) == 100 and study.step_of(curve, 1.9) is None
    )
    run = {
        "seed": 0,
        "arm": "int8",
        "curve": curve,
        "steps": 200,
        "wire_bytes": 2 * 10**8,
        "cpu_ms_per_step": 20.0,
    }
    base = {"seed": 0, "bits_per_character": 2.5}
    # 150 steps of 20 ms and 1 MB: 8 ms at 1 Gbit/s
    assert study.seconds_to_reach([run], [base], 1e9) == pytest.approx(150 * 0.028)
    dense = {**run, "arm": "dense"}
    assert study.seconds_to_reach([dense], [base], 1e9) == pytest.approx(150 * 0.024)
    assert study.seconds_to_reach([run], [{**base, "bits_per_character": 1.0}], 1e9) is None


def test_results_of_different_data_are_refused(tmp_path: Path) -> None:
    write_results(tmp_path)
    file = tmp_path / "8m-muon-lr0.0037-seed0.json"
    file = file if file.exists() else next(tmp_path.glob("8m-muon-lr*.json"))
    file.write_text(file.read_text().replace('"sha256": "a"', '"sha256": "b"'))
    with pytest.raises(SystemExit, match="different data"):
        study.main(["--results", str(tmp_path)])
