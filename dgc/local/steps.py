"""Outer steps: every rank trains alone for H steps, then the ranks exchange how far they came. Local SGD (Stich
2019, arXiv 1805.09767), post-local SGD (Lin et al.: ICLR 2020, arXiv 1808.07217), Gossip-PGA (Chen et al. 2021,
arXiv 2105.09080), SlowMo (Wang et al.: ICLR 2020, arXiv 1910.00643, Algorithm 1), DiLoCo (Douillard et al. 2023,
arXiv 2311.08105, Algorithm 1), Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512), SparseLoCo (Sarfi et
al. 2025, arXiv 2508.15706), momenta that are averaged too (DES-LOC: Iacob et al. 2025, arXiv 2505.22549).

z is the model of a rank, and z0 the model of all ranks after the last exchange. Every H steps

    d  = z0 - z                    pseudo-gradient of a rank, of H steps of any optimizer, or of gossip (`base`);
                                   w (z0 - z) with the weight w of push-sum
    D  = mean over ranks of C(d)   by any compressor C, which keeps what it does not send in its residual
    z0 = outer(z0, D)              outer optimizer; z0 - D is the mean of the models. Its learning rate may have a
                                   factor f(t), of the step t in which the exchange began alone
    z  = alpha z + (1 - alpha) z0

The exchange of fragment i of P, a part of the model, begins at step i H/P of each H steps, and D is used `delay`
steps later. Training goes on meanwhile. If a pseudo-gradient has NaN or inf, every rank goes back to z0. What was
finite stays in the residual of the compressor, if it has one, and is sent later.

With `average_momentum` z has the momentum of each parameter too, whose z0 is always the mean.

Differences from the papers: Each rank keeps its own inner optimizer buffers, except for momenta that are averaged,
and they are never reset. SlowMo takes the learning rate of the first parameter group in the step of the
exchange. In Streaming DiLoCo a fragment is made of transformer blocks, here of any tensors in the order of the
model.

Payload in bytes: the payload of the compressors every H steps, and the payload of the base. Dense: 4 n.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, nan
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import Transport
from dgc.core.arguments import FLAG, NOTHING, NUMBER, WHOLE, require
from dgc.core.dense import HorovodCompression
from dgc.core.protocol import Compressor
from dgc.core.route import Route
from dgc.core.state import check_count, check_mapping, check_tensor
from dgc.engine.agreement import check_equal
from dgc.engine.options import as_route
from dgc.engine.state import texts
from dgc.gossip.model import FlatModel
from dgc.gossip.protocol import Gossip
from dgc.local.exchange import Flight, Fragment, OuterExchange, divide
from dgc.local.optimizers import OuterOptimizer

COMMON_START = (
    "call dgc.optim.broadcast_parameters(model.state_dict()) before LocalOptimizer, because ranks exchange only "
    "changes"
)
OuterSchedule: TypeAlias = Callable[[int], float]


@dataclass(frozen=True)
class Ramp:
    """A factor of the outer learning rate that goes linearly from one value to another, and then stays.

    Args:
        first: Factor at step 0, positive.
        last: Factor from step `steps` on, positive.
        steps: Inner steps until `last`, at least 1.

    Example:
        >>> sparseloco = OuterSteps(30, outer_schedule=Ramp(0.4, 1.0, steps=3000))
    """

    first: float = 0.4
    last: float = 1.0
    steps: int = 1000

    def __post_init__(self) -> None:
        require("a whole number of at least 1", WHOLE, least=1, steps=self.steps)
        require("a number", NUMBER, first=self.first, last=self.last)
        if not 0 < self.first < inf or not 0 < self.last < inf:
            raise ValueError(f"Ramp needs first and last above 0 and finite, not {self.first} and {self.last}")

    def __call__(self, step: int) -> float:
        return self.first + (self.last - self.first) * min(1.0, step / self.steps)


def check_momentum(route: Route) -> None:
    """Raise ValueError if a compressor applies momentum, which is the outer optimizer's."""
    for rule in route.rules:
        compressor = rule.compressor
        if compressor.correction is not None or compressor.has_momentum:
            cure = "use the compressor in it" if compressor.has_momentum else "give it memory=ResidualMemory()"
            raise ValueError(
                f"{type(compressor).__name__} applies momentum to pseudo-gradients, and the outer optimizer does "
                f"too: {cure}"
            )


class OuterSteps(Gossip):
    """Trains without communication, and exchanges compressed pseudo-gradients every H steps.

    This is local SGD without further arguments, DiLoCo with `outer=Nesterov()`, and SparseLoCo with the compressor
    of `configs/local/sparseloco.py`.

    Args:
        average_every: Steps between two exchanges, H.
        base: Synchronous gossip between exchanges. None: local steps.
        outer: Makes the outer optimizer of a list of tensors: `SlowMo()`, `Nesterov()` or
            `partial(torch.optim.AdamW, lr=0.1)`. None continues from the mean of the models.
        compression: Exchanges the pseudo-gradients. None sends them dense in fp32. It must leave momentum to the
            outer optimizer, so not DGCSGDMemory.
        fragment_mb: Largest size of a fragment in MB (2**20 bytes of fp32), unless a tensor is larger. None: the
            model is one fragment.
        delay: Steps from the beginning of an exchange to the use of its result, at most H divided by the number of
            fragments. With alpha 0 what a rank has learned in these steps is dropped.
        alpha: Share of its own model that a rank keeps after an exchange, in [0, 1). 0 with a residual.
        warmup_steps: First steps, each of which ends with the mean of all models (post-local SGD).
        bucket_mb: Largest size of a message's tensors in MB. None: as `DistributedOptimizer`.
        outer_schedule: Given the number of inner steps, returns the factor of the outer optimizer's learning rate:
            `Ramp(0.4, 1.0, steps=3000)`. None: always 1.
        average_momentum: Exchange the momentum of SGD or Muon too. Each rank then continues from the mean of both.
            Not with fragments or a base. Adam's moments stay local: the first without the second may be too large.

    Raises:
        ValueError: An argument is out of range, or does not fit the others, the model or the transport. Or the
            ranks begin with different models.

    Example:
        >>> diloco = OuterSteps(average_every=500, outer=Nesterov())
        >>> optimizer = LocalOptimizer(optimizer, model.named_parameters(), diloco)
    """

    keeps_start = needs_common_start = True

    def __init__(
        self,
        average_every: int,
        base: Gossip | None = None,
        outer: OuterOptimizer | None = None,
        compression: Compressor | Route | HorovodCompression | None = None,
        *,
        fragment_mb: float | None = None,
        delay: int = 0,
        alpha: float = 0.0,
        warmup_steps: int = 0,
        bucket_mb: float | None = None,
        outer_schedule: OuterSchedule | None = None,
        average_momentum: bool = False,
    ):
        self.average_every, self.base, self.outer = average_every, base, outer
        self.outer_schedule, self.averages_momentum = outer_schedule, average_momentum
        self.fragment_mb, self.delay, self.alpha = fragment_mb, delay, alpha
        self.warmup_steps, self.bucket_mb = warmup_steps, bucket_mb
        self._check_arguments()
        self.compression = as_route(compression)
        check_momentum(self.compression)
        self.steps = 0
        self.replica_group: int | None = None  # set by `start`
        self._senders: list[Any] = [rule.compressor for rule in self.compression.rules]  # then with their states

    def _check_arguments(self) -> None:
        """Raise ValueError for an argument that is out of range, or arguments that do not fit together."""
        H, delay, alpha, fragment_mb = self.average_every, self.delay, self.alpha, self.fragment_mb
        require("a whole number of at least 1 step", WHOLE, least=1, average_every=H)
        require("a whole number of 0 steps or more", WHOLE, least=0, delay=delay, warmup_steps=self.warmup_steps)
        require("a number", NUMBER, alpha=alpha)
        require("True or False", FLAG, average_momentum=self.averages_momentum)
        require("a number, or None for one fragment", NUMBER + NOTHING, fragment_mb=fragment_mb)
        if fragment_mb is not None and not fragment_mb > 0:
            raise ValueError(f"fragment_mb must be positive, or None for one fragment, not {fragment_mb}")
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha must be in [0, 1): at 1 a rank would never take over a mean. It is {alpha}")
        if alpha == 0 and delay == H:
            raise ValueError(
                f"delay={delay} is all of average_every={H} steps, and with alpha=0 what a rank learns in these "
                "steps is dropped: use a shorter delay, or alpha=0.5"
            )
        base, outer, kind = self.base, self.outer, type(self.base).__name__
        if base is not None and (isinstance(base, type) or not isinstance(base, Gossip)):
            raise ValueError(f"base must be a gossip algorithm such as SGP(), or None, not {base!r}")
        if base is not None and not base.is_synchronous:
            raise ValueError(f"{kind} is asynchronous, so its ranks have no common step after which to average")
        if base is not None and (self.fragment_mb is not None or self.delay or self.alpha):
            raise ValueError(
                f"{kind} mixes whole models between exchanges: leave out fragment_mb, delay and alpha, or the base"
            )
        if self.averages_momentum and (base is not None or self.fragment_mb is not None):
            raise ValueError(
                "average_momentum exchanges momenta with the whole model: leave out "
                + ("fragment_mb" if base is None else "the base")
            )
        # The class Nesterov is refused: only its instance Nesterov() makes an optimizer.
        is_other_class = isinstance(outer, type) and not issubclass(outer, Optimizer)
        if outer is not None and (is_other_class or not callable(outer)):
            raise ValueError(
                "outer must make an optimizer from a list of tensors, such as Nesterov() or "
                f"partial(torch.optim.SGD, lr=1.0), not {outer!r}"
            )
        schedule = self.outer_schedule
        if schedule is not None and (isinstance(schedule, type) or not callable(schedule)):
            raise ValueError(
                "outer_schedule must return a factor of the outer learning rate for a step, such as "
                f"Ramp(0.4, 1.0, 3000), not {schedule!r}"
            )

    @property
    def compress_ratio(self) -> float:  # type: ignore[override]
        if self.base is not None:
            return self.base.compress_ratio
        return min(c.compress_ratio for c in self._senders) / self.average_every

    @property
    def fixed_settings(self) -> dict[str, Any]:
        momentum = {"average_momentum": True} if self.averages_momentum else {}
        return {"average_every": self.average_every, "fragment_mb": self.fragment_mb, **momentum}

    @property
    def needs_groups(self) -> bool:  # type: ignore[override]
        return self.base is not None and self.base.needs_groups

    def start(self, model: FlatModel, transport: Transport, meter: TrafficMeter, name: str = "gossip") -> None:
        self.model, self.z = model, model.z
        if self.base is not None:
            self.base.start(model, transport, meter, name)
        parts = divide(model.segments, self.fragment_mb)
        what, cure = "model at the start", COMMON_START
        if self.averages_momentum:
            what, cure = "model or momentum at the start", f"{cure}; and broadcast_optimizer_state(optimizer)"
        check_equal(model.z, transport, f"{name}.equal", what, cure)
        # without an outer optimizer, to the mean of all models: z0 = z0 - d
        how = (self.compression, self.outer or partial(SGD, lr=1.0), self.bucket_mb)
        fragments = [Fragment(model, part, *how, f"{name}.outer{i}") for i, part in enumerate(parts)]
        self._outer_factor(self.average_every)
        self.exchange = OuterExchange(fragments, transport, meter, f"{name}.outer")
        self._senders = self.exchange.states
        self._check_fit(len(fragments))
        # by the rules, because the ranks of a machine may have other tensors, and so other compressors
        chosen = [rule.compressor for rule in self.compression.rules]
        can_join = self.base is None and not any(
            c.keeps_server_errors or c.fallback.keeps_server_errors for c in chosen
        )
        self.replica_group = transport.rank if can_join else None

    @torch.no_grad()
    def begin_from(self, z: Tensor) -> None:
        if self.base is not None:
            self.base.begin_from(z)
        for fragment in self.exchange.fragments:
            fragment.restart(z)

    def _check_fit(self, count: int) -> None:
        """Raise ValueError if the number of fragments, the outer optimizer or a compressor does not fit."""
        H = self.average_every
        if count > H:
            raise ValueError(
                f"the model has {count} fragments, but average_every={H} steps begin at most as many exchanges: "
                "increase fragment_mb or average_every"
            )
        if self.delay > H // count:
            raise ValueError(
                f"delay={self.delay} is too long: with {count} fragments every {H} steps, an exchange begins "
                f"{H // count} steps after the one before it, which must have ended"
            )
        optimizer = self.exchange.fragments[0].optimizer
        if self.outer_schedule is not None and any("lr" not in group for group in optimizer.param_groups):
            raise ValueError(
                "outer_schedule needs an outer optimizer with a learning rate, and "
                f"{type(optimizer).__name__} has none: leave outer_schedule out, or use Nesterov()"
            )
        for states in self.exchange.states:
            if self.alpha and any(True for _ in states.errors()):
                raise ValueError(
                    f"alpha={self.alpha} keeps a share of the rank's own model, and "
                    f"{states.compressor.class_name} sends later what it has not sent of it, which would count "
                    "twice: use alpha=0, or a compressor without a residual such as FP16Compressor()"
                )

    def _outer_factor(self, step: int) -> float | None:
        """The factor of the outer learning rate. Raises ValueError if it is not a finite number of at least 0."""
        if self.outer_schedule is None:
            return None
        value = self.outer_schedule(step)
        try:
            factor = float(value)
        except (TypeError, ValueError):
            factor = nan
        if not 0 <= factor < inf:
            raise ValueError(
                f"outer_schedule returned {value!r} at step {step}: it must return the factor of the outer "
                "learning rate, a finite number of at least 0"
            )
        return factor

    def begin_epoch(self, epoch: int) -> None:
        if self.base is not None:
            self.base.begin_epoch(epoch)
        for states in self.exchange.states:
            states.begin_epoch(epoch)

    def begin_step(self) -> None:
        if self.base is not None:
            self.base.begin_step()

    # --- one step ---------------------------------------------------------------------------------

    def update(self, step: Callable[[], object], lr: float) -> None:
        if self.base is None:
            step()
            self.model.gather()
        else:
            self.base.update(step, lr)
        self.steps += 1
        with torch.no_grad():
            self.exchange.advance()
            flight = self.exchange.flight
            if flight is not None and self.steps >= flight.due:
                self._land()
            if due := self._due():
                self._launch(due, lr)

    def _due(self) -> Sequence[int]:
        """Numbers of the fragments whose exchange begins after this step."""
        count, H = len(self.exchange.fragments), self.average_every
        if self.steps <= self.warmup_steps:
            return range(count)
        return [i for i in range(count) if (self.steps - i * H // count) % H == 0]

    def _launch(self, due: Sequence[int], lr: float) -> None:
        is_warmup = self.steps <= self.warmup_steps
        if self.base is not None:
            self.base.synchronize_messages()
        delay = 0 if is_warmup else self.delay
        factor = self._outer_factor(self.steps)
        flight = Flight(list(due), self.steps + delay, None if is_warmup else lr, outer_factor=factor)
        self.exchange.begin(flight, self.z if self.base is None else self.base.biased_parameters(), self.bias())
        if delay == 0:
            self._land()

    def _land(self) -> None:
        self.exchange.land(self.alpha)
        if self.base is not None:
            self.base.restart()
        self.model.scatter()

    # --- the common model -------------------------------------------------------------------------

    @torch.no_grad()
    def synchronize_messages(self) -> None:
        if self.base is not None:
            self.base.synchronize_messages()
        if self.exchange.flight is not None:
            self._land()

    @torch.no_grad()
    def restart(self) -> None:
        if self.base is not None:
            self.base.restart()
        for fragment in self.exchange.fragments:
            fragment.restart(self.z)

    @torch.no_grad()
    def join(self) -> None:
        self.exchange.join()
        self.model.scatter()

    @torch.no_grad()
    def flush(self) -> None:
        if self.base is not None:
            self.base.flush()
        self.exchange.arrive()

    def biased_parameters(self) -> Tensor:
        return self.z.clone() if self.base is None else self.base.biased_parameters()

    def bias(self) -> float | Tensor:
        return 1.0 if self.base is None else self.base.bias()

    def metrics(self) -> dict[str, float]:
        own = {"dropped_outer_steps": float(self.exchange.dropped)}
        return own if self.base is None else {**self.base.metrics(), **own}

    def errors(self) -> Iterable[Tensor]:
        if self.base is not None:
            yield from self.base.errors()
        yield from self.exchange.errors()

    def close(self) -> None:
        if self.base is not None:
            self.base.close()

    def state_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = {"z": self.z.clone()} if self.base is None else {"base": self.base.state_dict()}
        return {"steps": self.steps, **own, **self.exchange.state_dict()}

    def loader(self, state: dict[str, Any]) -> Callable[[], None]:
        check_mapping("state of an algorithm", state)
        own = "z" if self.base is None else "base"
        wanted = {"steps", own, "z0", "outer", "compression", "flight", "means", "dropped"}
        if state.keys() != wanted:
            raise ValueError(f"state of another algorithm: it has {texts(state)}, not {texts(wanted)}")
        check_count("steps", state["steps"])
        if self.base is None:
            check_tensor("z", state["z"], self.z.shape)
        else:
            self.base.loader(state["base"])
        # after these steps every fragment has landed, unless its exchange was dropped
        last = self.warmup_steps + self.average_every + self.delay
        check_count("dropped", state["dropped"])
        self.exchange.check(state, has_stepped=state["steps"] >= last and not state["dropped"])
        return partial(torch.no_grad()(self._load), state)

    def _load(self, state: Mapping[str, Any]) -> None:
        if self.base is None:
            self.z.copy_(state["z"])
            self.model.scatter()
        else:
            self.base.load_state_dict(state["base"])
        self.steps = state["steps"]
        self.exchange.load_state_dict(state)
