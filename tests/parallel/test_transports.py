"""train.py over Horovod and over torch.distributed: the choice is printed, and one resumes a run of the other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_model import failing_model
from parallel.ranks import alone, mpirun, torchrun

from dgc_training.checkpoint.reading import read_tensors

WORDS = ["train.py", "--devices", "cpu", "--configs", "configs/digits/cnn.py", "configs/dgc/wm5.py"]
SHORT = ["--configs.train.batch_size=128", "--configs.data.num_threads_per_worker=1", "--configs.model.width=8"]
OVER = {mpirun: "Horovod (started by mpirun)", torchrun: "torch.distributed (started by torchrun)"}


def train(
    launch: Callable[..., Any], directory: Path, *words: str, ranks: int = 2, succeeds: bool = True
) -> str:
    """What the run printed to standard output."""
    changes = ["--configs.train.num_epochs=2", "--configs.train.checkpoint_every=4", *SHORT, *words]
    done = launch(ranks, [*WORDS, *changes, "--run-dir", str(directory)], timeout=180)
    assert (done.returncode == 0) == succeeds, done.stdout[-6000:] + done.stderr[-6000:]
    printed: str = done.stdout
    return printed


def model(directory: Path) -> dict[str, torch.Tensor]:
    latest = json.loads((directory / "checkpoints/latest.json").read_text())["checkpoint"]
    state: dict[str, torch.Tensor] = read_tensors(directory / "checkpoints" / latest / "shared.pt")["model"]
    return state


@pytest.mark.horovod
@pytest.mark.timeout(900)
def test_a_run_of_one_transport_is_resumed_by_the_other_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two ranks no sum depends on its order."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ["--configs", str(failing_model(tmp_path, 9, "if 'STOPS' in os.environ: os._exit(1)"))]
    train(torchrun, tmp_path / "whole", *words)
    reference = model(tmp_path / "whole")
    for first, second in ((mpirun, torchrun), (torchrun, mpirun)):
        directory = tmp_path / first.__name__
        with monkeypatch.context() as patch:
            patch.setenv("STOPS", "1")
            printed = train(first, directory, *words, succeeds=False)
        assert f"transport: {OVER[first]}" in printed
        printed = train(second, directory, *words)
        assert f"transport: {OVER[second]}" in printed
        assert "resumed from checkpoint e0001" in printed
        assert all(torch.equal(value, reference[name]) for name, value in model(directory).items())


def test_one_process_over_torch(tmp_path: Path) -> None:
    printed = train(alone, tmp_path / "run", "--configs.train.transport=torch", ranks=1)
    assert "transport: torch.distributed (as set)" in printed and "1 process: nothing is sent" in printed


@pytest.mark.horovod
def test_ranks_of_mpirun_over_torch(tmp_path: Path) -> None:
    printed = train(mpirun, tmp_path / "run", "--configs.train.transport=torch")
    assert "2 ranks on cpu" in printed and "transport: torch.distributed (as set)" in printed


def test_an_unknown_transport_is_one_message(tmp_path: Path) -> None:
    done = alone(1, [*WORDS, "--configs.train.transport=gloo", "--run-dir", str(tmp_path / "run")])
    assert done.returncode == 2 and "the transport must be auto, horovod or torch, not 'gloo'" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()
