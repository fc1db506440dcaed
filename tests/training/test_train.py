"""train.py on simulated ranks: a complete run and its directory, damaged runs, wrong arguments."""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import case
from environment import python_path
from pytest import CaptureFixture, MonkeyPatch
from simulated import CNN, contents, events_of, saved, summary_of, train_in

import train
from dgc import kernels
from dgc.comm.lockstep import LockstepWorld
from dgc_models import DigitsCNN
from dgc_training.checkpoint.progress import TrainingProgress
from dgc_training.checkpoint.reading import fingerprint, read_tensors
from dgc_training.config import ConfigError, load
from dgc_training.faults.failure import UsageError
from dgc_training.logging.formatting import result_text
from dgc_training.logging.scalars import OFTEN_ZERO, TAGS, ScalarLog, describe
from dgc_training.startup import lock
from dgc_training.startup.agreement import config_differences
from dgc_training.startup.arguments import parse_arguments
from dgc_training.startup.build import build_method
from dgc_training.startup.lock import RunLock, remove_temporary_files
from dgc_training.startup.run_directory import move_aside
from dgc_training.startup.run_name import run_name, warn_of_other_run
from dgc_training.tasks.classification import LabelCheck

STACK = [CNN, "configs/dgc/wm5.py"]
EXPERIMENT = ["--configs", *STACK]
QUICK = "train.num_epochs=2 train.batch_size=64 train.warmup_lr_epochs=1 train.checkpoint_every=5".split()
QUICK += ["train.check_replicas_every=4", "data.num_threads_per_worker=1", "model.width=8"]
BRIEF = ["train.num_epochs=1", "train.checkpoint_every=null"]

# Only the run that several tests share is checked for shapes.
pytestmark = pytest.mark.usefixtures("no_type_checks")
HOLDER = """
import sys
from dgc_training.startup.lock import *
lock = RunLock(Path(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""
R20, WM5 = "configs/cifar/resnet20.py", "configs/dgc/wm5.py"
RUN = "runs/[cifar.resnet20+dgc.wm5].e500.np8/config.yaml"
NAMES: list[tuple[list[str], str, int | None, str]] = [
    (["configs/digits/cnn.yaml", "configs/dgc"], "", 1, "[digits.cnn+dgc].np1"),
    ([R20, R20], ".e500", 2, "cifar.resnet20.e500.np2"),
    (["elsewhere/mine.py", WM5], "", 2, "[mine+dgc.wm5].np2"),
    (["configs/cifar/__init__.py"], "", 2, "cifar.np2"),
    (["configs/__init__.py"], "", 2, "configs.np2"),
    ([RUN], "", 4, "[cifar.resnet20+dgc.wm5].e500.repeat.np4"),
    (["/tmp/mine/config.yaml"], "", 4, "mine.repeat.np4"),
    ([R20], "", None, "cifar.resnet20.elastic"),
    (["runs/cifar.resnet20.elastic/config.yaml"], "", None, "cifar.resnet20.repeat.elastic"),
]


def run(directory: Path, *settings: str, size: int = 2, options: Any = ()) -> None:
    train_in(directory, STACK, [*QUICK, *settings], size, options=options)


@pytest.fixture(autouse=True)
def any_kernels(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_asked", "auto")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run; tests copy it."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    run(directory)
    return directory


def test_the_files_of_a_run(finished: Path) -> None:
    summary = summary_of(finished)
    assert (summary["ranks"], summary["epochs"], summary["samples"]) == (2, 2, 2 * (11 * 64 + 15) * 2)
    assert summary["best"]["acc/test_top1"] > 50 and summary["wire_over_dense"] < 0.9
    assert summary["wire_over_dense"] == pytest.approx(summary["wire_bytes"] / summary["dense_wire_bytes"])
    names = sorted(path.name for path in (finished / "checkpoints").iterdir() if path.is_dir())
    assert "e0002" in names and len(names) in (3, 4) and (finished / "config.yaml").exists()
    best = json.loads((finished / "checkpoints" / "best.json").read_text())["checkpoint"]
    assert best == f"e000{summary['best_epoch']}"
    # the rate after the warm-up of one epoch is scaled by the ranks
    (group,) = saved(finished)["shared"]["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(2 * 0.025)


def test_tensorboard_has_every_tag_of_the_run(finished: Path) -> None:
    tags = set(events_of(finished).Tags()["scalars"])
    # One machine; sparse costs less. Of the phases, waiting may be 0: simulated ranks hand over replies directly.
    always_0 = {"bytes/cross_wire_per_step", "compression/dense_share", "time/wait"} - ({"time/wait"} & tags)
    of_models = {tag for tag in TAGS if tag.startswith(("gossip/", "local/"))}
    results = {"acc/test_top1", "acc/test_top5"}
    assert TAGS.keys() - of_models - {"time/tokens_per_second"} - always_0 == tags - results


def test_tensorboard_describes_its_tags(finished: Path) -> None:
    events = events_of(finished)
    assert events.summary_metadata["train/lr"].summary_description == describe("train/lr")
    assert "samples seen" in describe("train/lr") and "train.meters" in describe("acc/test_top1")


def test_points_of_tensorboard_are_at_the_samples_seen(finished: Path) -> None:
    events = events_of(finished)
    assert [point.step for point in events.Scalars("acc/test_top1")] == [1438, 2876]
    assert [point.step for point in events.Scalars("train/loss")] == [1280, 1438, 2718, 2876]


def test_tensorboard_has_the_dense_bytes_of_a_step(finished: Path) -> None:
    dense = events_of(finished).Scalars("bytes/dense_wire_per_step")[0].value  # 2 ranks: once the payload
    assert dense == 4 * sum(p.numel() for p in DigitsCNN(width=8).parameters())


def test_tensorboard_has_the_settings_of_the_run(finished: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = events_of(finished)
    assert b"    compress_ratio: 0.001" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["ranks"].number_value == 2 and settings["train.batch_size"].number_value == 64
    assert settings["train.compression.compress_ratio"].number_value == 0.001


def test_a_tag_that_is_always_0_is_not_written(tmp_path: Path) -> None:
    log = ScalarLog(tmp_path, LockstepWorld(1).transports[0], samples=0, lag=0)
    for point, error in enumerate((0.0, 0.0, 3.0, 0.0)):
        zeros = dict.fromkeys(("bytes/wire_per_step", "acc/test_top1", "bytes/wire"), 0.0)
        log.write({**zeros, "compression/error_norm": error}, 10 * point)
    log.close()
    events = events_of(tmp_path)
    assert sorted(events.Tags()["scalars"]) == ["acc/test_top1", "bytes/wire", "compression/error_norm"]
    found = [(point.step, point.value) for point in events.Scalars("compression/error_norm")]
    assert found == [(0, 0.0), (10, 0.0), (20, 3.0), (30, 0.0)]
    described = events.summary_metadata["compression/error_norm"].summary_description
    assert described == describe("compression/error_norm") and OFTEN_ZERO < TAGS.keys()


def test_a_traced_run_has_a_timeline_of_each_rank(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    run(tmp_path, "train.trace=True", "train.kernels=reference", *BRIEF)
    assert "reference (plain PyTorch)" in capsys.readouterr().out
    assert kernels.describe(torch.device("cpu")) == "reference (plain PyTorch)"
    for rank in range(2):
        events = json.loads((tmp_path / "trace" / f"rank{rank}.json").read_text())["traceEvents"]
        rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert "training" in rows and any(row.endswith("(network)") for row in rows)
        phases = {event["name"] for event in events if event["ph"] == "X"}
        assert {"data", "forward_backward", "compress", "launch", "decode", "step", "in flight"} <= phases


def test_a_finished_run_started_again(finished: Path, tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    """It is not run again, whatever settings without an effect on the result; damaged or other, it is an error."""
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*.pt")}
    for free in ([], ["train.bucket_mb=1", "train.log_every=3", "train.trace=True", "train.kernels=reference"]):
        run(copy, *free)
        assert {path: path.stat().st_mtime_ns for path in copy.rglob("*.pt")} == before
        assert "resumed from checkpoint e0002. The run is finished" in capsys.readouterr().out
    cure = rf"train\.optimizer\.lr(.|\n)*{copy}/config.yaml --run-dir {copy}"
    for message, *options in ((r"train\.optimizer\.lr: 0\.025 -> 0\.5(.|\n)*--suffix",), (cure, "--evaluate")):
        with unchanged(copy), pytest.raises(UsageError, match=message):
            run(copy, "train.optimizer.lr=0.5", options=options)
    damages = [("config.yaml", text) for text in (b"a: [", b"\x00\x1a", b"\xff\xfe\xfa", b"  a: 1\nb: 2\n")]
    for name, damage in [*damages, ("checkpoints/best.json", b"{")]:
        whole = (copy / name).read_bytes()
        (copy / name).write_bytes(damage)
        message = r"config\.yaml is damaged .* --no-resume" if "yaml" in name else r"best\.json cannot be read"
        with unchanged(copy), case(damage), pytest.raises(UsageError, match=message):
            run(copy)
        (copy / name).write_bytes(whole)
    summary = (copy / "summary.json").read_bytes()
    run(copy, "train.num_epochs=1", options=["--no-resume"])
    assert (copy.with_name("run.1") / "summary.json").read_bytes() == summary
    assert summary_of(copy)["epochs"] == 1


def test_evaluate_gives_the_reported_accuracy(finished: Path, tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    """On any number of ranks."""
    for size in (1, 2, 3):
        run(finished, size=size, options=["--evaluate"])
        lines = capsys.readouterr().out.splitlines()
        assert lines == [f"{name} {result_text(value)}" for name, value in summary_of(finished)["best"].items()]
    with pytest.raises(UsageError, match="no checkpoint in .*nothing/checkpoints. Train first"):
        run(tmp_path / "nothing", options=["--evaluate"])
    assert list(tmp_path.iterdir()) == []


@contextmanager
def unchanged(directory: Path) -> Iterator[None]:
    before = contents(directory)
    yield
    assert contents(directory) == before


def with_nan(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: value if n else with_nan(value) for n, (name, value) in enumerate(found.items())}
    return torch.cat([found.flatten()[:-1], torch.tensor([math.nan])]).view(found.shape)


GONE = object()
BIAS, MOMENTUM, POWERSGD = "classifier.2.bias", "momentum_buffer", "compression/PowerSGDCompressor.0"
GROUP, BUFFER = "shared/optimizer/param_groups/0", f"shared/optimizer/state/0/{MOMENTUM}"
NO_TENSOR = rf"state\.0\.{MOMENTUM} is not a tensor of shape .* and type torch.float32"
VELOCITIES = r"\(rank 1\): rank1\.pt: .* velocities of \S+ has NaN"
# by method: the file and the keys in it, the value that is put there or what changes it, and the message
DAMAGED: dict[str, list[tuple[str, Any, str]]] = {
    "dgc/wm5": [
        ("shared/progress/epoch", math.inf, r"\(rank 0\): (.|\n)*progress\.epoch is inf"),
        ("shared/progress/samples", 2**80, rf"progress\.samples is {2**80}"),
        (BUFFER, "x", rf"optimizer\.state\.0\.{MOMENTUM} is of type str"),
        (BUFFER, torch.zeros(3), NO_TENSOR),
        (BUFFER, lambda buffer: buffer.to(torch.int8), NO_TENSOR),
        (BUFFER, with_nan, rf"state\.0\.{MOMENTUM} has NaN"),
        ("shared/optimizer", GONE, "KeyError"),
        ("shared/optimizer/state/4", None, r"optimizer\.state\.4 is not"),
        (f"{GROUP}/lr", GONE, r"param_groups\.0 is"),
        (f"{GROUP}/lr", math.inf, r"param_groups\.0\.lr is inf"),
        (f"{GROUP}/momentum", 0.5, r"param_groups\.0\.momentum is 0\.5, and 0\.9 in the config"),
        ("shared/schedule/scheduler/T_max", GONE, r"schedule\.scheduler is"),
        (f"shared/model/{BIAS}", GONE, "Missing key"),
        (f"shared/model/{BIAS}", with_nan, rf"shared\.pt.*{BIAS} has NaN"),
        (f"shared/model/{BIAS}", lambda bias: bias.double(), f"{BIAS} is not .*32"),
        ("rank1/batch_norm", {"other": 1}, r"\(rank 1\): rank1\.pt: ValueError: batch_norm is \['other'\]"),
        ("rank1/compression/DGCCompressor.0/velocities", with_nan, VELOCITIES),
    ],
    "contrib/onebit": [("rank0/compression/OneBitCompressor.0/errors", with_nan, "errors of .* has NaN")],
    "powersgd/rank4": [
        (
            f"rank0/{POWERSGD}/errors",
            lambda errors: {name: error.double() for name, error in errors.items()},
            "errors of .* has type torch.float64, not torch.float32",
        ),
        (f"rank1/{POWERSGD}/Q", with_nan, "Q of .* has NaN"),
    ],
    "gossip/osgp": [
        ("rank0/compression/OSGP.0/z", with_nan, "z has NaN"),
        (f"rank0/compression/optimizer/state/0/{MOMENTUM}", with_nan, rf"rank0\.pt: .*{MOMENTUM} has NaN"),
    ],
}


@pytest.mark.parametrize("method", DAMAGED)
def test_a_checkpoint_that_does_not_fit_is_one_error_on_every_rank(method: str, tmp_path: Path) -> None:
    """The error has file, name and remedy. Without it every step would be dropped. Nothing is overwritten."""
    settings = [*QUICK, *BRIEF, "train.check_replicas_every=0", "train.batch_size=400"]
    train_in(tmp_path, stack := [CNN, f"configs/{method}.py"], settings)
    folder = tmp_path / "checkpoints" / "e0001"
    whole, manifest = contents(folder), json.loads((folder / "manifest.json").read_text())
    for where, damage, message in DAMAGED[method]:
        name, *above, last = (int(key) if key.isdecimal() else key for key in where.split("/"))
        file = folder / f"{name}.pt"
        content = read_tensors(file)
        place = reduce(getitem, above, content)
        value = place.pop(last, None)
        if damage is not GONE:
            place[last] = damage(value) if callable(damage) else damage
        torch.save(content, file)
        files = {**manifest["files"], file.name: fingerprint(file)}
        (folder / "manifest.json").write_text(json.dumps({**manifest, "files": files}))
        text = rf"e0001 does not fit this run (.|\n)*{message}(.|\n)*latest\.json\. --no-resume"
        with unchanged(tmp_path), case(message), pytest.raises(UsageError, match=text):
            train_in(tmp_path, stack, settings)
        file.write_bytes(whole[file])


def test_labels_outside_of_the_outputs_give_one_line(tmp_path: Path) -> None:
    """At the first batch with such a label. Labels that the loss ignores are no error."""
    with pytest.raises(ConfigError, match=r"label 9, but model has 9 outputs, for labels from 0 to 8: .*classes"):
        run(tmp_path / "run", "model.num_classes=9", *BRIEF, size=1)
    labels = torch.tensor([0, -100, 8])
    LabelCheck(torch.nn.CrossEntropyLoss())(torch.zeros(3, 9), labels)
    LabelCheck(torch.nn.MSELoss())(torch.zeros(3, 1), torch.tensor([7, 8, 9]))
    with pytest.raises(ConfigError, match="label -1, but model"):
        LabelCheck(torch.nn.CrossEntropyLoss())(torch.zeros(3, 9, 4), labels.clamp(min=-1).view(3, 1))


def nothing(*args: Any, **keywords: Any) -> None:
    """A constructor without a `return`."""


def a_mapping(*args: Any, **keywords: Any) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("model", "it must give torch.nn.Module"),
        ("dataset", ""),  # a mapping is one
        ("task", "it must give dgc_training.tasks.protocol.Task"),
        ("train.optimizer", "it must give torch.optim.Optimizer"),
        ("train.scheduler", "train.scheduler is a dict, not a learning-rate scheduler"),
        ("train.criterion", "it must give torch.nn.Module"),
        ("train.compression", "compression must be a compressor"),
        ("train.local", "it must give an object with needs_groups, is_synchronous"),
        ("train.gossip", "it must give an object with needs_groups, is_synchronous"),
        ("train.parameter_groups", ""),  # an empty mapping has no groups, which the optimizer says
        ("train.recorder", "it must give an object with begin, batch, step, "),
        ("train.meters.acc/{}_top1", "it must give an object with update, data, set, compute"),
    ],
)
def test_a_constructor_that_gives_another_kind_of_object_is_one_error(
    key: str, expected: str, tmp_path: Path
) -> None:
    *above, last = key.split(".")
    node = "configs" + "".join(f"[{name!r}]" for name in above) + f"[{last!r}]"
    classes = ["--configs.model.num_classes=10"] if key == "dataset" else []  # it is a formula of the data set
    args, _ = parse_arguments([*EXPERIMENT, "--devices", "cpu", "--run-dir", str(tmp_path / "run")])
    for constructor, message in (("nothing", "gives None"), ("a_mapping", expected)):
        file = tmp_path / f"{constructor}.py"
        head = "from dgc_training.config import Config, configs\n"
        file.write_text(f"{head}{node} = Config('training.test_train.{constructor}')\n")
        tree = load([CNN, file], classes)

        def build_and_run(transport: Any, tree: Any = tree) -> None:
            train.run(args, tree, transport, build_method(tree.train))

        if message:
            with pytest.raises(ConfigError) as caught:
                LockstepWorld(1).run(build_and_run)
            assert message in str(caught.value) and key.removeprefix("train.") in str(caught.value)
            assert not (tmp_path / "run").exists()


def test_any_number_is_better_than_nan() -> None:
    progress, seen = TrainingProgress(), []
    for progress.epoch, value in enumerate((math.nan, 80.0, math.nan, 90.0, 90.0, 85.0), start=1):
        seen.append(progress.add_results({"m": value}, "m"))
    assert seen == [True, True, False, True, False, False]
    assert progress.best == {"m": 90.0} and progress.best_epoch == 4


def test_optional_parts_are_optional(tmp_path: Path) -> None:
    """No scheduler, no warm-up, no metric; with accumulation and a separate group for batch norm."""
    words = [*BRIEF, "train.scheduler=null", "train.warmup_lr_epochs=0", "train.metric=null"]
    words += ["train.num_batches_per_step=2", "train.optimize_bn_separately=true"]
    run(tmp_path, *words)
    summary = summary_of(tmp_path)
    assert summary["best"] == {} and summary["metric"] is None and summary["samples"] == 5 * 2 * 2 * 64
    (loss,) = events_of(tmp_path).Scalars("train/loss")
    assert loss.value < 3  # the mean of both passes: about ln 10, the loss of a guess
    assert not (tmp_path / "checkpoints" / "best.json").exists()
    run(tmp_path, *words, options=["--evaluate"])


def test_a_rank_with_another_config_is_named(tmp_path: Path) -> None:
    args, _ = parse_arguments([*EXPERIMENT, "--devices", "cpu", "--run-dir", str(tmp_path)])
    trees = [load(STACK, [f"--configs.seed={seed}"]) for seed in (0, 0, 1)]
    with pytest.raises(UsageError, match=r"rank 2 has another config than rank 0(.|\n)*seed: 0 -> 1"):
        LockstepWorld(3).run(lambda transport: train.run(args, trees[transport.rank], transport))


def test_differences_of_configs_are_listed_by_key() -> None:
    old = "train: {num_epochs: 3, log_every: 10, betas: [1, 2]}\nseed: 1\nmodel: null\n"
    new = "train: {num_epochs: 4, log_every: 99, betas: [1, 3]}\nmodel: {_target_: m}\nextra: 1\n"
    changed = ["extra: (absent) -> 1", "model: None -> (absent)", "model._target_: (absent) -> 'm'"]
    changed += ["seed: 1 -> (absent)", "train.betas: [1, 2] -> [1, 3]", "train.num_epochs: 3 -> 4"]
    assert config_differences(old, old) == []
    assert config_differences(old, new) == [f"  {text}" for text in changed]


def test_ranks_have_different_random_numbers(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(train, "seed_everything", seeds.append)
    with pytest.raises(ConfigError, match="not a result"):  # told after all parts have been built
        run(tmp_path / "run", "train.metric=acc/val_top1", size=3)
    assert len(seeds) == 3 and len(set(seeds)) == 3


def test_arguments_are_read_first(tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train.main([*EXPERIMENT, "--print-config", "--configs.train.num_epochs", "500"]) == 0
    assert "num_epochs: 500" in capsys.readouterr().out
    # files of several --configs stack
    args, _ = parse_arguments(["--configs", "a.py", "b.py", "--suffix", ".x", "--configs", "c.py"])
    assert args.configs == ["a.py", "b.py", "c.py"]
    for *words, printed in (
        ["--devices", "cpu", "--config", "x", "--config"],
        ["--devices", "cpu", "stray.py", "stray.py"],
        ["--devices", "cpu", "--configs.train.num_epoch", "5", "train.num_epoch"],
        ["--devices", "cpu", "--eval", "--eval"],
        ["--devices", "gpu", "torch finds no GPU"],
    ):
        assert train.main([*EXPERIMENT, *words]) == 2 and printed in capsys.readouterr().err
    for words in (["--devices", "tpu"], [*EXPERIMENT, "--evaluate", "--no-resume"]):
        with pytest.raises(SystemExit) as leaving:
            train.main(words)
        assert leaving.value.code == 2 and "usage: train.py" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "stop.py").write_text("raise KeyboardInterrupt\n")
    assert train.main(["--configs", str(tmp_path / "stop.py")]) == 130
    assert capsys.readouterr().err.startswith("Stopped by Ctrl-C")


def test_a_second_run_in_the_directory_is_an_error(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    run(directory, *BRIEF)
    assert not (directory / lock.NAME).exists()
    before, pipe = contents(directory), subprocess.PIPE
    words = [sys.executable, "-c", HOLDER, str(directory)]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        message = rf"{directory} is in use by process {holder.pid} on \S+\. Wait .* --suffix or --run-dir"
        for options in ([], ["--no-resume"]):
            with pytest.raises(UsageError, match=message):
                run(directory, *BRIEF, options=options)
        after = contents(directory)
        assert after.pop(directory / lock.NAME).decode().startswith(f"process {holder.pid} on ")
        assert after == before and list(tmp_path.iterdir()) == [directory]
        capsys.readouterr()
        run(directory, *BRIEF, options=["--evaluate"])
        assert capsys.readouterr().out.startswith("acc/")
        # a restarted run waits
        with pytest.raises(UsageError, match="in use by process"):
            RunLock(directory, wait=0.3)
        holder.send_signal(signal.SIGKILL)
    run(directory, *BRIEF, options=["--no-resume"])
    assert "--no-resume: the earlier run is now" in capsys.readouterr().out
    assert not list(tmp_path.rglob(lock.NAME))
    timer = threading.Timer(0.5, RunLock(tmp_path).release)
    timer.start()
    RunLock(tmp_path, wait=30).release()
    timer.join()


def test_a_lock_is_of_the_directory_of_this_name(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """The holder may move a lock file after a waiting process has opened it."""
    first = RunLock(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "aside")
    second = RunLock(tmp_path / "run")
    with pytest.raises(UsageError):
        RunLock(tmp_path / "run")
    first.release()
    assert (tmp_path / "run" / lock.NAME).exists()
    second.release()
    assert not (tmp_path / "run" / lock.NAME).exists()

    def unsupported(descriptor: Any, operation: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    with pytest.warns(UserWarning, match="cannot be locked .No locks available.: make sure"):
        RunLock(tmp_path).release()


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    dead, own, other = subprocess.Popen(["true"]), os.getpid(), os.getppid()
    dead.wait()
    (tmp_path / "checkpoints").mkdir()
    left = [f".config.yaml.{dead.pid}.tmp", f"checkpoints/.latest.json.{dead.pid}.tmp", f".own.{own}.tmp"]
    others = [".mine.tmp", f".latest.json.{other}.tmp", "a.1.tmp"]
    for name in [*left, *others]:
        (tmp_path / name).touch()
    remove_temporary_files(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in contents(tmp_path)} == {*others}
    (tmp_path / left[1]).touch()
    run(tmp_path, *BRIEF)
    assert not (tmp_path / left[1]).exists()


def test_moving_aside_keeps_all_earlier_runs(tmp_path: Path) -> None:
    for content in ("first", "second"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "file").write_text(content)
        move_aside(tmp_path / "run")
    assert [(tmp_path / f"run.{n}" / "file").read_text() for n in (1, 2)] == ["first", "second"]
    assert not (tmp_path / "run").exists()


def test_names(tmp_path: Path) -> None:
    for configs, suffix, size, name in NAMES:
        assert run_name(configs, suffix, size) == name
    # all spellings of a path give one name
    for path in ("./configs/cifar/resnet20.py", "x/../configs/cifar/resnet20.py", f"{tmp_path}/{R20}"):
        assert run_name([path], size=8, base=tmp_path) == "cifar.resnet20.np8"
    assert run_name(["cifar/resnet20.py"], size=8, base=tmp_path / "configs") == "cifar.resnet20.np8"
    # an unfinished run on another number of ranks is named
    for name in ("a.np2", "a.np3", "a.b.np2", "a.np2.1"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "checkpoints/latest.json").touch()
    (tmp_path / "a.np3/summary.json").touch()
    with pytest.warns(UserWarning) as warned:
        warn_of_other_run(tmp_path / "a.np4", rank=0)
    assert [str(warning.message).rpartition(" ")[2] for warning in warned] == [str(tmp_path / "a.np2")]
    for name, rank in (("b.np4", 0), ("a.np4", 1)):  # rank 0 alone warns
        warn_of_other_run(tmp_path / name, rank)
