"""Runs that are resumed at any step, by as many ranks or others; runs that do not fit; the output of a run."""

import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cases import case
from environment import patient
from pytest import CaptureFixture, MonkeyPatch
from simulated import CNN, assert_same_end, rewound, saved, summary_of, train_in

from dgc import kernels
from dgc_training.checkpoint.progress import TrainingProgress
from dgc_training.config import ConfigError, load
from dgc_training.config.layers import FLAGS
from dgc_training.config_files import REPOSITORY
from dgc_training.logging.console import Console, clock, wants_colour
from dgc_training.logging.formatting import against_dense, changed_settings, human_bytes, plural, result_text
from dgc_training.logging.summary import summarize, table
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.installed import first_line
from scripts.demo import comparison
from scripts.launch import prepare

pytestmark = pytest.mark.usefixtures("no_type_checks")
DIGITS = "train.batch_size=64 train.warmup_lr_epochs=1 data.num_threads_per_worker=1 model.width=8".split()
TWICE = [*DIGITS, *"train.num_epochs=2 train.checkpoint_every=5 train.check_replicas_every=4".split()]
# an epoch has 5 steps of two passes each
SCHEDULED = [*DIGITS, *"train.warmup_lr_epochs=0 train.num_epochs=3 train.checkpoint_every=3".split()]
SCHEDULED.append("train.num_batches_per_step=2")
# an epoch has 12 steps
ADAM = [*DIGITS, *"train.warmup_lr_epochs=0 train.num_epochs=1 train.checkpoint_every=4".split()]
ONEBIT_ADAM = [*ADAM, "train.optimizer.freeze_step=6"]
ZERO_ONE = "var_freeze_step=4 var_update_scaler=1 local_step_scaler=1 local_step_clipper=4".split()
ZERO_ONE = [*ADAM, "train.check_replicas_every=0", *(f"train.local.{word}" for word in ZERO_ONE)]
GOSSIP = [*DIGITS, *"train.batch_size=90 train.num_epochs=2 train.checkpoint_every=3 train.recorder=null".split()]
MACHINES = [*DIGITS, *"train.num_epochs=1 train.checkpoint_every=3 train.check_replicas_every=1".split()]
LSTM = "dataset.root=ROOT dataset.vocabulary_size=20 task.context=8 task.steps_per_epoch=5 model.width=16".split()
LSTM += "model.layers=2 model.dropout=0.0 train.num_epochs=2 train.batch_size=4 train.checkpoint_every=2".split()
LSTM += "train.check_replicas_every=2 data.num_threads_per_worker=1".split()
NUMWORDS = "dataset.root=ROOT dataset.train_numbers=400 dataset.test_numbers=5 model.dropout=0.2".split()
NUMWORDS += "train.batch_size=400 train.num_batches_per_step=2 train.num_epochs=2 train.checkpoint_every=3".split()
NUMWORDS.append("data.num_threads_per_worker=1")
WM0, WM5, ZERO_ONE_ADAM = "configs/dgc/wm0.py", "configs/dgc/wm5.py", "configs/contrib/zero_one_adam.py"
WIKITEXT, TRANSLATION = "configs/wikitext/lstm.py", "configs/numwords/tiny.py"
MULTISTEP = "train: {scheduler: {_target_: torch.optim.lr_scheduler.MultiStepLR, milestones: [1]}}"
ONE_CYCLE = "train: {scheduler: {_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: 0.2, total_steps: 40, "
ONE_CYCLE += "cycle_momentum: false}, schedule_lr_per_epoch: false}"
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
TELL = "from dgc_training.launcher import terminal_of; print(terminal_of(1), terminal_of(2))"


def between_two_exchanges(files: Any) -> None:
    """Step 8 is the third of four local steps."""
    states = [files[f"rank{rank}"]["compression"]["ZeroOneSteps.0"] for rank in range(2)]
    assert states[0]["local_steps"] == 3
    assert any(not torch.equal(z, states[1]["z"][name]) for name, z in states[0]["z"].items())


def in_the_middle_of_a_row(files: Any, dtype: torch.dtype = torch.float32) -> None:
    """With the LSTM's state, after the five steps of the first epoch and two of the second."""
    task = files[max(files.keys() - {"shared"})]["task"]
    assert task["chunk"] == 5 + 2 - 1 and bool(task["state"][0].any())
    assert [(part.shape, part.dtype) for part in task["state"]] == [((2, 4, 16), dtype)] * 2


class Row(NamedTuple):
    name: str
    stack: Sequence[str]  # its config files; texts with a brace are the content of one
    settings: Sequence[str]
    starts: Sequence[str]  # the checkpoints that it is resumed from
    size: int = 2
    local_size: int | None = None
    check: Callable[[Any], None] | None = None  # of the files of the last of them
    others: Sequence[Any] = ()  # (ranks, ranks of a machine) that resume the first of them too


MID, SCHEDULE_STARTS, ADAM_STARTS = ("e0001s00003",), ("e0002", "e0002s00003"), ("e0000s00008", "e0000s00004")
LSTM_ROW: Any = {"starts": ("e0001s00002",), "check": in_the_middle_of_a_row}
ON_3: Any = {"others": [(3, None)]}
BF16 = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
IN_BF16 = partial(in_the_middle_of_a_row, dtype=BF16)
ROWS = [
    Row("DGC", [CNN, WM5], TWICE, ("e0001s00005", "e0001s00010"), **ON_3),
    Row("after a milestone", [CNN, WM5, MULTISTEP], SCHEDULED, SCHEDULE_STARTS),
    Row("one cycle", [CNN, WM5, ONE_CYCLE], SCHEDULED, SCHEDULE_STARTS),
    Row("1-bit Adam in either stage", [CNN, "configs/adam/onebit_adam.py"], ONEBIT_ADAM, ADAM_STARTS, **ON_3),
    Row("0/1 Adam", [CNN, "configs/adam", ZERO_ONE_ADAM], ZERO_ONE, ADAM_STARTS[:1], check=between_two_exchanges),
    Row("SGP", [CNN, "configs/gossip/sgp.py"], GOSSIP, MID),
    Row("OSGP", [CNN, "configs/gossip/osgp.py"], GOSSIP, MID, **ON_3),
    Row("DPSGD", [CNN, "configs/gossip/dpsgd.py"], GOSSIP, MID),
    Row("two machines", [CNN, WM0], MACHINES, ("e0000s00003",), 4, 2, others=[(2, 2), (4, 4), (6, 3)]),
    Row("LSTM with dropout", [WIKITEXT], [*LSTM, "model.dropout=0.2"], **LSTM_ROW),
    Row("LSTM in bf16", [WIKITEXT], [*LSTM, "train.precision=bf16"], size=1, **LSTM_ROW | {"check": IN_BF16}),
    Row("LSTM with DGC", [WIKITEXT, WM5], LSTM, **LSTM_ROW),
    Row("LSTM with PowerSGD", [WIKITEXT, "configs/powersgd/rank1.py"], LSTM, **LSTM_ROW),
    Row("translation", [TRANSLATION], NUMWORDS, (*MID, "e0001"), size=1),
    Row("translation with DGC", [TRANSLATION, "configs/numwords/sgd.py", WM0], NUMWORDS, (*MID, "e0001"), size=1),
]


def write_wikitext(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    line = " the old man and the sea met <unk> again \n"
    (folder / "wiki.train.tokens").write_text(line * 100)
    (folder / "wiki.valid.tokens").write_text(line * 7 + " a word of its own \n")
    (folder / "wiki.test.tokens").write_text(line * 3)
    return folder


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_resumed_run_ends_bit_identical(row: Row, tmp_path: Path) -> None:
    data, schedule, whole = write_wikitext(tmp_path / "data"), tmp_path / "schedule.yaml", tmp_path / "whole"
    schedule.write_text(row.stack[-1])
    stack = [str(schedule) if "{" in file else file for file in row.stack]
    settings = [word.replace("ROOT", str(data)) for word in row.settings]
    train_in(whole, stack, settings, row.size, row.local_size)
    for start in row.starts:
        again = rewound(whole, tmp_path / start, start)
        if row.check is not None:
            row.check(saved(again))
        torch.manual_seed(12345)
        train_in(again, stack, settings, row.size, row.local_size)
        with case(start):
            assert_same_end(whole, again)
            assert summary_of(whole)["best"] == summary_of(again)["best"]
    for size, local_size in row.others:
        again = rewound(whole, tmp_path / f"{size} ranks", row.starts[0])
        with pytest.warns(UserWarning) as warned:
            train_in(again, stack, settings, size, local_size)
        text = " ".join(str(warning.message) for warning in warned)
        assert "redistributed so that their mean over the ranks" in text and summary_of(again)["ranks"] == size
        for part in (f"saved by {row.size} ranks and is resumed by {size}", "random generators are seeded again"):
            assert (size == row.size) != (part in text)
        if row.name == "DGC":  # 5 steps of 2 ranks are 3 steps of 3 ranks. The rest of the epoch follows.
            assert summary_of(again)["samples"] == 1438 + 5 * 64 * 2 + (479 - 3 * 64) * 3


# what does not fit each experiment: files, a setting, and the message
ON_2_RANKS = {
    "digits/cnn": [
        ("topology/ring", "", "stack a file of configs/gossip before it"),
        ("dgc/wm5 gossip/sgp", "", "DGCCompressor; leave out the one or the other"),
        ("gossip/sgp dgc/wm5", "", "gossip/__init__.py needs dgc.compression.DenseCompressor; leave"),
        ("local/local_sgd dgc/wm5", "", "local/__init__.py needs dgc.comp"),
        ("gossip/sgp", "train.check_replicas_every=4", "train.check_replicas_every is 4"),
        ("contrib/choco dgc/wm5", "", "contrib/choco.py needs dgc.compression.DenseCompressor; leave"),
        ("contrib/powergossip dgc/wm5", "", "contrib/powergossip.py needs dgc.compression.DenseCompressor; leave"),
        ("gossip/sgp", "train.hierarchical=on", "stack configs/gossip/machines.py"),
        ("gossip/sgp topology/star", "train.gossip.graph.hub=7", "star with 2 ranks: hub"),
        ("gossip/adpsgd", "", r"connect\(point_to_point=True\)"),
        ("dgc/wm0 adam/onebit_adam", "", "train.dgc"),
        ("gossip/adpsgd", "train.checkpoint_every=5", "train.checkpoint_every null"),
        ("adam/dgc_adam quant/qsgd", "", "train.compression._target_"),
        ("adam/__init__ contrib/zero_one_adam quant/qsgd", "", "train.compression._target_"),
        ("contrib/zero_one_adam", "", "0/1 Adam needs Adam, .* stack configs/adam before"),
        ("adam/onebit_adam quant/qsgd", "", "train.compression._target_"),
        ("adam/__init__ contrib/zero_one_adam local/diloco", "", "train.local._target_"),
        ("adam/dgc dgc/wm0", "", "optimizer is torch.optim.AdamW"),
        ("adam/onebit_adam adam/dgc", "", "_target_"),
        ("adam/dgc adam/fp16", "", "has no steps that send gradients without compression"),
        ("", "train.hierarchical=maybe", "train.hierarchical is 'maybe', not auto, on or off"),
        ("", "model.num_classes=-3", r"model \(dgc_models\.DigitsCNN\): num_classes must be at least 1, not -3"),
        ("", "train.optimizer.lr=5e307", "the learning rate is .*e[+]308, which is not a finite fp32 number"),
        ("", f"train.batch_size={2**70}", r"train\.batch_size is 1180\d+; it must .* most 2147483647"),
        ("", "train.num_batches_per_step=2000", r"the training set has 1437 samples, too few for one step"),
        ("", f"seed={10**21}", r"seed is 10{21}; its magnitude must be less than 2\*\*62"),
        ("", "train.metric=acc/val", "'acc/val' is not a result; there are: acc/test_top1, acc/test_top5"),
        ("", "train.kernels=triton", "run on a GPU"),
        ("", "train.kernels=fast", "auto, reference, native"),
    ],
    "wikitext/lstm": [
        ("", "model.vocabulary_size=5", "the model's vocabulary has 5: set model.vocabulary_size"),
        ("", "task.context=0", "task.context is 0; it must be at least 1"),
        ("", "task.context=400", "too few for one step of 2 ranks x 4 rows"),
        ("", "train.clip_norm=0.0", "train.clip_norm is 0.0; it must be positive"),
        ("", "train.precision=fp8", "train.precision is 'fp8'; it must be one of fp32, bf16, fp16"),
        ("", "train.precision=fp16", "train.precision is fp16, which needs a GPU, and the device is cpu: use"),
        ("", "train.metric=perplexity/dev", "is not a result; there are: perplexity/val, loss/val"),
        ("", "dataset.root=/nowhere", "put the three files"),
        ("dgc/wm5", "train.clip_norm=1.0", r"train\.clip_norm limits averages"),
    ],
    "numwords/tiny": [
        ("", "model.max_length=12", "model.max_length is 12 tokens, fewer than the"),
        ("", "train.metric=acc/test_top1", "it must be one of translation/test_exact_match"),
        ("", "data.num_workers=2", "data.num_workers must be 0"),
        ("", "task.beams=0", "task.beams is 0"),
        ("", "model.vocabulary=50", "the model has 50 tokens .* set model.vocabulary to dataset.vocab"),
        ("", "train.criterion.ignore_index=-100", "ignore_index must be 0"),
        ("", "train.batch_size=10", "train.batch_size is 10 tokens, fewer than the"),
    ],
    "pysource/gpt": [("gossip/sgp", "train.precision=fp16", "every rank would have a loss scale of its own: use")],
}
ON_OTHERS = [
    (3, "gossip/sgp topology/bipartite_linear", "", "needs an even number of ranks, not 3"),
    (4, "gossip/dpsgd topology/star", "", "the shares that rank 0 receives sum to"),
]
BASES = {"digits/cnn": ["model.width=8"], "wikitext/lstm": LSTM, "numwords/tiny": NUMWORDS}


@pytest.mark.parametrize("base", ON_2_RANKS)
def test_what_does_not_fit_is_one_error(base: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    data = write_wikitext(tmp_path / "data")
    devices = ("cuda", "cpu") if base == "pysource/gpt" else ("cuda",)
    monkeypatch.setattr("dgc_training.stepping.FP16_DEVICES", devices)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernels._backend.cache_clear()  # tests of the Triton backend fill it
    rows: list[Any] = [(2, *row) for row in ON_2_RANKS[base]] + (ON_OTHERS if base == "digits/cnn" else [])
    for size, names, word, message in rows:
        monkeypatch.setattr(kernels, "_asked", "auto")
        settings = [word.replace("ROOT", str(data)) for word in BASES.get(base, [])] + [word] * bool(word)
        stack = [f"configs/{name}.py" for name in (base, *names.split())]
        with case(names, word), pytest.raises(ConfigError, match=message) as raised:
            train_in(tmp_path / "run", stack, settings, size)
        assert "\n" not in str(raised.value) and list(tmp_path.iterdir()) == [data]


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
    sent: dict[str, Any] = {"payload_bytes": 8_060_000, "wire_bytes": 15e6, "dense_wire_bytes": 150e6}
    progress = TrainingProgress(epoch=1, samples=10, **sent)
    output = table(summarize("run", progress, ranks=4, metric=None))
    assert "payload per rank     8.06 MB" in output
    assert "wire bytes per rank  15.0 MB, 10 times fewer than a dense" in output and "150 MB" in output
    progress = TrainingProgress(epoch=1, samples=10, payload_bytes=163_000_000)
    alone = summarize("run", progress, ranks=1, metric=None)
    assert alone["wire_over_dense"] is None and "163" not in table(alone)
    assert "0 B (1 process: nothing is sent)" in table(alone)
    progress = TrainingProgress(epoch=1, samples=10, **sent)
    group = summarize("run", progress, ranks=1, metric=None, rounds={"rounds": 31.0, "round_bytes": 4.8e5})
    assert group["rounds"] == 31 and "rounds of groups     31, 480 kB in the last one" in table(group)
    assert "wire bytes per rank  15.0 MB" in table(group) and "nothing is sent" not in table(group)
    # the demonstration compares both runs

    def run(accuracy: Any, wire: Any) -> Any:
        sent = {"wire_bytes": wire, "dense_wire_bytes": 3e8, "wire_over_dense": wire / 3e8}
        return {"final": {"acc/test_top1": accuracy}, **sent, "seconds": 9.5}

    output = comparison({"dense": run(99.5, 3e8), "DGC": run(99.0, 2e7)})
    rows = [line.split() for line in output.splitlines()[1:3]]
    assert rows == [["dense", "99.50%", "300", "MB", "100", "9.5"], ["DGC", "99.00%", "20.0", "MB", "6.67", "9.5"]]
    assert "15 times fewer" in output and "-0.50 points" in output


def test_the_console_in_a_file(capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    """Tables and changed settings fit 80 columns, there is no colour, and a line in ten seconds."""
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
    # a line in ten seconds
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


@pytest.mark.parametrize(("kind", "expected"), [("dumb", False), ("xterm", True)])
def test_a_terminal_that_knows_colours_gets_them(monkeypatch: MonkeyPatch, kind: str, expected: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", kind)
    assert wants_colour("/dev/pts/0") is expected and not wants_colour(None)


def test_no_color_turns_colours_off(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour("/dev/pts/0")


def printed_by(rank: int, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> Any:
    """What a rank prints of a step and the end of its epoch on a terminal of 70 columns."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("dgc_training.logging.console.terminal_of", lambda descriptor: "/dev/pts/0")
    monkeypatch.setattr("dgc_training.logging.console.columns", lambda terminal: 70)
    screen = Console(rank, 3, 12, "acc/test_top1")
    screen.step(0, 1, "loss 0.5")
    screen.end_epoch(1, VALUES, best=True)
    return capsys.readouterr()


def test_a_terminal_has_a_bar_on_the_stream_of_the_rows(
    capsys: CaptureFixture[str], monkeypatch: MonkeyPatch
) -> None:
    """mpirun forwards the two streams independently. A bar on the other stream would overwrite rows."""
    output = printed_by(0, capsys, monkeypatch)
    _, bar, blank, head, row = output.out.replace("\n", "\r").rstrip("\r").split("\r")
    assert bar.startswith("epoch 1/3") and "/12" in bar and len(bar) <= 70 and not blank.strip()
    assert head.startswith("epoch ") and row.startswith("  1/3") and not output.err


def test_other_ranks_print_nothing(capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    assert printed_by(1, capsys, monkeypatch) == ("", "")


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
    half = ["train.compression.compress_ratio=2", "train.compression.warmup_epochs=0"]
    for stack, size, more_words in (([CNN], 1, []), (STACK, 4, []), (gossip, 4, []), (STACK, 1, half)):
        train_in(tmp_path / str(len(outputs)), stack, [*quick, *more_words], size)
        outputs.append(capsys.readouterr().out)
    alone, warmup, more, ratio = outputs
    # a ratio above 1 is printed as it is used, and one process has no messages that went dense
    assert "compress_ratio 2 is the factor saved: a share of 0.5 is sent" in ratio and "went dense" not in ratio
    assert "is the factor saved" not in warmup
    assert "1 rank on cpu" in alone and alone.count("1 process: nothing is sent") == 2 and "MB" not in alone
    assert "at compress_ratio 0.2512 sparse messages cost more" in warmup
    assert "100% of the gradient went dense" in warmup
    assert max(len(line) for line in warmup.splitlines() if str(tmp_path) not in line) <= 80
    assert "2 times the bytes of a dense fp32 all-reduce" in more


@pytest.fixture
def help_text(capsys: CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    return capsys.readouterr().out


def test_the_help_names_every_flag(help_text: str) -> None:
    assert all(flag in help_text for flag in FLAGS)


def test_the_help_names_the_file_of_all_keys(help_text: str) -> None:
    assert "configs/__init__.py" in help_text and (REPOSITORY / "configs/__init__.py").is_file()


def test_the_examples_of_the_help_work(help_text: str) -> None:
    examples = re.findall(r"^ +.*python train\.py (.+)$", help_text, flags=re.MULTILINE)
    assert all(any(word in example for example in examples) for word in ("--print-config", "--configs."))
    for example in examples:
        args, overrides = parse_arguments(shlex.split(example))
        load(args.configs, overrides)
