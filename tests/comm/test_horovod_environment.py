"""Environment variables that must be set before Horovod and MPI start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from environment import patient
from warm import python

NAMES = ["HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "OPAL_PREFIX", "OMPI_COMM_WORLD_RANK"]
NAMES += ["OMPI_MCA_mpi_yield_when_idle", "OMPI_MCA_btl", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # noted, so that what the test leaves is taken back
        monkeypatch.delenv(name)


@pytest.mark.horovod
def test_what_the_user_chose_is_kept_and_a_lone_process_finds_its_open_mpi_and_ends_without_a_sleep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dgc.comm.horovod import prepare_environment  # prepares when it is imported first

    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "orted").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "1"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    prepare_environment()
    assert "OPAL_PREFIX" not in os.environ and "OMPI_MCA_btl" not in os.environ
    for name in ranks:
        monkeypatch.delenv(name)
    prepare_environment()
    assert os.environ["OPAL_PREFIX"] == str(tmp_path) and os.environ["OMPI_MCA_btl"] == "^ofi"
    ours = {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "0.2", "OMPI_MCA_mpi_yield_when_idle": "1"}
    assert {name: os.environ[name] for name in ours} == ours
    for name in ours:
        monkeypatch.setenv(name, "7")
    prepare_environment()
    assert all(os.environ[name] == "7" for name in ours)


def run(executable: str, program: str) -> None:
    words = [executable, "-W", "error", "-c", program]
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=patient(100))
    assert done.returncode == 0 and "good" in done.stdout, done.stdout + done.stderr


@pytest.mark.horovod
def test_init_starts_horovod_once_and_optimizers_use_its_transport() -> None:
    """Also if the script has imported Horovod before, as most scripts do."""
    run(
        python(),
        """
import horovod.torch as hvd
import dgc, os, torch
transport = dgc.init()
assert os.environ["HOROVOD_FUSION_THRESHOLD"] == "0" and hvd.is_initialized()
from dgc.comm.transport import Transport
assert isinstance(transport, Transport) and (transport.rank, transport.size) == (hvd.rank(), hvd.size()) == (0, 1)
assert dgc.init() is transport
from dgc.optim import DistributedOptimizer
model = torch.nn.Linear(2, 2)
assert DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)).transport is transport
print("good")
""",
    )


def test_without_horovod_torch_connects_the_ranks() -> None:
    run(
        sys.executable,
        """
import sys
sys.modules["horovod"] = None
import dgc
assert "torch" not in sys.modules  # dgc alone costs nothing
import dgc.compression, dgc.gossip, dgc.memory, dgc.optim, torch
try:
    dgc.init("horovod")
except ModuleNotFoundError as error:
    assert "Horovod is not installed" in str(error) and "use the transport torch" in str(error), error
transport = dgc.init()
assert torch.distributed.is_initialized() and (transport.rank, transport.size) == (0, 1)
assert dgc.init() is dgc.init("torch") is transport
model = torch.nn.Linear(2, 2)
optimizer = dgc.optim.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
assert optimizer.transport is transport
print("good")
torch.distributed.destroy_process_group()
""",
    )
