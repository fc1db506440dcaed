"""The output of a run: comparison of bytes, changed settings, width of the table, colour; the help of train.py."""

import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from environment import patient
from pytest import CaptureFixture, MonkeyPatch
from simulated import CNN, train_in

from dgc_training.checkpoint.progress import TrainingProgress
from dgc_training.config import load
from dgc_training.config.layers import FLAGS
from dgc_training.config_files import REPOSITORY
from dgc_training.logging.console import Console, clock, wants_colour
from dgc_training.logging.formatting import against_dense, changed_settings, human_bytes, plural, result_text
from dgc_training.logging.summary import summarize, table
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.installed import first_line
from scripts.demo import comparison
from scripts.launch import prepare

STACK = [CNN, "configs/dgc/wm5.py", "configs/dgc/fp16.py"]
PRINTED: dict[str, tuple[float, str]] = {  # values of an epoch, and their columns
    "train/loss": (1.25, "1.2500"),
    "acc/test_top1": (100.0, "100.00"),
    "train/lr": (0.0123456, "0.0123"),
    "compression/compress_ratio": (0.0158489, "0.01585"),
    "bytes/wire_per_step": (907176.0, "907kB"),
    "bytes/wire_over_dense": (2 / 3, "66.7%"),
    "time/samples_per_second": (123456.0, "123456"),
}
VALUES = {name: value for name, (value, _) in PRINTED.items()} | {"bytes/dense_wire_per_step": 1360764.0}


def test_formatting() -> None:
    assert [result_text(x) for x in (98.8888, 10, 2.34567, 0)] == ["98.89", "10.00", "2.3457", "0.0000"]
    sizes = {907: "907 B", 2820: "2.82 kB", 999_600: "1.00 MB", 1_360_764: "1.36 MB", 15_020_000: "15.0 MB"}
    sizes |= {0: "0 B", 3_000_000_000_000: "3.00 TB"}
    assert {size: human_bytes(size) for size in sizes} == sizes
    assert (plural(1, "rank"), plural(2, "rank")) == ("1 rank", "2 ranks")
    dense = "a dense fp32 all-reduce"
    words = {100 / 215: f"215 times fewer than {dense}", 99: f"as many as {dense}", 0: "nothing was sent"}
    words[200] = f"2 times the bytes of {dense}"
    assert {wire: against_dense(wire, 100) for wire in words} == words
    assert [clock(seconds) for seconds in (0.4, 59.6, 3725.0)] == ["00:00", "01:00", "1:02:05"]


def test_the_summary_compares_wire_with_wire() -> None:
    sent: dict[str, Any] = {"payload_bytes": 8_060_000, "wire_bytes": 15e6, "dense_wire_bytes": 150e6}
    progress = TrainingProgress(epoch=1, samples=10, **sent)
    output = table(summarize("run", progress, ranks=4, metric=None))
    assert "payload per rank     8.06 MB" in output
    assert "wire bytes per rank  15.0 MB, 10 times fewer than a dense" in output and "150 MB" in output
    progress = TrainingProgress(epoch=1, samples=10, payload_bytes=163_000_000)
    alone = summarize("run", progress, ranks=1, metric=None)
    assert alone["wire_over_dense"] is None and "163" not in table(alone)
    assert "0 B (1 process: nothing is sent)" in table(alone)
    # the demonstration compares both runs

    def run(accuracy: Any, wire: Any) -> Any:
        sent = {"wire_bytes": wire, "dense_wire_bytes": 3e8, "wire_over_dense": wire / 3e8}
        return {"final": {"acc/test_top1": accuracy}, **sent, "seconds": 9.5}

    output = comparison({"dense": run(99.5, 3e8), "DGC": run(99.0, 2e7)})
    rows = [line.split() for line in output.splitlines()[1:3]]
    assert rows == [["dense", "99.50%", "300", "MB", "100", "9.5"], ["DGC", "99.00%", "20.0", "MB", "6.67", "9.5"]]
    assert "15 times fewer" in output and "-0.50 points" in output


def test_tables_and_changed_settings_fit_80_columns_and_a_file_gets_no_colour(capsys: CaptureFixture[str]) -> None:
    screen = Console(0, 100, 12, "acc/test_top1")
    screen.step(0, 1, "")
    screen.end_epoch(100, VALUES, best=True)
    screen.end_epoch(100, VALUES, best=False)
    output = capsys.readouterr()
    head, best, row = output.out.splitlines()
    assert "\x1b" not in output.out and not output.err and best == row and len(head) == len(row) <= 80
    assert head.split() == "epoch loss test_top1 lr compress_ratio wire/step wire/dense samples/s".split()
    assert row.replace(" kB", "kB").split() == ["100/100", *(text for _, text in PRINTED.values())]
    # changed settings
    lines = changed_settings(load(STACK, ["--configs.train.num_epochs=7", "--configs.seed=3"])).splitlines()
    words = " ".join(" ".join(lines).split())
    present = ("train.num_epochs 7", "seed 3", "values=fp16", "CosineAnnealingLR(T_max=2)")
    absent = ("timeout", "log_every", "requires", "selector", "None")
    assert [word for word in (*present, *absent) if word in words] == [*present]
    assert len(lines) < 20 and max(map(len, lines)) <= 80


def test_a_line_in_ten_seconds(capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("dgc_training.logging.console.time.perf_counter", lambda: now)
    screen = Console(0, 3, 100, None)
    for step in range(1, 31):
        now += 3.0
        screen.step(0, step, "loss 0.5" if step > 4 else "")
    assert capsys.readouterr().out.splitlines()[:3] == [
        "  epoch 1/3, step 4/100, 04:48 left",
        "  epoch 1/3, step 8/100, 04:36 left: loss 0.5",
        "  epoch 1/3, step 12/100, 04:24 left: loss 0.5",
    ]
    now += 60.0
    screen.step(1, 1, "")  # the rate of another epoch says nothing of this one
    assert capsys.readouterr().out == "  epoch 2/3, step 1/100\n"


def test_the_first_line_of_a_run(tmp_path: Path) -> None:
    alone = ["/a/train.py", "--configs", "x.py"]
    second = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    assert first_line(alone, {}) == "train.py: 1 process; loading PyTorch"
    ranks = first_line(alone, {**second, "OMPI_COMM_WORLD_RANK": "0"})
    assert ranks == "train.py: 4 ranks started by mpirun; loading PyTorch"
    assert first_line(alone, second) is None and first_line(["pytest"], {}) is None
    assert first_line([*alone, "--print-config"], {}) is None and first_line([*alone, "--evaluate"], {}) is None
    # a process that cannot load PyTorch has printed the line
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    words = [sys.executable, "-P", str(REPOSITORY / "train.py"), "--configs", CNN]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=patient(60))
    assert (done.returncode, done.stdout) == (7, "train.py: 1 process; loading PyTorch\n"), done.stderr


def test_colour_and_bar_of_a_terminal(capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    """mpirun forwards the two streams independently. A bar on the other stream would overwrite rows."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for kind, expected in (("dumb", False), ("xterm", True)):
        monkeypatch.setenv("TERM", kind)
        assert wants_colour("/dev/pts/0") is expected and not wants_colour(None)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour("/dev/pts/0")
    monkeypatch.setattr("dgc_training.logging.console.terminal_of", lambda descriptor: "/dev/pts/0")
    monkeypatch.setattr("dgc_training.logging.console.columns", lambda terminal: 70)
    screen = Console(0, 3, 12, "acc/test_top1")
    screen.step(0, 1, "loss 0.5")
    screen.end_epoch(1, VALUES, best=True)
    output = capsys.readouterr()
    _, bar, blank, head, row = output.out.replace("\n", "\r").rstrip("\r").split("\r")
    assert bar.startswith("epoch 1/3") and "/12" in bar and len(bar) <= 70 and not blank.strip()
    assert head.startswith("epoch ") and row.startswith("  1/3") and not output.err
    silent = Console(1, 3, 12, "acc/test_top1")  # of another rank
    silent.step(0, 1, "")
    silent.end_epoch(1, VALUES, best=True)
    assert capsys.readouterr() == ("", "")


TELL = "from dgc_training.launcher import terminal_of; print(terminal_of(1), terminal_of(2))"


@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.horovod)])
def test_the_terminal_is_found_under_mpirun(launched: Any) -> None:
    """Open MPI gives each rank a pseudo-terminal. The output of mpirun decides."""
    command, environment = prepare(1, ["-c", TELL])
    command = command if launched else [sys.executable, "-c", TELL]
    environment |= {"PYTHONPATH": str(REPOSITORY)}
    master, slave = pty.openpty()
    name, tagged = os.ttyname(slave), [command[0], "--tag-output", *command[1:]]
    untagged = [*tagged[:2], "-mca", "orte_tag_output", "0", *command[1:]]  # as horovodrun with --mpi-args
    rows = [(command, slave, name), (command, subprocess.PIPE, "None")]
    for words, errors, second in rows + [(tagged, slave, "None"), (untagged, slave, name)] * launched:
        options: Any = {"env": environment, "stdout": subprocess.PIPE, "stderr": errors, "timeout": patient(60)}
        found = subprocess.run(words, text=True, **options).stdout
        assert re.findall(r"None|/dev/\S+", found) == ["None", second], words
    os.close(slave)
    os.close(master)


def test_what_a_run_says_of_its_bytes(capsys: CaptureFixture[str], tmp_path: Path) -> None:
    """One process sends nothing, a dense warm-up is explained, and gossip may send more than dense."""
    gossip = [CNN, "configs/gossip/dpsgd.py", "configs/topology/full.py"]
    outputs, quick = list[str](), ["train.num_epochs=1", "train.batch_size=90", "model.width=8"]
    for stack, size in (([CNN], 1), (STACK, 4), (gossip, 4)):
        train_in(tmp_path / str(len(outputs)), stack, quick, size)
        outputs.append(capsys.readouterr().out)
    alone, warmup, more = outputs
    assert "1 rank on cpu" in alone and alone.count("1 process: nothing is sent") == 2 and "MB" not in alone
    assert "at compress_ratio 0.2512 sparse messages cost more" in warmup
    assert "100% of the gradient went dense" in warmup
    assert max(len(line) for line in warmup.splitlines() if str(tmp_path) not in line) <= 80
    assert "2 times the bytes of a dense fp32 all-reduce" in more


def test_the_help_has_a_working_example_and_the_file_of_all_keys(capsys: CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    text = capsys.readouterr().out
    assert all(flag in text for flag in FLAGS)
    assert "configs/__init__.py" in text and (REPOSITORY / "configs/__init__.py").is_file()
    examples = re.findall(r"^ +.*python train\.py (.+)$", text, flags=re.MULTILINE)
    assert all(any(word in example for example in examples) for word in ("--print-config", "--configs."))
    for example in examples:
        args, overrides = parse_arguments(shlex.split(example))
        load(args.configs, overrides)
