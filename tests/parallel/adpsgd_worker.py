"""Runs on every rank of a group: asynchronous gossip. Each function returns what it found.

adpsgd_worker.py FOLDER HOW

runs on ranks of its own, of which the last stops. What each of the others is told goes to a file.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import patient
from parallel.found import Finding

from dgc.comm import TrafficMeter, all_gather_object, all_reduce, barrier
from dgc.comm.connect import connect
from dgc.gossip.adpsgd import ADPSGD, GossipError
from dgc.gossip.model import FlatModel


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


def distance(transport: Any, z: torch.Tensor) -> float:
    """The largest of all ranks' from the mean, over the mean's norm."""
    mean = all_reduce(transport, z.clone(), "mean", "mean")
    return float(all_reduce(transport, (z - mean).norm().view(1), "max", "distance")) / float(mean.norm())


def least_squares(transport: Any) -> Finding:
    """Three epochs of global progress, with all-reduces between them; each rank has rows of its own."""
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
    losses, totals, taken, distances = [], [], 0, []
    for epoch in range(1, 4):
        while gossip.progress < epoch * 100 * size:
            gossip.begin_step()
            gossip.update(learn)
            taken += 1
            time.sleep(0.001 * (1 + rank % 2))
        gossip.synchronize_messages()
        everyone = all_gather_object(transport, (gossip.progress, taken))
        totals.append([everyone, sum(steps for _, steps in everyone)])
        distances.append(distance(transport, z))
        mean = all_reduce(transport, z.clone(), "mean", "model")
        losses.append(float(((A.reshape(-1, 20) @ (mean - wanted)) ** 2).mean()))
        gossip.resume()
    gossip.synchronize_messages()
    state = gossip.state_dict()
    gossip.close()
    return {
        "losses": losses,
        "totals": totals,
        "distances": distances,
        "averagings": gossip.metrics()["averagings"],
        "per_average": meter.payload_bytes / max(1, gossip.metrics()["averagings"]),
        "steps": state["steps"],
        "taken": taken,
    }


def one_is_slow(transport: Any) -> int:
    """Steps of this rank, until all together have done 40 for each. The last one is five times slower."""
    gossip, z, _ = begun(transport, 10_000)
    barrier(transport)
    steps = 0
    while gossip.progress < 40 * transport.size:
        step(gossip, z, 0.1 if transport.rank == transport.size - 1 else 0.02)
        steps += 1
    gossip.synchronize_messages()
    gossip.close()
    return steps


def synchronized_one_by_one(transport: Any) -> Finding:
    """Each rank is once the first to synchronize messages; the others train on for a while."""
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
    total = all_reduce(transport, z.double(), "sum", "total")
    steps = transport.size * (3 + 30 * (transport.size - 1))
    return {"waited": waited, "progress": gossip.progress, "steps": steps, "sum": float(total.mean())}


def clean_ends(transport: Any) -> list[float]:
    """By how much the sum is not the number of steps, each of twenty times from start to close."""
    errors = []
    for i in range(20):
        gossip, z, _ = begun(transport, 5000, averagings_per_step=None if i % 2 else 1.0)
        while gossip.progress < 20 * transport.size:
            step(gossip, z, 0.0005 * ((transport.rank + i) % transport.size))
        gossip.synchronize_messages()
        gossip.close()
        total = all_reduce(transport, z.double(), "sum", "total")
        errors.append(abs(float(total.mean()) - gossip.progress))
    return errors


def idle(transport: Any) -> float:
    """CPU seconds per second of the gossip thread while there is nothing to do."""
    gossip, _, _ = begun(transport, 1_000_000)
    (thread,) = [t for t in threading.enumerate() if t.name == "AD-PSGD gossip"]
    time.sleep(0.5)
    before, start = cpu_seconds(thread.native_id), time.perf_counter()
    time.sleep(3)
    spent = (cpu_seconds(thread.native_id) - before) / (time.perf_counter() - start)
    gossip.synchronize_messages()
    gossip.close()
    return spent


def cpu_seconds(thread: int | None) -> float:
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def times_out(transport: Any, folder: Path, stop: Callable[[ADPSGD], None]) -> None:
    """The last rank stops in mid-run. Does not return: what the others raise is left behind first."""
    gossip, z, _ = begun(transport, 100, timeout=patient(1.5))
    stops = time.monotonic() + 0.5
    try:
        while True:
            step(gossip, z, 0.005)
            if transport.rank == transport.size - 1 and time.monotonic() > stops:
                stop(gossip)
    except GossipError as error:
        gossip.close()
        found = {"error": str(error), "after": time.monotonic() - stops}
        (folder / f"rank{transport.rank}.json").write_text(json.dumps(found))
    others = [folder / f"rank{rank}.json" for rank in range(transport.size - 1)]
    while not all(other.exists() for other in others):
        time.sleep(0.05)
    time.sleep(0.2)
    os._exit(3)  # Horovod would wait for the rank that stopped


def sleeps(gossip: ADPSGD) -> None:
    """Its gossip thread has ended too."""
    gossip.close()
    time.sleep(10_000)


def is_stopped(gossip: ADPSGD) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    how = {"sleeps": sleeps, "is_stopped": is_stopped}[sys.argv[2]]
    times_out(connect(point_to_point=True), Path(sys.argv[1]), how)
