"""train.py under launchers: it prints the transport that its setting chooses, and names a wrong setting once."""

from pathlib import Path

import pytest
from environment import patient
from parallel.elastic import ElasticRun
from parallel.ranks import Launcher, alone, mpirun
from warm import python

WORDS = ["train.py", "--devices", "cpu", "--configs", "configs/digits/cnn.py", "configs/dgc/wm5.py"]
SHORT = ["--configs.train.num_epochs=2", "--configs.train.batch_size=128", "--configs.train.checkpoint_every=4"]
SHORT += ["--configs.data.num_threads_per_worker=1", "--configs.model.width=8"]
TWO = pytest.param(mpirun, 2, "2 ranks on cpu", marks=pytest.mark.horovod)


@pytest.mark.parametrize(("launch", "ranks", "told"), [(alone, 1, "1 process: nothing is sent"), TWO])
def test_torch_in_place_of_the_launchers_offer(launch: Launcher, ranks: int, told: str, tmp_path: Path) -> None:
    words = [*WORDS, *SHORT, "--configs.train.transport=torch", "--run-dir", str(tmp_path / "run")]
    done = launch(ranks, words, timeout=180)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert "transport: torch.distributed (as set)" in done.stdout and told in done.stdout


def test_an_unknown_transport_is_one_message(tmp_path: Path) -> None:
    done = alone(1, [*WORDS, "--configs.train.transport=gloo", "--run-dir", str(tmp_path / "run")])
    assert done.returncode == 2 and "the transport must be auto, horovod or torch, not 'gloo'" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


def test_wrong_settings_under_torchrun_are_named_once(tmp_path: Path) -> None:
    """Ranks that would fail in the same way again are not started again. tests/proof/test_elastic.py has kills."""
    with ElasticRun(tmp_path, 1, ("configs/dgc/wm5.py", "--configs.train.num_epoch=1"), python=python()) as run:
        status = run.start(2).process.wait(patient(60))
    _, first, message = run.text().strip().splitlines()  # after the agent's name, and nothing of torch
    assert status == 2 and first == "train.py: 2 ranks started by torchrun; loading PyTorch"
    assert "unknown key train.num_epoch; closest: train.num_epochs" in message
