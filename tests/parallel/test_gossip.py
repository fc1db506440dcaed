"""Gossip between real ranks, over MPI and over Gloo: what it keeps, for whom it waits, and when a rank dies."""

import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import case
from environment import patient
from failing_model import failing_model
from gossip.networks import Trained, on
from parallel.found import digest
from parallel.ranks import each_rank_of, mpirun, over, torchrun

from dgc import gossip
from dgc.comm import all_gather_object, all_reduce
from dgc.gossip import DPSGD, OSGP, SGP, Gossip, HalfPrecisionMessage, Int8Message, Topology, n_peer_exponential

ROUNDING = 1e-5
PROOF = pytest.mark.proof
TORCHRUN = {size: over(torchrun, size, PROOF) for size in (2, 3, 4, 5)}
MPIRUN = {3: over(mpirun, 3), **{size: over(mpirun, size, PROOF) for size in (2, 4, 5, 8)}}
ALL = [*MPIRUN.values(), *TORCHRUN.values()]


def both_ways(size: int) -> Topology:
    return gossip.ring(size, min(2, size - 1))


def mean_of(transport: Any, z: torch.Tensor) -> torch.Tensor:
    return all_reduce(transport, z.double(), "mean", "mean")


def assert_near(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=ROUNDING)


IN_TURNS: Any = {1: n_peer_exponential, 2: both_ways}
MASS: dict[str, Callable[[], Gossip]] = {
    "sgp, fp16": lambda: SGP(message=HalfPrecisionMessage()),
    "sgp, two to one": lambda: SGP(both_ways, graph_from_epoch=IN_TURNS),
    "sgp, all-reduce to one": lambda: SGP(None, graph_from_epoch={1: n_peer_exponential, 2: None}),
    "osgp, star": lambda: OSGP(gossip.star),
    "osgp, 4 steps, rank 0 is late": lambda: OSGP(synch_freq=4),
    "osgp, 2 steps": lambda: OSGP(synch_freq=2),
    "osgp, 2 steps, int8": lambda: OSGP(both_ways, synch_freq=2, message=Int8Message(16)),
    "osgp, two to one": lambda: OSGP(both_ways, graph_from_epoch=IN_TURNS),
    "osgp, two to one, 2 steps": lambda: OSGP(both_ways, synch_freq=2, graph_from_epoch=IN_TURNS),
    "osgp, all-reduce to one": lambda: OSGP(None, graph_from_epoch={2: n_peer_exponential}),
}


@each_rank_of(*ALL, point_to_point=True)
def test_the_sums_over_the_ranks_stay(transport: Any) -> None:
    """The sum of x as well as the sum of w, with messages in flight or without."""
    for name, make in MASS.items():
        own = Trained(transport, make()).scatter()
        wanted = mean_of(transport, own.z)
        for step in range(17):
            own.optimizer.begin_epoch(step // 5)
            own.only_gossip()
            # ranks are ahead of each other in turns, or the others come to the end long before rank 0
            time.sleep(0.02 * (transport.rank == 0) if "late" in name else 0.001 * ((transport.rank + step) % 3))
        between, state = own.biased_parameters(), own.algorithm.state_dict()
        weights = state["w"] + sum(share["w"] for share in state["received"].values())
        own.optimizer.synchronize_messages()
        with case(name):
            assert_near(mean_of(transport, between), wanted)
            assert_near(mean_of(transport, own.biased_parameters()), wanted)
            total = float(all_reduce(transport, weights.view(1), "sum", "weights"))
            assert total == pytest.approx(transport.size, abs=1e-9), total
            assert state["received"] or not name.startswith("osgp")


LIKE_LOCKSTEP: dict[str, Callable[[], Gossip]] = {  # no all-reduce: its sums may have another order
    "sgp": SGP,
    "sgp, complete": lambda: SGP(lambda size: n_peer_exponential(size, size - 1)),
    "sgp, grid": lambda: SGP(gossip.grid),
    "sgp, in turns": lambda: SGP(both_ways, graph_from_epoch=IN_TURNS),
    "sgp, int8": lambda: SGP(both_ways, message=Int8Message(16)),
    "sgp, bf16, blocking": lambda: SGP(message=HalfPrecisionMessage("bf16"), blocking=True),
    "osgp": OSGP,
    "osgp, star, fp16": lambda: OSGP(gossip.star, message=HalfPrecisionMessage()),
    "osgp, in turns": lambda: OSGP(both_ways, graph_from_epoch=IN_TURNS),
    "dpsgd": lambda: DPSGD(gossip.full),
}


def trained_and_resumed(transport: Any, make: Callable[[], Gossip]) -> tuple[str, str]:
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


@each_rank_of(*ALL, point_to_point=True)
def test_models_are_those_of_simulated_ranks_also_when_they_are_resumed(transport: Any) -> None:
    for name, make in LIKE_LOCKSTEP.items():
        real = all_gather_object(transport, trained_and_resumed(transport, make))
        assert all(own == resumed for own, resumed in real), name
        if transport.rank == 0:
            assert real == on(transport.size, partial(trained_and_resumed, make=make)), name


@each_rank_of(*(groups[size] for groups in (MPIRUN, TORCHRUN) for size in (3, 5)), point_to_point=True)
def test_a_slow_iteration_travels_along_the_ring(transport: Any, tmp_path: Path) -> None:
    """Rank d, d messages away from rank 0, begins iteration 5 + d (with overlap, one later) only when the slow
    iteration 5 is over: when every other rank has come as far as it can without it, and a second later.
    """
    for later, algorithm in enumerate((SGP(gossip.ring), OSGP(gossip.ring))):
        own, begun = Trained(transport, algorithm), []
        for iteration in range(16):
            own.optimizer.zero_grad()
            begun.append(time.monotonic())
            (tmp_path / f"{later}.{transport.rank}.{iteration}").touch()
            ((own.model(own.inputs) - own.targets) ** 2).mean().backward()
            time.sleep(0.002)
            if (transport.rank, iteration) == (0, 5):
                names = [f"{later}.{rank}.{4 + later + rank}" for rank in range(1, transport.size)]
                while not all((tmp_path / name).exists() for name in names):
                    time.sleep(0.01)
                time.sleep(1.0)
            if iteration == 5:
                ready = time.monotonic()
            own.optimizer.step()
        own.optimizer.close()  # ranks are up to three iterations apart, and the first to leave ends MPI on all
        ended = all_gather_object(transport, ready)[0]
        if transport.rank:
            first = 5 + transport.rank + later
            assert begun[first - 1] < ended <= begun[first], algorithm
        # the slow iteration ends only after all have begun theirs, so that none waits twice
        assert begun[-1] - ended < patient(20), algorithm


@pytest.mark.horovod
@pytest.mark.proof
@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
def test_a_rank_that_dies_ends_the_run(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # it dies after others have heard of it
    dying = failing_model(tmp_path, 3, f"time.sleep(2); os.kill(os.getpid(), signal.{how})", rank=1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    configs = ["--configs", "configs/digits/cnn.py", "configs/gossip/osgp.py", str(dying)]
    changes = ["--configs.train.timeout", f"{patient(6)}", "--configs.train.num_epochs", "2"]
    done = mpirun(2, ["train.py", *configs, *changes, "--run-dir", str(tmp_path / "run")], timeout=80)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("[rank ")]
    if how == "SIGSTOP":
        assert len(told) == 1 and "not respond at all" in told[0]
    else:
        assert "process rank 1" in done.stderr and "signal 9" in done.stderr and len(told) <= 1
