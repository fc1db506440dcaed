"""Runs on every rank of a group: models averaged among neighbours. Each function returns what it found."""

import hashlib
import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gossip.networks import Trained, momentum, on

from dgc import gossip
from dgc.comm import all_gather_object, all_reduce
from dgc.compression import DenseCompressor
from dgc.gossip import (
    DPSGD,
    OSGP,
    SGP,
    Gossip,
    HalfPrecisionMessage,
    Int8Message,
    Topology,
    n_peer_exponential,
)
from dgc.optim import DistributedOptimizer

Finding = dict[str, Any]
LR = 0.1


def complete(size: int) -> Topology:
    return n_peer_exponential(size, size - 1)


def both_ways(size: int) -> Topology:
    return gossip.ring(size, min(2, size - 1))


def digest(z: torch.Tensor) -> str:
    return hashlib.sha256(z.numpy().tobytes()).hexdigest()


def mean_of(transport: Any, z: torch.Tensor) -> torch.Tensor:
    return all_reduce(transport, z.double(), "mean", "mean")


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def complete_graph(transport: Any) -> Finding:
    """Steps of SGP on it, and of averaged gradients."""
    own = Trained(transport, SGP(complete))
    for _ in range(15):
        own.step()
    own.optimizer.synchronize_messages()

    other = Trained(transport, SGP())  # for its model and data
    optimizer = DistributedOptimizer(
        momentum(other.model.parameters()), other.model.named_parameters(), DenseCompressor(), transport=transport
    )
    for _ in range(15):
        optimizer.zero_grad()
        ((other.model(other.inputs) - other.targets) ** 2).mean().backward()
        optimizer.step()
    optimizer.close()
    other.optimizer.model.gather()
    return {"model": digest(own.z), "difference": off(own.z, other.z)}


def log2_rounds(transport: Any) -> Finding:
    own = Trained(transport, SGP()).scatter()
    wanted, apart = mean_of(transport, own.z), own.z.clone()
    for _ in range(transport.size.bit_length() - 1):
        own.only_gossip()
    own.optimizer.synchronize_messages()
    return {"before": off(apart, wanted), "after": off(own.z, wanted)}


def without_gradients() -> dict[str, Callable[[], Gossip]]:
    return {
        "sgp": SGP,
        "sgp, star": lambda: SGP(gossip.star),
        "sgp, fp16": lambda: SGP(message=HalfPrecisionMessage()),
        "sgp, int8": lambda: SGP(both_ways, message=Int8Message(16)),
        "osgp": OSGP,
        "osgp, star": lambda: OSGP(gossip.star),
        "osgp, 2 steps": lambda: OSGP(synch_freq=2),
        "osgp, 2 steps, int8": lambda: OSGP(both_ways, synch_freq=2, message=Int8Message(16)),
    }


def mass(transport: Any) -> Finding:
    """Sums over the ranks of x and w, with messages in flight, in mid-run and after synchronization."""
    found = {}
    for name, make in without_gradients().items():
        own = Trained(transport, make()).scatter()
        wanted = mean_of(transport, own.z)
        for step in range(17):
            own.only_gossip()
            time.sleep(0.001 * ((transport.rank + step) % 3))  # ranks are ahead of each other in turns
        between = own.biased_parameters()
        state = own.algorithm.state_dict()
        weights = state["w"] + sum(share["w"] for share in state["received"].values())
        own.optimizer.synchronize_messages()
        found[name] = {
            "received": len(state["received"]),
            "x": off(mean_of(transport, between), wanted),
            "w": float(all_reduce(transport, weights.view(1), "sum", "weights")),
            "x synchronized": off(mean_of(transport, own.biased_parameters()), wanted),
        }
    return found


def switches(transport: Any) -> Finding:
    """Each rank's model moves by a constant of its own in each step, so the mean does by the mean of them."""
    found = {}
    for name, algorithm in {
        "two to one": SGP(both_ways, graph_from_epoch={1: n_peer_exponential, 2: both_ways}),
        "two to one, overlap": OSGP(both_ways, graph_from_epoch={1: n_peer_exponential, 2: both_ways}),
        "two to one, 2 steps": OSGP(both_ways, synch_freq=2, graph_from_epoch={1: n_peer_exponential}),
        "all-reduce to one": SGP(None, graph_from_epoch={1: n_peer_exponential, 2: None}),
        "all-reduce to one, overlap": OSGP(None, graph_from_epoch={1: n_peer_exponential, 2: None}),
    }.items():
        own = Trained(transport, algorithm, partial(torch.optim.SGD, lr=LR)).scatter()
        start = mean_of(transport, own.z)
        for step in range(15):
            own.optimizer.begin_epoch(step // 5)
            own.optimizer.zero_grad()
            for p in own.model.parameters():
                p.grad = torch.full_like(p, float(transport.rank))
            own.optimizer.step()
        end = mean_of(transport, own.biased_parameters())
        found[name] = off(end, start - 15 * LR * (transport.size - 1) / 2)
        own.optimizer.close()
    return found


def resume(transport: Any) -> Finding:
    """Whether a new optimizer, with the state of one in mid-run, ends where that one does."""
    found = {}
    rows: dict[str, Callable[[], Gossip]] = {
        "sgp": SGP,
        "osgp": OSGP,
        "osgp, star, fp16": lambda: OSGP(gossip.star, message=HalfPrecisionMessage()),
    }
    for name, make in rows.items():
        own = Trained(transport, make())
        for _ in range(7):
            own.step()
        file = io.BytesIO()
        torch.save(own.optimizer.compression_state_dict(), file)
        file.seek(0)
        received = len(own.algorithm.state_dict()["received"])
        other = Trained(transport, make()).scatter(3)
        other.optimizer.load_compression_state_dict(torch.load(file, weights_only=True))
        for trained in (own, other):
            for _ in range(7):
                trained.step()
            trained.optimizer.close()
        found[name] = {"received": received, "same": torch.equal(own.z, other.z)}
    return found


def like_lockstep(transport: Any) -> Finding:
    """Rank 0 simulates all ranks in turn."""
    rows: dict[str, Callable[[], Gossip]] = {
        "sgp": SGP,
        "sgp, grid": lambda: SGP(gossip.grid),
        "sgp, int8": lambda: SGP(both_ways, message=Int8Message(16)),
        "sgp, bf16, blocking": lambda: SGP(message=HalfPrecisionMessage("bf16"), blocking=True),
        "osgp": OSGP,
        "osgp, star": lambda: OSGP(gossip.star),
        "dpsgd": lambda: DPSGD(gossip.full),
    }

    def body(transport: Any, make: Callable[[], Gossip]) -> str:
        own = Trained(transport, make())
        for _ in range(8):
            own.step()
        own.optimizer.synchronize_messages()
        return digest(own.z)

    real = {name: all_gather_object(transport, body(transport, make)) for name, make in rows.items()}
    if transport.rank:
        return {}
    return {name: real[name] == on(transport.size, partial(body, make=make)) for name, make in rows.items()}


def slow_once(transport: Any, folder: Path) -> Finding:
    """When each rank on a directed ring gets to each forward pass; rank 0 is slow in that of iteration 5.

    It lasts until every other rank has come as far as it can without it, and a second longer.
    """
    found: Finding = {}
    for algorithm in (SGP(gossip.ring), OSGP(gossip.ring)):
        own = Trained(transport, algorithm)
        begun = []
        for iteration in range(16):
            own.optimizer.zero_grad()
            begun.append(time.monotonic())
            (folder / f"{type(algorithm).__name__}.{transport.rank}.{iteration}").touch()
            ((own.model(own.inputs) - own.targets) ** 2).mean().backward()
            time.sleep(0.002)
            if (transport.rank, iteration) == (0, 5):
                later = 5 if isinstance(algorithm, OSGP) else 4
                names = [f"{type(algorithm).__name__}.{rank}.{later + rank}" for rank in range(1, transport.size)]
                while not all((folder / name).exists() for name in names):
                    time.sleep(0.01)
                time.sleep(1.0)
            if iteration == 5:
                ready = time.monotonic()
            own.optimizer.step()
        own.optimizer.close()  # ranks are up to three iterations apart, and the first to leave ends MPI on all
        found[type(algorithm).__name__] = {"begun": begun, "ready": ready}
    return found


def one_is_slow(transport: Any) -> Finding:
    """All do 40 steps, one rank at a fifth of the others' pace: those come to the end long before it."""
    own = Trained(transport, OSGP(synch_freq=4)).scatter()
    wanted = mean_of(transport, own.z)
    for _ in range(40):
        own.only_gossip()
        time.sleep(0.025 if transport.rank == 0 else 0.005)
    own.optimizer.synchronize_messages()
    return {"x": off(mean_of(transport, own.biased_parameters()), wanted)}
