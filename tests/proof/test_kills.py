"""A run that is killed at any moment resumes and ends with the same bits as an uninterrupted run.

Chunks can be run alone, each with its own seed: `pytest -m proof tests/proof/test_kills.py -k "sigkill and 3"`.
"""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from parallel.processes import send
from proof.small_runs import METHODS, Run, assert_same_end, finish, latest

from dgc_training.faults.interruption import EXIT_SAVED

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1800)]
KILLS = 10  # per chunk


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run on 2 ranks."""
    directory = tmp_path_factory.mktemp("reference")
    finish(directory)
    return directory


def targets(run: Run, draw: random.Random) -> list[int]:
    """The processes that receive the signal: one rank, both, or the launcher."""
    ranks = run.ranks()
    return draw.choice([ranks[:1], ranks[1:], ranks, [run.process.pid]])


def kill_until(kills: int, directory: Path, reference: Path, draw: random.Random, method: str = "dgc") -> None:
    """Starts and kills the run of a directory repeatedly. Then it finishes and is compared with the reference."""
    done = 0
    while done < kills:
        run = Run(directory, method=method)
        if draw.random() < 0.8:
            run.wait_for_training()
            delay = draw.uniform(0, 2.5)
        else:
            delay = draw.uniform(0, 12)
        time.sleep(delay)
        if run.process.poll() is None and (pids := targets(run, draw)):
            for pid in pids:
                send(pid, signal.SIGKILL)
            run.end()
            done += 1
        else:
            assert run.end() == 0, run.text()[-3000:]
        assert "Traceback" not in run.text(), run.text()[-3000:]
        if (directory / "run" / "summary.json").exists():
            assert_same_end(directory, reference)
            shutil.rmtree(directory / "run")
    finish(directory, method=method)
    assert_same_end(directory, reference)


@pytest.mark.parametrize("chunk", range(5))
def test_sigkill(reference: Path, tmp_path: Path, chunk: int) -> None:
    kill_until(KILLS, tmp_path, reference, random.Random(chunk))


@pytest.mark.parametrize("method", [method for method in METHODS if method != "dgc"])
def test_sigkill_with_other_methods(tmp_path: Path, method: str) -> None:
    finish(tmp_path / "uninterrupted", method=method)
    kill_until(4, tmp_path / "killed", tmp_path / "uninterrupted", random.Random(method), method)


@pytest.mark.parametrize("chunk", range(2))
def test_sigterm(reference: Path, tmp_path: Path, chunk: int) -> None:
    """SIGTERM to one rank or both, or SIGUSR1 to the launcher. Each run saves a checkpoint."""
    draw = random.Random(100 + chunk)
    done = saved = 0
    while done < KILLS:
        before = latest(tmp_path)
        run = Run(tmp_path)
        run.wait_for_training()
        time.sleep(draw.uniform(0, 1.5))
        pids = targets(run, draw)
        if run.process.poll() is not None or not pids:
            assert run.end() == 0, run.text()[-3000:]
            continue
        number = signal.SIGUSR1 if pids == [run.process.pid] else signal.SIGTERM
        for pid in pids:
            send(pid, number)
        status = run.end()
        done += 1
        text = run.text()
        assert "Traceback" not in text, text[-3000:]
        # 0: the run was finished; 143 and 138: training had not begun, or had just ended
        assert status in (EXIT_SAVED, 0, 143, 138), (status, text[-3000:])
        if status == EXIT_SAVED:
            saved += 1
            assert f"Stopped by {signal.Signals(number).name}: saved {latest(tmp_path)}." in text
            assert latest(tmp_path) != before
        if (tmp_path / "run" / "summary.json").exists():
            assert_same_end(tmp_path, reference)
            shutil.rmtree(tmp_path / "run")
    finish(tmp_path)
    assert_same_end(tmp_path, reference)
    assert saved >= KILLS // 2
