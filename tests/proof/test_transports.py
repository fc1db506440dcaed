"""The same run over Horovod and over torch.distributed: equal on 2 ranks, as accurate on 4, resumed by either.

On 2 ranks a sum has one order, so both transports give the same bits.
"""

import json
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from parallel.processes import send
from parallel.ranks import mpirun, torchrun
from proof.small_runs import METHODS, Run, assert_same_end, finish, latest

pytestmark = [pytest.mark.proof, pytest.mark.timeout(3000), pytest.mark.horovod]
STACK = ["configs/digits/cnn.py", "configs/dgc/wm5.py", "configs/dgc/fp16.py", "configs/dgc/int32.py"]


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


def summary(launch: Any, directory: Path, seed: int) -> dict[str, Any]:
    words = ["--configs", *STACK, "--configs.seed", str(seed), "--configs.data.num_threads_per_worker", "1"]
    done = launch(4, ["train.py", *words, "--run-dir", str(directory)], timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((directory / "summary.json").read_text())


def test_both_transports_train_to_the_same_accuracy(tmp_path: Path) -> None:
    """4 ranks, 3 seeds, in pairs. The accuracy is that after the last epoch, in percent."""
    differences = []
    for seed in range(3):
        pair = [
            summary(launch, tmp_path / f"{launch.__name__}{seed}", seed)["final"]["acc/test_top1"]
            for launch in (mpirun, torchrun)
        ]
        print(f"seed {seed}: mpirun {pair[0]:.2f}, torchrun {pair[1]:.2f}")
        differences.append(pair[1] - pair[0])
    print(f"mean difference {statistics.mean(differences):.2f} points")
    assert abs(statistics.mean(differences)) < 0.5


def test_a_run_under_torchrun_repeats_bit_for_bit(tmp_path: Path) -> None:
    for name in ("first", "second"):
        finish(tmp_path / name, ranks=3, torchrun=True)
    assert_same_end(tmp_path / "first", tmp_path / "second", ranks=3)
