"""train.py over Horovod and over torch.distributed: the choice is printed, and one resumes a run of the other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_model import failing_model
from parallel.ranks import alone, mpirun, torchrun
from simulated import train_on

from dgc_training.checkpoint.reading import read_tensors

WORDS = ["train.py", "--devices", "cpu", "--configs", "configs/digits/cnn.py", "configs/dgc/wm5.py"]
SHORT = ["--configs.train.num_epochs=2", "--configs.train.batch_size=128", "--configs.train.checkpoint_every=4"]
SHORT += ["--configs.data.num_threads_per_worker=1", "--configs.model.width=8"]
OVER = {mpirun: "Horovod (started by mpirun)", torchrun: "torch.distributed (started by torchrun)"}


def launched(
    launch: Callable[..., Any], directory: Path, *words: str, ranks: int = 2, succeeds: bool = True
) -> str:
    """What the run printed to standard output."""
    done = launch(ranks, [*WORDS, *SHORT, *words, "--run-dir", str(directory)], timeout=180)
    assert (done.returncode == 0) == succeeds, done.stdout[-6000:] + done.stderr[-6000:]
    printed: str = done.stdout
    return printed


def model(directory: Path) -> dict[str, torch.Tensor]:
    latest = json.loads((directory / "checkpoints/latest.json").read_text())["checkpoint"]
    state: dict[str, torch.Tensor] = read_tensors(directory / "checkpoints" / latest / "shared.pt")["model"]
    return state


@pytest.mark.proof
@pytest.mark.horovod
def test_a_run_of_one_transport_is_resumed_by_the_other_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two ranks no sum depends on its order. Each transport resumes a run that the other has left."""
    reference = tmp_path / "whole"
    train_on(2, [*WORDS[1:], *SHORT, "--run-dir", str(reference)])

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ["--configs", str(failing_model(tmp_path, 6, "if 'STOPS' in os.environ: os._exit(1)"))]
    directory = tmp_path / "parts"
    for launch, stops, resumed in ((mpirun, True, ""), (torchrun, True, "e0000s00004"), (mpirun, False, "e0001")):
        with monkeypatch.context() as patch:
            if stops:
                patch.setenv("STOPS", "1")
            printed = launched(launch, directory, *words, succeeds=not stops)
        assert f"transport: {OVER[launch]}" in printed
        assert (f"resumed from checkpoint {resumed}" in printed) == (resumed != "")
    expected = model(reference)
    assert all(torch.equal(value, expected[name]) for name, value in model(directory).items())


def test_one_process_over_torch(tmp_path: Path) -> None:
    printed = launched(alone, tmp_path / "run", "--configs.train.transport=torch", ranks=1)
    assert "transport: torch.distributed (as set)" in printed and "1 process: nothing is sent" in printed


@pytest.mark.horovod
def test_ranks_of_mpirun_over_torch(tmp_path: Path) -> None:
    printed = launched(mpirun, tmp_path / "run", "--configs.train.transport=torch")
    assert "2 ranks on cpu" in printed and "transport: torch.distributed (as set)" in printed


def test_an_unknown_transport_is_one_message(tmp_path: Path) -> None:
    done = alone(1, [*WORDS, "--configs.train.transport=gloo", "--run-dir", str(tmp_path / "run")])
    assert done.returncode == 2 and "the transport must be auto, horovod or torch, not 'gloo'" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()
