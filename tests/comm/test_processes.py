"""How transports start and end in a process. tests/parallel has what needs several ranks."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch.distributed as dist
from cases import case
from environment import patient
from warm import python

from dgc.comm.connect import default_transport
from dgc.comm.torch_distributed import destroy

NAMES = ["HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "OPAL_PREFIX", "OMPI_COMM_WORLD_RANK"]
NAMES += ["OMPI_MCA_mpi_yield_when_idle", "OMPI_MCA_btl", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # noted, so that what the test leaves is taken back
        monkeypatch.delenv(name)


@pytest.fixture
def environment_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that prepares an environment, given some variables, for a Python with an Open MPI of its own."""
    from dgc.comm.horovod import prepare_environment  # prepares when it is imported first

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "orted").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))

    def prepared(given: dict[str, str]) -> dict[str, str]:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        prepare_environment()
        return dict(os.environ)

    return prepared


RANK = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "1"}
CHOSEN = {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "0.2", "OMPI_MCA_mpi_yield_when_idle": "1"}


@pytest.mark.horovod
def test_a_rank_of_mpirun_keeps_the_open_mpi_of_its_launcher(environment_of: Any) -> None:
    environment = environment_of(RANK)
    assert "OPAL_PREFIX" not in environment and "OMPI_MCA_btl" not in environment


@pytest.mark.horovod
def test_a_lone_process_finds_its_open_mpi(environment_of: Any, tmp_path: Path) -> None:
    environment = environment_of({})
    assert environment["OPAL_PREFIX"] == str(tmp_path) and environment["OMPI_MCA_btl"] == "^ofi"


@pytest.mark.horovod
def test_the_environment_gets_settings_of_horovod(environment_of: Any) -> None:
    environment = environment_of({})
    assert {name: environment[name] for name in CHOSEN} == CHOSEN


@pytest.mark.horovod
def test_settings_that_the_user_chose_are_kept(environment_of: Any) -> None:
    environment = environment_of(dict.fromkeys(CHOSEN, "7"))
    assert all(environment[name] == "7" for name in CHOSEN)


def run(executable: str, program: str) -> None:
    words = [executable, "-W", "error", "-c", program]
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=patient(100))
    assert done.returncode == 0 and "good" in done.stdout, done.stdout + done.stderr


@pytest.mark.horovod
def test_init_starts_horovod_once_for_all_optimizers() -> None:
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


# The function that is registered first is called last.
PROGRAM = """
import atexit, time
from pathlib import Path
def threads():
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sum("gloo_runloop" in name for name in names)
atexit.register(lambda: print("at exit", threads()))
import torch
import torch.distributed as dist
from dgc.comm import all_reduce
from dgc.comm.requests import AllReduce
from dgc.comm.torch_distributed import connect
if {initialised}:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    time.sleep({seconds})  # a new thread has no name yet
print("program", threads())

def main():
    transport = connect(hierarchical=True)
    transport.open_communicator("communicator")
    all_reduce(transport, torch.ones(3), "sum")
    if {unfinished}:
        transport.launch("unfinished", (AllReduce(torch.ones(3)),))

main()
if {destroyed}:
    dist.destroy_process_group()
time.sleep({seconds})
print("before", threads())
"""


def test_the_transport_of_a_process_is_made_again_after_a_second_init_process_group() -> None:
    found = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        found += [default_transport(transport="torch") for _ in range(2)]
        dist.destroy_process_group()
    assert found[0] is found[1] is not found[2] is found[3]


def test_no_thread_of_a_process_group_outlives_the_program() -> None:
    """But for the program's own group, and for a group in which something is unfinished."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = dict[str, Any]()
    for setting in ("none", "initialised", "unfinished", "destroyed"):
        settings = {name: name == setting for name in ("initialised", "unfinished", "destroyed")}
        program = PROGRAM.format(**settings, seconds=patient(0.5))
        started[setting] = subprocess.Popen([sys.executable, "-c", program], **pipes)
    for setting, process in started.items():
        printed, errors = process.communicate(timeout=patient(60))
        program_s, before, after = (int(line.split()[-1]) for line in printed.splitlines())
        with case(setting):
            assert not errors and process.returncode == 0
            assert before > program_s and (program_s > 0) == (setting == "initialised")
            assert after == {"initialised": program_s, "unfinished": before}.get(setting, 0)


def test_the_threads_of_all_groups_end_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, a program with 100 groups would end 10 s late."""
    barrier, met = Barrier(3), []

    class Group:
        def __del__(self) -> None:
            with suppress(BrokenBarrierError):
                barrier.wait(timeout=patient(30))
                met.append(True)

    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    groups: list[Any] = [Group() for _ in range(3)]
    destroy(groups)
    assert not groups and met == [True] * 3


# Rank 1 ends while it waits for two messages. Its shutdown lasts until rank 0 has sent them, or has failed to.
ENDS = """
import atexit, sys, threading, time
atexit.register(lambda: print(sum(thread.name == "dgc-messages" for thread in threading.enumerate())))
from contextlib import suppress
from pathlib import Path
import torch
import torch.distributed as dist
from dgc.comm.requests import Exchange
from dgc.comm.torch_distributed import connect
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
ending, sent = folder / "ending", folder / "sent"

def wait_for(file, sleep=time.sleep):
    while not file.exists():
        sleep(0.01)

class Shutdown:
    def __del__(self, ending=ending, sent=sent, wait_for=wait_for, sleep=time.sleep):
        ending.touch()
        wait_for(sent)
        sleep(0.5)

dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(str(folder / "store"), 2))
transport = connect(point_to_point=True)
channel = transport.channel()
other = 1 - rank
work = transport.launch("both", (Exchange({other: torch.ones(3)}, {other: torch.zeros(3)}),))
transport.wait(work)
if rank == 1:
    transport.launch("never", (Exchange({}, {0: torch.zeros(3)}),))
    channel.irecv(torch.zeros(3), 1)
    shutdown = Shutdown()  # deleted after the functions of atexit
else:
    wait_for(ending)
    with suppress(RuntimeError):  # the connection is closed
        transport.launch("never", (Exchange({1: torch.ones(3)}, {}),))
    with suppress(RuntimeError):
        channel.isend(1, torch.ones(3), 1)
    time.sleep(0.2)
    sent.touch()
"""


def test_a_message_during_the_shutdown_of_python_does_no_harm(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS, str(tmp_path)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, rank], **pipes) for rank in "01"]
    try:
        ends = [rank.communicate(timeout=patient(60)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    # the thread that waits for a message from any rank cannot be ended, and nothing can arrive for it
    assert ends == [("0\n", ""), ("1\n", "")]
    assert [rank.returncode for rank in ranks] == [0, 0]
