"""Runs on every rank of a group: models averaged among neighbours. Each function returns what it found."""

import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gossip.networks import Trained, on
from parallel.found import Finding, digest

from dgc import gossip
from dgc.comm import all_gather_object, all_reduce
from dgc.gossip import DPSGD, OSGP, SGP, Gossip, HalfPrecisionMessage, Int8Message, Topology, n_peer_exponential


def both_ways(size: int) -> Topology:
    return gossip.ring(size, min(2, size - 1))


def mean_of(transport: Any, z: torch.Tensor) -> torch.Tensor:
    return all_reduce(transport, z.double(), "mean", "mean")


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def mass(transport: Any) -> Finding:
    """Sums over the ranks of x and w, with messages in flight, in mid-run and after synchronization."""
    two_to_one: Any = {1: n_peer_exponential, 2: both_ways}
    rows: dict[str, Callable[[], Gossip]] = {
        "sgp, fp16": lambda: SGP(message=HalfPrecisionMessage()),
        "sgp, two to one": lambda: SGP(both_ways, graph_from_epoch=two_to_one),
        "sgp, all-reduce to one": lambda: SGP(None, graph_from_epoch={1: n_peer_exponential, 2: None}),
        "osgp, star": lambda: OSGP(gossip.star),
        "osgp, 2 steps": lambda: OSGP(synch_freq=2),
        "osgp, 2 steps, int8": lambda: OSGP(both_ways, synch_freq=2, message=Int8Message(16)),
        "osgp, two to one": lambda: OSGP(both_ways, graph_from_epoch=two_to_one),
        "osgp, two to one, 2 steps": lambda: OSGP(both_ways, synch_freq=2, graph_from_epoch=two_to_one),
        "osgp, all-reduce to one": lambda: OSGP(None, graph_from_epoch={2: n_peer_exponential}),
    }
    found = {}
    for name, make in rows.items():
        own = Trained(transport, make()).scatter()
        wanted = mean_of(transport, own.z)
        for step in range(17):
            own.optimizer.begin_epoch(step // 5)
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


def like_lockstep(transport: Any) -> Finding:
    """Rank 0 simulates all ranks in turn. Another optimizer begins in mid-run with what has been saved."""
    in_turns: Any = {1: n_peer_exponential, 2: both_ways}  # no all-reduce: its sums may have another order
    rows: dict[str, Callable[[], Gossip]] = {
        "sgp": SGP,
        "sgp, complete": lambda: SGP(lambda size: n_peer_exponential(size, size - 1)),
        "sgp, grid": lambda: SGP(gossip.grid),
        "sgp, in turns": lambda: SGP(both_ways, graph_from_epoch=in_turns),
        "sgp, int8": lambda: SGP(both_ways, message=Int8Message(16)),
        "sgp, bf16, blocking": lambda: SGP(message=HalfPrecisionMessage("bf16"), blocking=True),
        "osgp": OSGP,
        "osgp, star, fp16": lambda: OSGP(gossip.star, message=HalfPrecisionMessage()),
        "osgp, in turns": lambda: OSGP(both_ways, graph_from_epoch=in_turns),
        "dpsgd": lambda: DPSGD(gossip.full),
    }

    def body(transport: Any, make: Callable[[], Gossip]) -> tuple[str, str]:
        own = Trained(transport, make())
        begun = [own]
        for step in range(12):
            for trained in begun:
                trained.optimizer.begin_epoch(step // 4)
                trained.step()
            if step == 5:
                torch.save(own.optimizer.compression_state_dict(), file := io.BytesIO())
                file.seek(0)
                begun.append(Trained(transport, make()).scatter(3))
                begun[1].optimizer.load_compression_state_dict(torch.load(file, weights_only=True))
        for trained in begun:
            trained.optimizer.close()
        return digest([own.z]), digest([begun[1].z])

    real = {name: all_gather_object(transport, body(transport, make)) for name, make in rows.items()}
    assert all(own == resumed for models in real.values() for own, resumed in models), real
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
