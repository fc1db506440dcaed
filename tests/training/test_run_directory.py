"""Run directories: one run at a time in each, their names, and the comparison of configs."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from environment import python_path
from pytest import CaptureFixture, MonkeyPatch
from simulated import CNN, contents, train_in

from dgc_training.faults.failure import UsageError
from dgc_training.startup import lock
from dgc_training.startup.agreement import config_differences
from dgc_training.startup.lock import RunLock, remove_temporary_files
from dgc_training.startup.run_directory import move_aside
from dgc_training.startup.run_name import run_name, warn_of_other_run

pytestmark = pytest.mark.usefixtures("no_type_checks")
BRIEF = ["train.num_epochs=1", "train.batch_size=180", "train.warmup_lr_epochs=0", "model.width=4"]


def run(directory: Path, *options: str) -> None:
    train_in(directory, [CNN], BRIEF, options=options)


def held_by_another_process(directory: Path) -> subprocess.Popen[str]:
    program = f"import sys\nfrom dgc_training.startup.lock import *\nlock = RunLock(Path({str(directory)!r}))\n"
    words = [sys.executable, "-c", program + "print('held', flush=True)\nsys.stdin.read()"]
    environment, pipe = {**os.environ, "PYTHONPATH": python_path()}, subprocess.PIPE
    process = subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_run_in_the_directory_is_an_error(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    run(directory)
    assert not (directory / lock.NAME).exists()
    before = contents(directory)
    with held_by_another_process(directory) as holder:
        message = rf"{directory} is in use by process {holder.pid} on \S+\. Wait .* --suffix or --run-dir"
        for words in ([], ["--no-resume"]):
            with pytest.raises(UsageError, match=message):
                run(directory, *words)
        after = contents(directory)
        assert after.pop(directory / lock.NAME).decode().startswith(f"process {holder.pid} on ")
        assert after == before and list(tmp_path.iterdir()) == [directory]
        capsys.readouterr()
        run(directory, "--evaluate")
        assert capsys.readouterr().out.startswith("acc/")
        # a restarted run waits
        with pytest.raises(UsageError, match="in use by process"):
            RunLock(directory, wait=0.3)
        holder.send_signal(signal.SIGKILL)
    run(directory, "--no-resume")
    assert "--no-resume: the earlier run is now" in capsys.readouterr().out
    assert not list(tmp_path.rglob(lock.NAME))
    first = RunLock(tmp_path)
    timer = threading.Timer(0.5, first.release)
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


def test_only_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    (tmp_path / "checkpoints").mkdir()
    names = [f".config.yaml.{dead.pid}.tmp", f"checkpoints/.latest.json.{dead.pid}.tmp", f".own.{os.getpid()}.tmp"]
    left = [tmp_path / name for name in names]
    others = [tmp_path / name for name in (".mine.tmp", f".latest.json.{os.getppid()}.tmp", "a.1.tmp")]
    for path in [*left, *others]:
        path.touch()
    remove_temporary_files(tmp_path)
    assert not any(path.exists() for path in left) and all(path.exists() for path in others)
    left[1].touch()
    run(tmp_path)
    assert not left[1].exists()


R20, WM5 = "configs/cifar/resnet20.py", "configs/dgc/wm5.py"
RUN = "runs/[cifar.resnet20+dgc.wm5].e500.np8/config.yaml"
IMAGENET = ["configs/imagenet/resnet50.py", "configs/imagenet/cosine.py", "configs/dgc/wm0.py"]
HALF = ["configs/dgc/fp16.py", "configs/dgc/int32.py"]
NAMES: list[tuple[list[str], str, int | None, str]] = [
    ([R20], "", 8, "cifar.resnet20.np8"),
    ([R20, WM5], "", 8, "[cifar.resnet20+dgc.wm5].np8"),
    ([R20, WM5, *HALF], ".e500", 8, "[cifar.resnet20+dgc.[wm5+fp16+int32]].e500.np8"),
    (IMAGENET, "", 32, "[imagenet.[resnet50+cosine]+dgc.wm0].np32"),
    (["configs/digits/cnn.yaml", "configs/dgc"], "", 1, "[digits.cnn+dgc].np1"),
    ([R20, R20], "", 2, "cifar.resnet20.np2"),
    (["elsewhere/mine.py", WM5], "", 2, "[mine+dgc.wm5].np2"),
    (["configs/cifar/__init__.py"], "", 2, "cifar.np2"),
    (["configs/__init__.py"], "", 2, "configs.np2"),
    ([RUN], "", 4, "[cifar.resnet20+dgc.wm5].e500.repeat.np4"),
    (["/tmp/mine/config.yaml"], "", 4, "mine.repeat.np4"),
    ([R20], "", None, "cifar.resnet20.elastic"),
    (["runs/cifar.resnet20.elastic/config.yaml"], "", None, "cifar.resnet20.repeat.elastic"),
]


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
    warn_of_other_run(tmp_path / "b.np4", rank=0)


def test_differences_have_the_keys() -> None:
    old = "train: {num_epochs: 3, log_every: 10, betas: [1, 2]}\nseed: 1\nmodel: null\n"
    new = "train: {num_epochs: 4, log_every: 99, betas: [1, 3]}\nmodel: {_target_: m}\nextra: 1\n"
    assert config_differences(old, old) == []
    assert config_differences(old, new) == [
        "  extra: (absent) -> 1",
        "  model: None -> (absent)",
        "  model._target_: (absent) -> 'm'",
        "  seed: 1 -> (absent)",
        "  train.betas: [1, 2] -> [1, 3]",
        "  train.num_epochs: 3 -> 4",
    ]


def test_moving_aside_overwrites_nothing(tmp_path: Path) -> None:
    for content in ("first", "second"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "file").write_text(content)
        move_aside(tmp_path / "run")
    assert [(tmp_path / f"run.{n}" / "file").read_text() for n in (1, 2)] == ["first", "second"]
    assert not (tmp_path / "run").exists()
