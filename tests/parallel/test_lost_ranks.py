"""A rank that is killed, stopped or terminated: all others end in time, with an error that names it."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from environment import patient
from parallel.processes import descendants, free_port, is_running, send, start
from parallel.ranks import Launcher, environment, horovodrun, mpirun

pytestmark = pytest.mark.proof
LIMIT = 10.0  # seconds, of the transport
TOLD, ENDED = 1.5, 3.0  # seconds after it, or after a process has ended, until the others have an error, and end
HOST = re.escape(socket.gethostname())
PROGRAM = """
import os, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dgc import DistributedOptimizer, TwoPhaseCompressor, compress
from dgc.comm.connect import connect
from dgc.comm.requests import Exchange

how, folder, limit = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
if how == "DDP":
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit))
transport = connect("torch" if how == "DDP" else "horovod", timeout=limit, point_to_point=how == "ring")
rank, size = transport.rank, transport.size
model = torch.nn.Linear(40, 30)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if how == "DDP":
    model = DistributedDataParallel(model)
    exchange = compress(model, TwoPhaseCompressor(4), optimizer, transport=transport)
elif how == "optimizer":
    named = model.named_parameters()
    optimizer = DistributedOptimizer(optimizer, named, TwoPhaseCompressor(4), transport=transport)

def step():
    if how == "ring":
        request = Exchange({(rank + 1) % size: torch.ones(100)}, {(rank - 1) % size: torch.zeros(100)})
        return transport.wait(transport.launch("ring", (request,)))
    optimizer.zero_grad()
    model(torch.randn(8, 40)).square().mean().backward()
    optimizer.step()

try:
    for number in range(10**9):
        step()
        if number == 5:
            (folder / f"pid{rank}.new").write_text(str(os.getpid()))
            (folder / f"pid{rank}.new").rename(folder / f"pid{rank}")
except RuntimeError as error:
    (folder / f"error{rank}").write_text(str(error))
    raise
"""
Started = list[subprocess.Popen[bytes]]


def words(how: str, folder: Path) -> list[str]:
    return ["-W", "ignore", "-c", PROGRAM, how, str(folder), str(LIMIT)]


def without_launcher(size: int, folder: Path) -> Started:
    """A launcher would end the other ranks."""
    of_all = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = []
    for rank in range(size):
        own = {name: str(value) for name, value in {**of_all, "RANK": rank, "LOCAL_RANK": rank}.items()}
        variables = {**environment(1), **own}
        ranks.append(start([sys.executable, *words("DDP", folder)], folder / f"output{rank}", variables))
    return ranks


def launched(launch: Launcher, how: str, size: int, folder: Path) -> Started:
    (command,) = launch.commands(size, words(how, folder))
    return [start(command, folder / "output", environment(size))]


class End(NamedTuple):
    """Of a rank: seconds after the signal until its error and its end, and the error."""

    told: float
    ended: float
    error: str


def ends_of_others(
    begin: Callable[[int, Path], Started], size: int, lost: int, number: signal.Signals, folder: Path
) -> dict[int, End]:
    """What happens to the other ranks, in time."""
    processes, found = begin(size, folder), dict[int, End]()
    try:
        end = time.time() + patient(60)
        while len(pids := list(folder.glob("pid?"))) < size:
            assert time.time() < end and all(process.poll() is None for process in processes), "no training"
            time.sleep(0.05)
        ranks = {int(file.name[3:]): int(file.read_text()) for file in pids}
        send(ranks[lost], number)
        sent = time.time()
        while len(found) < size - 1 and time.time() < sent + patient(2 * LIMIT):
            for process in processes:
                process.poll()
            for rank, pid in ranks.items():
                if rank != lost and rank not in found and not is_running(pid):
                    file = folder / f"error{rank}"
                    found[rank] = End(file.stat().st_mtime - sent, time.time() - sent, file.read_text())
            time.sleep(0.02)
    finally:
        for process in processes:
            for pid in [*descendants(process.pid), process.pid]:
                send(pid, signal.SIGKILL)
            process.wait()
    assert found.keys() == set(range(size)) - {lost}
    limit = LIMIT if number == signal.SIGSTOP else 0.0
    for own in found.values():
        assert own.told < limit + patient(TOLD) and own.ended < limit + patient(ENDED), found
    return found


SIGNALS = pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda number: number.name
)


@SIGNALS
@pytest.mark.parametrize(("size", "lost"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_under_ddp_the_others_name_it(size: int, lost: int, number: signal.Signals, tmp_path: Path) -> None:
    found = ends_of_others(without_launcher, size, lost, number, tmp_path)
    # another rank may have ended for the same reason
    ended = rf"ranks? .*\b{lost} \({HOST}\).* ha(s|ve) ended: "
    told = rf"rank {lost} \({HOST}\) is stopped" if number == signal.SIGSTOP else ended
    assert all(re.match(told, error) for _, _, error in found.values()), found


@pytest.mark.horovod
@pytest.mark.parametrize(
    ("launch", "size", "lost"), [(mpirun, 2, 1), (mpirun, 3, 0), (mpirun, 3, 2), (horovodrun, 3, 1)]
)
def test_under_horovod_the_others_name_one_that_is_stopped(
    launch: Launcher, size: int, lost: int, tmp_path: Path
) -> None:
    found = ends_of_others(partial(launched, launch, "optimizer"), size, lost, signal.SIGSTOP, tmp_path)
    assert all(re.match(rf"rank {lost} \({HOST}\) is stopped", error) for _, _, error in found.values()), found


@pytest.mark.horovod
def test_over_mpi_a_message_names_its_sender(tmp_path: Path) -> None:
    found = ends_of_others(partial(launched, mpirun, "ring"), 3, 1, signal.SIGSTOP, tmp_path)
    assert re.match(rf"rank 1 \({HOST}\) is stopped.* An Exchange with rank 1 was not complete", found[2].error), (
        found
    )
    assert "An Exchange with rank 2 was not complete after 10 seconds" in found[0].error, found
