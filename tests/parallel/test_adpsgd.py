"""AD-PSGD on real ranks, over MPI and over Gloo: it converges, counts exactly, waits for nobody, ends cleanly."""

import json
import os
import signal
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import patient
from parallel.ranks import Launcher, alone, each_rank_of, mpirun, over, torchrun

from dgc.comm import TrafficMeter, all_gather_object, all_reduce, barrier
from dgc.comm.connect import connect
from dgc.gossip.adpsgd import ADPSGD, GossipError
from dgc.gossip.model import FlatModel

PROOF = pytest.mark.proof
ON_2_4_5 = [over(run, ranks, PROOF) for run in (mpirun, torchrun) for ranks in (2, 4, 5)]
ALL = [over(mpirun, 3), over(torchrun, 3, PROOF), *ON_2_4_5]


def begun(transport: Any, numel: int, **options: Any) -> tuple[ADPSGD, torch.Tensor, TrafficMeter]:
    z, meter = torch.zeros(numel), TrafficMeter()
    gossip = ADPSGD(**options)
    gossip.start(FlatModel([("z", z)]), transport, meter)
    gossip.resume()
    return gossip, z, meter


def step(gossip: ADPSGD, z: torch.Tensor, pause: float) -> None:
    gossip.begin_step()
    gossip.update(lambda: z.add_(1))
    time.sleep(pause)


@each_rank_of(*ALL, point_to_point=True)
def test_ranks_of_different_speeds_learn_least_squares(transport: Any) -> list[float]:
    """Three epochs of it, with all-reduces between them; each rank has rows of its own. Returns the losses."""
    rank, size = transport.rank, transport.size
    generator = torch.Generator().manual_seed(1)
    wanted = torch.randn(20, generator=generator)
    A = torch.randn(size, 60, 20, generator=generator)
    gossip, z, meter = begun(transport, 20)
    velocity = torch.zeros(20)

    def learn() -> None:
        velocity.mul_(0.5).add_(A[rank].T @ (A[rank] @ (z - wanted)) / 60)
        z.sub_(0.05 * velocity)

    barrier(transport)
    losses, taken = [], 0
    for epoch in range(1, 4):
        while gossip.progress < epoch * 100 * size:
            gossip.begin_step()
            gossip.update(learn)
            taken += 1
            time.sleep(0.001 * (1 + rank % 2))
        gossip.synchronize_messages()
        total = sum(all_gather_object(transport, taken))
        assert gossip.progress == total >= epoch * 100 * size
        mean = all_reduce(transport, z.clone(), "mean", "mean")
        distance = float(all_reduce(transport, (z - mean).norm().view(1), "max", "distance"))
        assert distance / float(mean.norm()) < 0.1
        losses.append(float(((A.reshape(-1, 20) @ (mean - wanted)) ** 2).mean()))
        gossip.resume()
    gossip.synchronize_messages()
    assert gossip.state_dict()["steps"] == total
    gossip.close()
    averagings: Any = gossip.metrics()["averagings"]
    per_average = meter.payload_bytes / max(1, averagings)
    assert losses[-1] < 1e-4 and averagings > 2, (losses, averagings)
    assert 8 * (3 + size) + 80 <= per_average < 4 * (8 * (3 + size) + 80), per_average
    return losses


@each_rank_of(*ALL, over(alone, 1), point_to_point=True)
def test_ranks_that_synchronize_messages_wait_for_all_who_train_on_for_a_while(transport: Any) -> None:
    gossip, z, _ = begun(transport, 100)
    waited = []
    for first in range(transport.size):
        for _ in range(3 if transport.rank == first else 30):
            step(gossip, z, 0.005)
        start = time.monotonic()
        gossip.synchronize_messages()
        waited.append((start, time.monotonic()))
        gossip.resume()  # at once: the next cycle's messages may meet ranks that are still in this one
    gossip.synchronize_messages()
    gossip.close()
    total = float(all_reduce(transport, z.double(), "sum", "total").mean())
    assert gossip.progress == transport.size * (3 + 30 * (transport.size - 1)) == pytest.approx(total, abs=1e-3)
    for (_, end), *starts in zip(waited, *all_gather_object(transport, waited), strict=True):
        assert all(end >= start for start, _ in starts)


@each_rank_of(over(mpirun, 4, PROOF), over(torchrun, 4, PROOF), point_to_point=True)
def test_no_rank_waits_for_one_that_is_five_times_slower(transport: Any) -> None:
    gossip, z, _ = begun(transport, 10_000)
    barrier(transport)
    steps = 0
    while gossip.progress < 40 * transport.size:
        step(gossip, z, 0.1 if transport.rank == transport.size - 1 else 0.02)
        steps += 1
    gossip.synchronize_messages()
    gossip.close()
    *others, slow = all_gather_object(transport, steps)
    assert all(own > 2 * slow for own in others), (others, slow)


def times_out(folder: Path, how: str) -> None:
    """The last rank stops in mid-run. Does not return: what the others raise is left behind first."""
    transport = connect(point_to_point=True)
    gossip, z, _ = begun(transport, 100, timeout=patient(1.5))
    stops = time.monotonic() + 0.5
    try:
        while True:
            step(gossip, z, 0.005)
            if transport.rank == transport.size - 1 and time.monotonic() > stops:
                if how == "is stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                gossip.close()  # its gossip thread has ended too
                time.sleep(10_000)
    except GossipError as error:
        gossip.close()
        found = {"error": str(error), "after": time.monotonic() - stops}
        (folder / f"rank{transport.rank}.json").write_text(json.dumps(found))
    others = [folder / f"rank{rank}.json" for rank in range(transport.size - 1)]
    while not all(other.exists() for other in others):
        time.sleep(0.05)
    time.sleep(0.2)
    os._exit(3)  # Horovod would wait for the rank that stopped


STOPS = [(torchrun, 2, "sleeps"), *product([mpirun], (2, 4, 5), ("sleeps", "is stopped"))]


@pytest.mark.proof
@pytest.mark.parametrize(("launch", "ranks", "how"), STOPS)
def test_a_rank_that_times_out_is_named_to_others(launch: Launcher, ranks: int, how: str, tmp_path: Path) -> None:
    program = "import sys, pathlib; from parallel.test_adpsgd import times_out\n"
    program += "times_out(pathlib.Path(sys.argv[1]), sys.argv[2])"
    done = launch(ranks, ["-c", program, str(tmp_path), how], timeout=60)
    assert done.returncode != 0
    for rank in range(ranks - 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert f"rank {ranks - 1} " in found["error"] and "timed out" in found["error"]
        assert 0 < found["after"] < patient(15)


@pytest.mark.timeout(400)
@each_rank_of(*ON_2_4_5, within=390, last=True, point_to_point=True)
def test_twenty_clean_ends_of_twenty(transport: Any) -> None:
    for i in range(20):
        gossip, z, _ = begun(transport, 5000, averagings_per_step=None if i % 2 else 1.0)
        while gossip.progress < 20 * transport.size:
            step(gossip, z, 0.0005 * ((transport.rank + i) % transport.size))
        gossip.synchronize_messages()
        gossip.close()
        total = all_reduce(transport, z.double(), "sum", "total")
        assert abs(float(total.mean()) - gossip.progress) < 1e-2


@each_rank_of(over(mpirun, 2, PROOF), point_to_point=True)
def test_waiting_costs_no_core(transport: Any) -> None:
    gossip, _, _ = begun(transport, 1_000_000)
    (thread,) = [t for t in threading.enumerate() if t.name == "AD-PSGD gossip"]
    spent, status = [], Path(f"/proc/self/task/{thread.native_id}/schedstat")
    for pause in (0.5, 3):
        time.sleep(pause)
        spent.append(int(status.read_text().split()[0]) / 1e9)
    gossip.synchronize_messages()
    gossip.close()
    assert spent[1] - spent[0] < 0.3, spent
