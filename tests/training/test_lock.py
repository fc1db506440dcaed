"""One run at a time in a run directory."""

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
from simulated import CNN, train_in

from dgc_training.faults.failure import UsageError
from dgc_training.startup import lock
from dgc_training.startup.lock import RunLock, remove_temporary_files

pytestmark = pytest.mark.usefixtures("no_type_checks")
BRIEF = ["train.num_epochs=1", "train.batch_size=180", "train.warmup_lr_epochs=0", "model.width=4"]


def run(directory: Path, *options: str) -> None:
    train_in(directory, [CNN], BRIEF, options=options)


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def held_by_another_process(directory: Path) -> subprocess.Popen[str]:
    program = f"import sys\nfrom dgc_training.startup.lock import *\nlock = RunLock(Path({str(directory)!r}))\n"
    words = [sys.executable, "-c", program + "print('held', flush=True)\nsys.stdin.read()"]
    environment, pipe = {**os.environ, "PYTHONPATH": python_path()}, subprocess.PIPE
    process = subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_run_in_the_directory_is_an_error_until_the_first_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the first run is killed. Evaluation needs no lock."""
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
        holder.send_signal(signal.SIGKILL)
    run(directory, "--no-resume")
    assert "--no-resume: the earlier run is now" in capsys.readouterr().out
    assert not list(tmp_path.rglob(lock.NAME))


def test_a_lock_applies_to_the_current_directory_of_this_name(tmp_path: Path) -> None:
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


def test_a_restarted_run_waits_for_the_lock(tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    timer = threading.Timer(0.5, first.release)
    timer.start()
    RunLock(tmp_path, wait=30).release()
    timer.join()
    with held_by_another_process(tmp_path) as holder:
        with pytest.raises(UsageError, match="in use by process"):
            RunLock(tmp_path, wait=0.3)
        holder.kill()


def test_a_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: Any, operation: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    with pytest.warns(UserWarning, match="cannot be locked .No locks available.: make sure"):
        RunLock(tmp_path).release()


def test_only_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    """By a run at its start, too."""
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    (tmp_path / "checkpoints").mkdir()
    left = [tmp_path / f".config.yaml.{dead.pid}.tmp", tmp_path / "checkpoints" / f".latest.json.{dead.pid}.tmp"]
    left.append(tmp_path / f".own.{os.getpid()}.tmp")
    others = [tmp_path / ".mine.tmp", tmp_path / f".latest.json.{os.getppid()}.tmp", tmp_path / "a.1.tmp"]
    for path in [*left, *others]:
        path.touch()
    remove_temporary_files(tmp_path)
    assert not any(path.exists() for path in left) and all(path.exists() for path in others)
    left[1].touch()
    run(tmp_path)
    assert not left[1].exists()
