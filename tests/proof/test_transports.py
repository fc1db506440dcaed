"""The same run over Horovod and over torch.distributed: equal on 2 ranks, and resumed by either.

On 2 ranks a sum has one order, so both transports give the same bits.
"""

import signal
import time
from pathlib import Path

import pytest
from parallel.processes import send
from proof.small_runs import METHODS, Run, assert_same_end, finish, latest

pytestmark = [pytest.mark.proof, pytest.mark.timeout(3000), pytest.mark.horovod]


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_changes_its_transport_ends_with_the_same_bits(tmp_path: Path, method: str) -> None:
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


def test_a_run_under_torchrun_repeats_bit_for_bit(tmp_path: Path) -> None:
    for name in ("first", "second"):
        finish(tmp_path / name, ranks=3, torchrun=True)
    assert_same_end(tmp_path / "first", tmp_path / "second", ranks=3)
