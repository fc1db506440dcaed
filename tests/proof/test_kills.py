"""A run that is interrupted at any moment resumes and ends with the same bits as an uninterrupted run."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from parallel.processes import send
from proof.small_runs import METHODS, Run, assert_same_end, finish, latest

from dgc_training.faults.interruption import EXIT_SAVED

pytestmark = [pytest.mark.proof, pytest.mark.timeout(3000)]
KILLS = 10  # per chunk


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reference")
    finish(directory)
    return directory


def interrupted(
    kills: int, directory: Path, reference: Path, draw: random.Random, method: str = "dgc", saves: bool = False
) -> int:
    """Interrupts the run of a directory repeatedly, and compares its end with `reference`.

    SIGKILL goes to one rank, both, or the launcher. With `saves`: SIGTERM to ranks, SIGUSR1 to the launcher, while
    the run trains. Returns how often a run has saved a checkpoint at its signal.
    """
    done = saved = 0
    while done < kills:
        before = latest(directory)
        run = Run(directory, method=method)
        if trains := saves or draw.random() < 0.8:
            run.wait_for_training()
        time.sleep(draw.uniform(0, 1.5 if saves else 2.5 if trains else 12))
        ranks = run.ranks()
        pids = draw.choice([ranks[:1], ranks[1:], ranks, [run.process.pid]])
        pids = pids if run.process.poll() is None else []
        gentle = signal.SIGUSR1 if pids == [run.process.pid] else signal.SIGTERM
        for pid in pids:
            send(pid, gentle if saves else signal.SIGKILL)
        status, text = run.end(), run.text()
        done += bool(pids)
        assert "Traceback" not in text, text[-3000:]
        # 0: the run was finished; 143 and 138: training had not begun, or had just ended
        expected = [EXIT_SAVED, 0, 143, 138] if pids else [0]
        assert status in expected or (pids and not saves), (status, text[-3000:])
        if saves and status == EXIT_SAVED:
            saved += 1
            assert f"Stopped by {gentle.name}: saved {latest(directory)}." in text and latest(directory) != before
        if (directory / "run/summary.json").exists():
            assert_same_end(directory, reference)
            shutil.rmtree(directory / "run")
    finish(directory, method=method)
    assert_same_end(directory, reference)
    return saved


@pytest.mark.parametrize("chunk", range(5))
def test_sigkill(reference: Path, tmp_path: Path, chunk: int) -> None:
    interrupted(KILLS, tmp_path, reference, random.Random(chunk))


@pytest.mark.parametrize("method", [method for method in METHODS if method != "dgc"])
def test_sigkill_with_other_methods(tmp_path: Path, method: str) -> None:
    finish(tmp_path / "uninterrupted", method=method)
    interrupted(4, tmp_path / "killed", tmp_path / "uninterrupted", random.Random(method), method)


@pytest.mark.parametrize("chunk", range(2))
def test_sigterm(reference: Path, tmp_path: Path, chunk: int) -> None:
    assert interrupted(KILLS, tmp_path, reference, random.Random(100 + chunk), saves=True) >= KILLS // 2


@pytest.mark.horovod
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_changes_its_transport_ends_with_the_same_bits(tmp_path: Path, method: str) -> None:
    """On 2 ranks a sum has one order, so that Horovod and torch.distributed give the same bits."""
    reference = tmp_path / "reference"
    finish(reference, method=method)
    for first in (True, False):  # whether it begins under torchrun
        directory = tmp_path / f"torchrun first {first}"
        run = Run(directory, method=method, torchrun=first)
        run.wait_for_training()
        time.sleep(0.5)
        for pid in run.ranks():
            send(pid, signal.SIGTERM)
        run.end()
        assert latest(directory) is not None, run.text()[-3000:]
        finish(directory, method=method, torchrun=not first)
        assert_same_end(directory, reference)
