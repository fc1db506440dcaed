"""A small model trained by gossip on each rank of a simulated world."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from optim.nets import same as same
from torch import Tensor, nn

from dgc import contrib, gossip
from dgc.comm.lockstep import LockstepTransport, LockstepWorld
from dgc.compression import PowerSGDCompressor, ScaledSignCompressor, SparseCompressor
from dgc.engine.redistribute import redistribute
from dgc.local import Nesterov, OuterSteps, Ramp, SlowMo
from dgc.memory import ResidualMemory
from dgc.optim import LocalOptimizer, MuonWithAdamW


@dataclass(frozen=True)
class Row:
    name: str
    make: Callable[[], gossip.Gossip]
    takes: Callable[[int], bool] = lambda size: True
    by_timing: bool = False  # whether rounds are taken in when they happen to come


ROWS = [
    Row("sgp", gossip.SGP),
    Row("sgp, blocking", lambda: gossip.SGP(blocking=True)),
    Row("sgp on a full graph", lambda: gossip.SGP(gossip.full)),
    Row("sgp on a star", lambda: gossip.SGP(gossip.star)),
    Row("sgp on a grid, fp16", lambda: gossip.SGP(gossip.grid, message=gossip.HalfPrecisionMessage())),
    Row("sgp, bf16", lambda: gossip.SGP(message=gossip.HalfPrecisionMessage("bf16"))),
    Row("sgp, int8", lambda: gossip.SGP(message=gossip.Int8Message(16))),
    Row("sgp in turns", lambda: gossip.SGP(None, graph_from_epoch={1: gossip.full, "2": gossip.exponential})),
    Row("osgp", gossip.OSGP),
    Row("osgp on a star", lambda: gossip.OSGP(gossip.star)),
    Row("osgp, 2 steps", lambda: gossip.OSGP(gossip.exponential, synch_freq=2), by_timing=True),
    Row("osgp, 2 steps, after the step", lambda: gossip.OSGP(synch_freq=2, overlap=False), by_timing=True),
    Row("osgp, int8", lambda: gossip.OSGP(message=gossip.Int8Message(16))),
    Row("osgp in turns", lambda: gossip.OSGP(gossip.full, graph_from_epoch={1: None, 2: gossip.ring})),
    Row("dpsgd", lambda: gossip.DPSGD(gossip.bipartite_exponential), lambda size: size % 2 == 0),
    Row("dpsgd on a full graph, int8", lambda: gossip.DPSGD(gossip.full, message=gossip.Int8Message(16))),
    Row("dpsgd, metropolis", lambda: gossip.DPSGD(gossip.grid, mixing=gossip.metropolis)),
    Row("choco", lambda: contrib.CHOCO(quantizer=contrib.TopK(0.25))),
    Row("choco on a full graph", lambda: contrib.CHOCO(gossip.full, quantizer=contrib.TopK(0.25))),
    Row("powergossip", lambda: contrib.PowerGossip(rank=2)),
    Row("choco, local steps", lambda: contrib.CHOCO(gossip.full, quantizer=contrib.TopK(0.5), average_every=2)),
    Row("powergossip, local steps", lambda: contrib.PowerGossip(gossip.full, rank=3, average_every=2)),
    Row("powergossip by pairs", lambda: contrib.PowerGossip(gossip.random_matching, rank=2, num_iters_per_step=3)),
    Row("local sgd", lambda: OuterSteps(4)),
    Row("pga", lambda: OuterSteps(4, gossip.SGP())),
    Row("pga, choco", lambda: OuterSteps(4, contrib.CHOCO())),
]
IN_TWO_PARTS: dict[str, Any] = {"fragment_mb": 64 * 4 / 2**20}  # 63 and 30 of the elements of a Trained


def top_k() -> SparseCompressor:
    return SparseCompressor(0.1, ResidualMemory(), vectors="sparse")


adam = partial(torch.optim.AdamW, lr=0.05)
# those that move on from the mean by a momentum of their own, compress what they exchange, or use it later
OUTER = [
    Row("slowmo", lambda: OuterSteps(3, gossip.OSGP(), SlowMo())),
    Row("diloco", lambda: OuterSteps(3, None, Nesterov())),
    Row("diloco, top-k", lambda: OuterSteps(3, None, Nesterov(), top_k())),
    Row("diloco, rank 1", lambda: OuterSteps(3, outer=Nesterov(), compression=PowerSGDCompressor(rank=1))),
    Row("outer adam, signs", lambda: OuterSteps(3, None, adam, ScaledSignCompressor())),
    Row("streaming", lambda: OuterSteps(6, None, Nesterov(), **IN_TWO_PARTS, delay=2, alpha=0.5)),
    Row("streaming, top-k", lambda: OuterSteps(6, None, None, top_k(), **IN_TWO_PARTS, delay=3)),
    Row("streaming, ramp", lambda: OuterSteps(6, **IN_TWO_PARTS, delay=2, outer_schedule=Ramp(0.4, 1.0, 9))),
    Row("post-local sgd", lambda: OuterSteps(4, warmup_steps=6)),
    Row("momentum", lambda: OuterSteps(3, None, Nesterov(), top_k(), average_momentum=True)),
    Row("momentum, slowmo", lambda: OuterSteps(3, None, SlowMo(), average_momentum=True)),
]
MORE = [
    Row("sign", lambda: contrib.CHOCO(quantizer=contrib.Sign())),
    Row("fp16", lambda: contrib.CHOCO(gossip.grid, quantizer=contrib.TopK(0.2, "fp16"))),
    Row("star", lambda: contrib.CHOCO(gossip.star, quantizer=contrib.TopK(0.2))),
    Row("one half step", lambda: contrib.PowerGossip(num_iters_per_step=1)),
    Row("three half steps", lambda: contrib.PowerGossip(gossip.random_matching, num_iters_per_step=3)),
]
# between machines
BASES: dict[str, Callable[[], gossip.Gossip]] = {
    "sgp": gossip.SGP,
    "sgp on a star, blocking": lambda: gossip.SGP(gossip.star, blocking=True),
    "osgp": gossip.OSGP,
    "osgp, int8": lambda: gossip.OSGP(message=gossip.Int8Message(16)),
    "dpsgd": lambda: gossip.DPSGD(gossip.full),
    "choco": lambda: contrib.CHOCO(gossip.grid),
    "local sgd": lambda: OuterSteps(3),
    "slowmo": lambda: OuterSteps(3, gossip.SGP(), SlowMo(0.2)),
    "momentum": lambda: OuterSteps(3, average_momentum=True),
}


def of_machines(base: Callable[[], gossip.Gossip]) -> Callable[[], gossip.Gossip]:
    return lambda: gossip.HierarchicalGossip(base())


SIZES = (1, 2, 3, 6)


momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-2)


def muon(parameters: Any, is_first: bool = False) -> torch.optim.Optimizer:
    """Muon for the matrices, in three parts each. is_first: before the group of AdamW."""
    every = list(parameters)
    groups = [{"params": [p for p in every if p.dim() == dim], "muon": dim == 2, "parts": 3} for dim in (1, 2)]
    return MuonWithAdamW(groups[::-1] if is_first else groups, 0.02, ns_precision="fp32")


class Trained:
    """One rank's model, optimizer and data; the same start on every rank."""

    def __init__(
        self,
        transport: Any,
        algorithm: Any,
        make_optimizer: Any = momentum,
        dtype: Any = torch.float32,
        nonfinite: str = "skip",
    ) -> None:
        self.rank, self.size = transport.rank, transport.size
        generator = torch.Generator().manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(6, 9, dtype=dtype), nn.Tanh(), nn.Linear(9, 3, dtype=dtype))
        for p in self.model.parameters():
            p.data.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float32))
        inner, named = make_optimizer(self.model.parameters()), self.model.named_parameters()
        self.optimizer = LocalOptimizer(inner, named, algorithm, transport=transport, nonfinite=nonfinite)
        generator.manual_seed(100 + self.rank)
        self.inputs = torch.randn(40, 6, generator=generator, dtype=torch.float32).to(dtype)
        self.targets = self.inputs[:, :3].tanh()

    @property
    def z(self) -> Tensor:
        return self.optimizer.model.z

    @property
    def algorithm(self) -> Any:
        return self.optimizer.method

    def go_apart(self) -> None:
        """Takes the first step, which some algorithms must begin from one model."""
        if self.algorithm.needs_common_start:
            self.only_gossip()
            self.finish()

    def scatter(self, seed: int = 0, of: int | None = None) -> "Trained":
        """Adds the noise of this rank, or `of` another."""
        generator = torch.Generator().manual_seed(1000 * seed + (self.rank if of is None else of))
        self.z.add_(torch.randn(self.z.numel(), generator=generator, dtype=torch.float32))
        self.optimizer.model.scatter()
        return self

    def loss(self) -> Tensor:
        return ((self.model(self.inputs) - self.targets) ** 2).mean()

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def steps(self, number: int) -> list[float]:
        """The losses before them."""
        return [self.step() for _ in range(number)]

    def only_gossip(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.optimizer.step()

    def finish(self) -> Tensor:
        """The model once no message is in flight."""
        self.optimizer.synchronize_messages()
        return self.z.clone()

    def state(self) -> Any:
        return copy.deepcopy(self.optimizer.compression_state_dict())

    def resume(self, state: Any) -> "Trained":
        self.optimizer.load_compression_state_dict(state)
        return self

    def biased_parameters(self) -> Tensor:
        self.algorithm.flush()
        return self.algorithm.biased_parameters().double()


def on(size: int, body: Callable[[LockstepTransport], Any], local_size: int | None = None) -> list[Any]:
    return LockstepWorld(size, local_size).run(body)


def each(size: int, make: Any, body: Any, local_size: int | None = None, **options: Any) -> list[Any]:
    """What `body` returns on every rank for a new Trained of this algorithm."""
    return on(size, lambda transport: body(Trained(transport, make(), **options)), local_size)


def after(steps: int, make: Any, size: int, local_size: int | None = None, **options: Any) -> list[Tensor]:
    """Every rank's model after so many steps, and once no message is in flight."""

    return each(size, make, lambda own: own.steps(steps) and own.finish(), local_size, **options)


def losses(steps: int, make: Any, size: int, local_size: int | None = None) -> tuple[float, float]:
    """The first and the last, as means over ranks."""
    first, *_, last = map(mean, zip(*each(size, make, lambda own: own.steps(steps), local_size), strict=True))
    return first, last


def after_joint_steps(steps: int, size: int) -> Tensor:
    """The model after SGD with momentum on the mean of all ranks' losses."""
    ranks = one, *_ = on(size, lambda transport: Trained(transport, OuterSteps(100)))
    optimizer = momentum(one.model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        sum(((one.model(r.inputs) - r.targets) ** 2).mean() for r in ranks).div(size).backward()
        optimizer.step()
    return one.z


def mean(parts: Sequence[Any]) -> Any:
    return sum(parts) / len(parts)


def off(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def farthest(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return max(off(x, y) for x, y in zip(a, b, strict=True))


STOPS = ((False, False), (True, False), (True, True))


def check_that_a_saved_state_goes_on(make: Any, size: int, steps: int, stop: int, local_size: Any = None) -> None:
    """From a state that is saved after step(), and from one after the zero_grad() of the next step."""

    def body(transport: LockstepTransport, stops: bool, within: bool) -> Tensor:
        own = make(transport)
        for step in range(steps):
            own.optimizer.begin_epoch(step // 5)
            if step == stop and stops:
                if within:
                    own.optimizer.zero_grad()
                state = own.state()
                own.optimizer.close()
                own = make(transport).scatter(3).resume(state)
                own.optimizer.begin_epoch(step // 5)
            own.step()
        return own.finish()

    runs = [partial(body, stops=stops, within=within) for stops, within in STOPS]
    straight, stopped, stopped_within = (on(size, run, local_size) for run in runs)
    assert same(straight, stopped) and same(straight, stopped_within)


def check_that_means_stay(make: Any, seen: Any, steps: int, new: int) -> list[Tensor]:
    """The means of what is seen of 4 ranks, and of new ones that go on from their states. Returns later models."""

    def before(transport: LockstepTransport) -> tuple[Any, list[Tensor]]:
        own = make(transport)
        own.steps(steps)
        found = seen(own)
        return own.state(), found

    states, wanted = zip(*on(4, before), strict=True)

    def resumed(transport: LockstepTransport) -> tuple[list[Tensor], Tensor]:
        own = make(transport).resume(redistribute(states, new)[transport.rank])
        loaded = seen(own)
        own.steps(2)
        return loaded, own.finish()

    found, models = zip(*on(new, resumed), strict=True)
    for of_new, of_old in zip(zip(*found, strict=True), zip(*wanted, strict=True), strict=True):
        assert off(mean(of_new).double(), mean(of_old).double()) < 1e-6
    return list(models)
