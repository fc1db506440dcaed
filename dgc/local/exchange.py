"""The exchange of fragments: it begins, arrives while training goes on, and is then used.

A fragment is a part of a model that is exchanged together, with buckets and an outer optimizer of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import Transport
from dgc.core.arguments import FLAG, NOTHING, NUMBER, checked, require
from dgc.core.bucket import Segment
from dgc.core.protocol import Compressor
from dgc.core.route import Route
from dgc.core.state import check_count, check_mapping, check_tensor, zeros
from dgc.engine.agreement import Agreement
from dgc.engine.buckets import MEGABYTE, PlannedBucket, keep_states, plan_buckets, states_in_order
from dgc.engine.drops import DropPolicy
from dgc.engine.loop import Engine
from dgc.engine.options import as_route, check_can_send
from dgc.engine.state import named_methods, texts
from dgc.gossip.model import FlatModel
from dgc.local.optimizers import OuterOptimizer


def divide(segments: Sequence[Segment], fragment_mb: float | None) -> list[list[Segment]]:
    """Divide a model's tensors, in their order, into fragments of at most `fragment_mb`. None: one fragment."""
    fragments: list[list[Segment]] = [[]]
    for segment in segments:
        numel = sum(s.numel for s in fragments[-1]) + segment.numel
        if fragment_mb is not None and fragments[-1] and 4 * numel > fragment_mb * MEGABYTE:
            fragments.append([])
        fragments[-1].append(segment)
    return fragments


class Fragment:
    """Some tensors of a model, with z0, their values after the last exchange, and the optimizer of z0.

    Attributes:
        named: (name, tensor) pairs of the model's tensors.
        tensors: Each tensor's place in the model, its z0, and its pseudo-gradient or the mean of it.
    """

    def __init__(
        self,
        model: FlatModel,
        segments: Sequence[Segment],
        route: Route,
        outer: OuterOptimizer,
        bucket_mb: float | None,
        name: str,
    ):
        self.model = model
        self.named = [(s.name, s.of(model.z)) for s in segments]
        self.planned = plan_buckets(self.named, route.compressor_for, bucket_mb, name)
        parts: dict[str, tuple[Tensor, Tensor]] = {}
        for plan in self.planned:
            flat = zeros(plan.bucket)
            parts |= {s.name: (s.of(flat), s.of(plan.bucket.flat)) for s in plan.bucket.segments}
        self.tensors = [(s, *parts[s.name]) for s in segments]
        self._make_outer = outer
        self.optimizer = outer([z0 for z0, _ in parts.values()])
        if not isinstance(self.optimizer, Optimizer):
            raise ValueError(f"outer must return an optimizer of torch for tensors, not {self.optimizer!r}")
        self._rates: list[Any] = [group.get("lr") for group in self.optimizer.param_groups]
        self.restart(model.z)

    def restart(self, z: Tensor) -> None:
        """Begin from z [n], a model that is the same on all ranks."""
        for segment, z0, _ in self.tensors:
            z0.copy_(segment.of(z))

    def kept_keys(self) -> dict[str, set[str]]:
        """What the outer optimizer keeps of each tensor after a step, by the names of both."""
        small = [torch.zeros([1] * z0.dim(), dtype=z0.dtype) for _, z0, _ in self.tensors]
        for (segment, _, _), tensor in zip(self.tensors, small, strict=True):
            tensor.grad = None if segment.name in self.model.momenta else torch.zeros_like(tensor)
        optimizer = self._make_outer(small)
        for group in optimizer.param_groups:
            group["inner_lr"] = 1.0
        optimizer.step()
        return {s.name: _keys(optimizer.state.get(t, {})) for (s, *_), t in zip(self.tensors, small, strict=True)}

    def fill(self, x: Tensor, bias: float | Tensor, share: float | None = None) -> None:
        """Store bias z0 - x, the pseudo-gradient, in the buckets.

        x: [n] model, or biased model, of this rank. bias: The factor between the two, one number or [n]. share:
        Factor of the pseudo-gradient. None: 1.
        """
        for segment, z0, difference in self.tensors:
            factor = segment.of(bias) if isinstance(bias, Tensor) else bias
            origin = z0 * factor if isinstance(factor, Tensor) or factor != 1 else z0
            torch.sub(origin, segment.of(x), out=difference)
            if share is not None:
                difference.mul_(share)

    def step(self, lr: float | None, factor: float | None) -> None:
        """Take an outer step on the mean in the buckets. lr, factor: see `Flight`."""
        for segment, z0, mean in self.tensors:
            if lr is None or segment.name in self.model.momenta:
                z0.sub_(mean)
            else:
                z0.grad = mean
        if lr is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["inner_lr"] = lr
                if factor is not None:
                    group["lr"] = factor * rate
            self.optimizer.step()
            for _, z0, _ in self.tensors:
                z0.grad = None

    def merge(self, alpha: float) -> None:
        """Set the model to alpha times itself and 1 - alpha times z0."""
        for segment, z0, _ in self.tensors:
            z = segment.of(self.model.z)
            if alpha:
                z.lerp_(z0, 1 - alpha)
            else:
                z.copy_(z0)


ERRORS = ("errors", "residuals")  # tables of a compressor's state with what a rank has not sent
AGREE = (
    "every rank must step its optimizers in the same order, and an exchange that reads the learning rate, as that "
    "of SlowMo, needs the same one on all ranks: give a ReduceLROnPlateau the mean of their losses"
)


class ModelExchange:
    """What exchanges of a model have in common. Construction is collective. Arguments are as in `Engine`.

    named: (name, tensor) pairs of the buckets' tensors, in the order of the model.
    """

    what: str  # the exchange, for errors
    counter: str  # the metric that counts dropped exchanges

    def __init__(
        self,
        groups: Sequence[Sequence[PlannedBucket]],
        named: Sequence[tuple[str, Tensor]],
        transport: Transport,
        meter: TrafficMeter,
        name: str,
    ):
        planned = [plan for group in groups for plan in group]
        check_can_send(dict.fromkeys(plan.compressor for plan in planned), transport)
        keep_states(planned, transport.size, transport.rank)
        self.states = states_in_order(planned, named)
        # LocalOptimizer counts the dense bytes of all steps
        self._engine = Engine(groups, transport, meter, name, counts_dense=False)
        optimizer = f"{name} (of {len(named)} tensors, the first {named[0][0]})"
        self._agreement = Agreement(transport, optimizer, self.what, AGREE)
        effect, warns = "every rank drops the steps since the exchange before", transport.rank == 0
        self._drops = DropPolicy("skip", effect, warns=warns, counter=self.counter)

    def _finish(self) -> str | None:
        """Wait for the means and write them into the buckets. Return why they cannot be used, or None."""
        with self._agreement.exchange():
            self._agreement.end()
            outcome = self._engine.finish()
        if outcome.nonfinite is None:
            for plan, result in outcome.results:
                result.write_to(plan.bucket)
        return outcome.nonfinite

    @property
    def dropped(self) -> int:
        """Number of exchanges that were dropped. A method sets it when it loads a state."""
        return self._drops.dropped

    @dropped.setter
    def dropped(self, number: int) -> None:
        self._drops.dropped = number

    def _drop(self, reason: str) -> None:
        self._drops.drop(f"in {self.what}, {reason}")

    def errors(self) -> Iterator[Tensor]:
        return (error for states in self.states for error in states.errors())

    def state_dict(self) -> dict[str, Any]:
        compression = {name: states.state_dict() for name, states in named_methods(self.states).items()}
        return {"compression": compression, "dropped": self.dropped}

    def check(self, state: Mapping[str, Any]) -> list[Callable[[], None]]:
        """Raise ValueError for a state that cannot be loaded. Returns what loads the compressors' states."""
        compressors, saved = named_methods(self.states), state["compression"]
        check_mapping("compression", saved)
        if compressors.keys() != saved.keys():
            found = f"{texts(saved)}, not {texts(compressors)}"
            raise ValueError(f"state of other compressors: {found}. Use the compressors of the run that saved it")
        check_count("dropped", state["dropped"])
        return [compressor.loader(saved[name]) for name, compressor in compressors.items()]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for load in self.check(state):
            load()
        self.dropped = state["dropped"]


class BufferExchange(ModelExchange):
    """Exchanges buffers in fp32, whose means over the ranks replace them. Construction is collective.

    A subclass sets `what` and `counter`. A method of local steps fills the buffers, calls `average`, and saves and
    loads `state_dict` with its own state.

    Args:
        model: The buffers have the names and shapes of its parameters.
        compression: Averages the buffers.
        bucket_mb: Largest size of a message's tensors in MB (2**20 bytes of fp32).
        transport, meter: As in `Gossip.start`.
        name: Prefix of messages, unique on the transport.

    Attributes:
        parts: The buffers by name, zero at first.
        dropped: Number of exchanges whose means were not finite.

    Example:
        >>> class Sums(BufferExchange):
        ...     what, counter = "an exchange of sums", "dropped_sums"
        >>> flat = FlatModel(list(model.named_parameters()))
        >>> sums = Sums(flat, DenseCompressor(), 25.0, transport, TrafficMeter(), "sums")
        >>> sums.average(step=1)
        True
    """

    def __init__(
        self,
        model: FlatModel,
        compression: Compressor | Route,
        bucket_mb: float | None,
        transport: Transport,
        meter: TrafficMeter,
        name: str,
    ):
        named = [(s.name, s.of(model.z)) for s in model.segments]
        self._planned = plan_buckets(named, as_route(compression).compressor_for, bucket_mb, name)
        super().__init__([[plan] for plan in self._planned], named, transport, meter, name)
        self.parts = {s.name: s.of(plan.bucket.flat) for plan in self._planned for s in plan.bucket.segments}

    def zero_(self) -> None:
        """Set all buffers to zero."""
        for plan in self._planned:
            plan.bucket.flat.zero_()

    def average(self, **common: object) -> bool:
        """Replace the buffers by their means, and return True. If these are not finite, return False.

        common: What must be equal on every rank, by name. ValueError on every rank if it is not.
        """
        with self._agreement.exchange():
            self._agreement.begin(**common)
            for b in range(len(self._planned)):
                self._engine.start(b)
            reason = self._finish()
        if reason is not None:
            self._drop(reason)
        return reason is None


@checked
@dataclass
class Flight:
    """An exchange that has begun and is not used yet.

    Attributes:
        fragments: Numbers of its fragments.
        due: The step after which the means are used.
        lr: Learning rate of the inner optimizer when it began. None: go to the mean of the models, without the
            outer optimizer.
        arrived: Whether the means are in the buckets.
        nonfinite: Why the means must not be used, if so.
        outer_factor: Factor of the outer optimizer's learning rate, as it was made. None: it is not scheduled.
    """

    fragments: list[int]
    due: int
    lr: float | None
    arrived: bool = False
    nonfinite: str | None = None
    outer_factor: float | None = None


class OuterExchange(ModelExchange):
    """Exchanges the fragments of a model. At most one exchange is in flight: `flight`. See `ModelExchange`."""

    what, counter = "an exchange of outer steps", "dropped_outer_steps"

    def __init__(self, fragments: Sequence[Fragment], transport: Transport, meter: TrafficMeter, name: str):
        named = [pair for fragment in fragments for pair in fragment.named]
        super().__init__([fragment.planned for fragment in fragments], named, transport, meter, name)
        self.fragments = fragments
        self.flight: Flight | None = None

    def begin(
        self,
        flight: Flight,
        x: Tensor,
        bias: float | Tensor,
        share: float | None = None,
    ) -> None:
        """Begin the exchange of some pseudo-gradients. x, bias, share: see `Fragment.fill`.

        Ranks may have different `lr` if no outer optimizer reads it.
        """
        with self._agreement.exchange():
            assert self.flight is None, "the exchange before has not been used"
            self.flight = flight
            fragments = self._in_flight()
            reads_lr = any("inner_lr" in fragment.optimizer.defaults for fragment in fragments)
            common = {"lr": flight.lr} if reads_lr else {}
            self._agreement.begin(due=flight.due, **common, outer_factor=flight.outer_factor)
            for i, fragment in zip(flight.fragments, fragments, strict=True):
                fragment.fill(x, bias, share)
                self._engine.start(i)

    def _in_flight(self) -> list[Fragment]:
        return [] if self.flight is None else [self.fragments[i] for i in self.flight.fragments]

    def advance(self) -> None:
        """Continue what has arrived, without waiting."""
        with self._agreement.exchange():
            self._engine.advance()

    def arrive(self) -> None:
        """Wait for the means of the exchange in flight, if any, without using them."""
        if self.flight is not None and not self.flight.arrived:
            self.flight.nonfinite, self.flight.arrived = self._finish(), True

    def land(self, alpha: float) -> None:
        """Use the means of the exchange in flight: take an outer step, and merge the model with its result.

        alpha: share of its own model that the rank keeps, unless it goes to the mean of the models.
        """
        self.arrive()
        fragments, flight, self.flight = self._in_flight(), self.flight, None
        assert flight is not None, "no exchange is in flight"
        for fragment in fragments:
            if flight.nonfinite is None:
                fragment.step(flight.lr, flight.outer_factor)
            fragment.merge(alpha if flight.nonfinite is None and flight.lr is not None else 0.0)
        if flight.nonfinite is not None:
            self._drop(flight.nonfinite)  # last, because a warning may be an error

    def join(self) -> None:
        """Forget the residual of the rank whose state was loaded, and continue from z0."""
        for states in self.states:
            tables = states.state_dict()
            for table in tables.keys() & set(ERRORS):
                tables[table] = {name: torch.zeros_like(error) for name, error in tables[table].items()}
            states.load_state_dict(tables)
            if any(bool(error.any()) for error in states.errors()):
                raise ValueError(
                    f"{states.compressor.class_name} cannot join: its state must have what is not sent under one "
                    f"of the keys {', '.join(ERRORS)}, by parameter name"
                )
        for fragment in self.fragments:
            fragment.merge(0.0)

    # --- state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, after `arrive`. Tensors have the names of parameters."""
        assert self.flight is None or self.flight.arrived, "arrive() must be called first"
        outer = {s.name: (f.optimizer.state.get(z0, {}), z0) for f in self.fragments for s, z0, _ in f.tensors}
        return {
            **super().state_dict(),
            "z0": {name: z0.clone() for name, (_, z0) in outer.items()},
            "outer": {name: deepcopy(state) for name, (state, _) in outer.items()},
            "flight": None if self.flight is None else asdict(self.flight),
            "means": {s.name: mean.clone() for f in self._in_flight() for s, _, mean in f.tensors},
        }

    def check(self, state: Mapping[str, Any], has_stepped: bool = False) -> list[Callable[[], None]]:
        """has_stepped: Whether the outer optimizer of each fragment has taken a step."""
        z0, outer, means = state["z0"], state["outer"], state["means"]
        names = {name for fragment in self.fragments for name, _ in fragment.named}
        for part, saved in (("z0", z0), ("outer", outer)):
            check_mapping(part, saved)
            if names != saved.keys():
                raise ValueError(f"{part} of another model: of {texts(saved)}, not {sorted(names)}")
        saved, fields_of = state["flight"], {f.name for f in fields(Flight)}
        if saved is not None:
            if not isinstance(saved, Mapping) or saved.keys() != fields_of:
                raise ValueError(f"flight must have {sorted(fields_of)}, not {saved!r}")
            Flight(**saved)
            for key in ("lr", "outer_factor"):
                if saved[key] is not None and not 0 <= saved[key] < inf:
                    raise ValueError(f"flight has {key} {saved[key]}, which must be finite and 0 or more")
            if not saved["arrived"]:
                raise ValueError("the exchange in flight must have arrived")
            for number in saved["fragments"]:
                check_count("a fragment in flight", number)
            check_count("the step when the exchange in flight is due", saved["due"])
        numbers = set() if saved is None else set(saved["fragments"])
        if not numbers <= set(range(len(self.fragments))):
            raise ValueError(f"an exchange of fragments {sorted(numbers)} is in flight: use the same fragment_mb")
        check_mapping("means", means)
        for i, fragment in enumerate(self.fragments):
            for segment, _, _ in fragment.tensors:
                _check_outer_state(segment.name, outer[segment.name], segment.shape)
                check_tensor(f"z0 of {segment.name}", z0[segment.name], segment.shape)
                if i in numbers:
                    check_tensor(f"mean of {segment.name}", means.get(segment.name), segment.shape)
            kinds = [
                {key: getattr(value, "dtype", type(value)) for key, value in outer[name].items()}
                for name, _ in fragment.named
                if name not in fragment.model.momenta
            ]
            if any(of != kinds[0] for of in kinds):
                raise ValueError(f"outer states of parameters that are stepped together differ: they have {kinds}")
            for name, keys in fragment.kept_keys().items():
                if (found := _keys(outer[name])) != keys and (found or has_stepped):
                    raise ValueError(
                        f"the outer optimizer keeps {texts(keys)} of {name}, and the state has {texts(found)}: it "
                        "was saved with another outer optimizer. Use that, or begin from the model alone, saved "
                        "inside consensus()"
                    )
        return super().check(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loads, (z0, outer, means) = self.check(state), (state[part] for part in ("z0", "outer", "means"))
        self.arrive()  # what is in flight ends here: its means and errors are replaced below
        for load in loads:
            load()
        self.dropped = state["dropped"]
        self.flight = None if state["flight"] is None else Flight(**state["flight"])
        numbers = set() if self.flight is None else set(self.flight.fragments)
        for i, fragment in enumerate(self.fragments):
            for segment, own, mean in fragment.tensors:
                own.copy_(z0[segment.name])
                fragment.optimizer.state.pop(own, None)
                if outer[segment.name]:
                    fragment.optimizer.state[own] = deepcopy(outer[segment.name])
                if i in numbers:
                    mean.copy_(means[segment.name])


def _keys(state: Mapping[str, Any]) -> set[str]:
    return {key for key, value in state.items() if value is not None}


def _check_outer_state(name: str, state: Any, shape: Sequence[int]) -> None:
    """Raise ValueError for what no optimizer keeps of a tensor: numbers, and tensors of its shape or of none."""
    check_mapping(f"outer state of {name}", state)
    for key, value in state.items():
        require("text", (str,), **{f"a key of the outer state of {name}": key})
        if isinstance(value, Tensor):
            check_tensor(f"outer {key} of {name}", value, shape if value.dim() else (), value.dtype)
        else:
            require("a number, a tensor or None", (*NUMBER, *FLAG, *NOTHING), **{f"outer {key} of {name}": value})
