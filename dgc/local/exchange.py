"""The exchange of fragments: it begins, arrives while training goes on, and is then used.

A fragment is a part of a model that is exchanged together, with buckets and an outer optimizer of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.arguments import checked
from dgc.bucket import Segment
from dgc.comm.meter import TrafficMeter
from dgc.comm.transport import Transport
from dgc.compression.route import Route
from dgc.engine.agreement import Agreement
from dgc.engine.buckets import MEGABYTE, keep_states, plan_buckets, states_in_order
from dgc.engine.loop import Engine, warn_of_drop
from dgc.engine.options import register_compressors
from dgc.engine.state import BucketStates, named_methods
from dgc.gossip.model import FlatModel
from dgc.local.optimizers import OuterOptimizer
from dgc.state import check_count, check_mapping, check_tensor, zeros


def divide(segments: Sequence[Segment], fragment_mb: float | None) -> list[list[Segment]]:
    """Divide a model's tensors, in their order, into fragments.

    Args:
        segments: The tensors.
        fragment_mb: Largest size of a fragment in MB (2**20 bytes of fp32), unless a single tensor is larger.
            None: one fragment.
    """
    fragments: list[list[Segment]] = [[]]
    for segment in segments:
        numel = sum(s.numel for s in fragments[-1]) + segment.numel
        if fragment_mb is not None and fragments[-1] and 4 * numel > fragment_mb * MEGABYTE:
            fragments.append([])
        fragments[-1].append(segment)
    return fragments


class Fragment:
    """Some tensors of a model, with z0, their values after the last exchange, and the optimizer of z0.

    Args:
        model: The model of this rank.
        segments: The tensors, as parts of the model.
        route: Chooses their compressors.
        outer: Makes the optimizer of z0.
        bucket_mb: Largest size of a bucket in MB.
        name: Prefix of the buckets' names, unique on the transport.
    """

    def __init__(
        self,
        model: FlatModel,
        segments: Sequence[Segment],
        route: Route,
        outer: OuterOptimizer,
        bucket_mb: float,
        name: str,
    ):
        self.model, self.segments = model, segments
        named = [(s.name, s.of(model.z)) for s in segments]
        self.planned = plan_buckets(named, route.compressor_for, bucket_mb, name)
        buckets = [(plan.bucket, s) for plan in self.planned for s in plan.bucket.segments]
        flat = {plan.bucket.name: zeros(plan.bucket) for plan in self.planned}
        z0 = {s.name: s.of(flat[bucket.name]) for bucket, s in buckets}
        mean = {s.name: s.of(bucket.flat) for bucket, s in buckets}
        self._tensors = [(s, z0[s.name], mean[s.name]) for s in segments]
        self.optimizer = outer(list(z0.values()))
        if not isinstance(self.optimizer, Optimizer):
            raise ValueError(f"outer must return an optimizer of torch for tensors, not {self.optimizer!r}")
        self._rates: list[Any] = [group.get("lr") for group in self.optimizer.param_groups]
        self.restart()

    def restart(self) -> None:
        """Begin from the present model, which is the same on all ranks."""
        for segment, z0, _ in self._tensors:
            z0.copy_(segment.of(self.model.z))

    def fill(self, x: Tensor, bias: float | Tensor = 1.0) -> None:
        """Store bias z0 - x, the pseudo-gradient, in the buckets.

        Args:
            x: [n] model, or biased model, of this rank.
            bias: The factor between the model and x, one number or [n].
        """
        for segment, z0, difference in self._tensors:
            factor = segment.of(bias) if isinstance(bias, Tensor) else bias
            torch.sub(z0 * factor, segment.of(x), out=difference)

    @property
    def reads_inner_lr(self) -> bool:
        """Whether a step depends on the learning rate of the inner optimizer."""
        return "inner_lr" in self.optimizer.defaults

    def check_learning_rate(self) -> None:
        """Raise ValueError if the optimizer has no learning rate to schedule."""
        if any("lr" not in group for group in self.optimizer.param_groups):
            raise ValueError(
                "outer_schedule needs an outer optimizer with a learning rate, and "
                f"{type(self.optimizer).__name__} has none: leave outer_schedule out, or use Nesterov()"
            )

    def step(self, lr: float | None, factor: float | None = None) -> None:
        """Take an outer step on the mean in the buckets.

        Args:
            lr: Learning rate of the inner optimizer. None: go to the mean of the models, without the optimizer.
            factor: Of the outer optimizer's learning rate, as it was made. None: the rate is not changed.
        """
        for _, z0, mean in self._tensors:
            if lr is None:
                z0.sub_(mean)
            else:
                z0.grad = mean
        if lr is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["inner_lr"] = lr
                if factor is not None:
                    group["lr"] = factor * rate
            self.optimizer.step()
            for _, z0, _ in self._tensors:
                z0.grad = None

    def merge(self, alpha: float) -> None:
        """Set the model to alpha times itself and 1 - alpha times z0."""
        for segment, z0, _ in self._tensors:
            z = segment.of(self.model.z)
            if alpha:
                z.lerp_(z0, 1 - alpha)
            else:
                z.copy_(z0)

    # --- state --------------------------------------------------------------------------------------

    def means(self) -> dict[str, Tensor]:
        """Copies of the means in the buckets, by parameter name."""
        return {segment.name: mean.clone() for segment, _, mean in self._tensors}

    def load_means(self, means: Mapping[str, Tensor]) -> None:
        check_mapping("means", means)
        for segment, _, mean in self._tensors:
            check_tensor(f"mean of {segment.name}", means.get(segment.name), segment.shape)
            mean.copy_(means[segment.name])

    def state_dict(self) -> dict[str, Any]:
        outer = {s.name: _copied(self.optimizer.state.get(z0, {})) for s, z0, _ in self._tensors}
        return {"z0": {s.name: z0.clone() for s, z0, _ in self._tensors}, "outer": outer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this fragment's part of a state of all fragments."""
        for segment, _, _ in self._tensors:
            check_tensor(f"z0 of {segment.name}", state["z0"][segment.name], segment.shape)
        for segment, z0, _ in self._tensors:
            z0.copy_(state["z0"][segment.name])
        check_mapping("outer", state["outer"])
        missing = sorted({s.name for s in self.segments} - state["outer"].keys())
        if missing:
            raise ValueError(f"outer optimizer of another model: missing {missing}")
        for segment, z0, _ in self._tensors:
            loaded = state["outer"][segment.name]
            check_mapping(f"outer state of {segment.name}", loaded)
            for key, value in loaded.items():
                if isinstance(value, Tensor):
                    check_tensor(f"outer {key} of {segment.name}", value, None, value.dtype)
                elif isinstance(value, str):
                    raise ValueError(f"outer {key} of {segment.name} is text: {value!r}")
            self.optimizer.state[z0] = _copied(loaded)
            if not loaded:
                del self.optimizer.state[z0]


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


EXCHANGE_STATE = ("z0", "outer", "compression", "flight", "means", "dropped")
ERRORS = ("errors", "residuals")  # keys of a compressor's state with what a rank has not sent, by parameter name
AGREE = (
    "every rank must step its optimizers in the same order, and SlowMo and 0/1 Adam need the same learning rate "
    "on all ranks: give a ReduceLROnPlateau the mean of their losses"
)


@checked
@dataclass
class Flight:
    """An exchange that has begun and is not used yet.

    Attributes:
        fragments: Numbers of its fragments.
        due: The step after which the means are used.
        lr: Learning rate of the inner optimizer when it began. None: go to the mean of the models.
        arrived: Whether the means are in the buckets.
        nonfinite: Why the means must not be used, if so.
        outer_factor: Factor of the outer optimizer's learning rate. None: it is not scheduled.
    """

    fragments: list[int]
    due: int
    lr: float | None
    arrived: bool = False
    nonfinite: str | None = None
    outer_factor: float | None = None


class OuterExchange:
    """Exchanges the fragments of a model. At most one exchange is in flight. Construction is collective.

    Args:
        fragments: The fragments, in the order of the model.
        transport: Connects the ranks.
        meter: Counts bytes and seconds.
        name: Prefix of lanes, unique on the transport.

    Raises:
        ValueError: A compressor belongs to another optimizer, or does not fit the transport.
    """

    def __init__(self, fragments: Sequence[Fragment], transport: Transport, meter: TrafficMeter, name: str):
        self.fragments, self.dropped = fragments, 0
        planned = [plan for fragment in fragments for plan in fragment.planned]
        tensor_of = {
            s.name: p for plan in planned for s, p in zip(plan.bucket.segments, plan.parameters, strict=True)
        }
        named = [(s.name, tensor_of[s.name]) for fragment in fragments for s in fragment.segments]
        register_compressors(dict.fromkeys(plan.compressor for plan in planned), transport)
        keep_states(planned, transport.size, transport.rank)
        self.states = states_in_order(planned, named)
        # LocalOptimizer counts the dense bytes of all steps
        self._engine = Engine([f.planned for f in fragments], transport, meter, name, counts_dense=False)
        self._agreement = Agreement(transport, optimizer_text(name, named), "an exchange of outer steps", AGREE)
        self._flight: Flight | None = None
        self._warns = transport.rank == 0

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    def is_due(self, step: int) -> bool:
        """Whether the means of the exchange in flight are to be used after this step."""
        return self._flight is not None and step >= self._flight.due

    def begin(
        self,
        numbers: Sequence[int],
        x: Tensor,
        bias: float | Tensor,
        due: int,
        lr: float | None,
        outer_factor: float | None = None,
    ) -> None:
        """Begin the exchange of the pseudo-gradients of some fragments.

        Args:
            numbers: The fragments.
            x, bias: See `Fragment.begin`.
            due, lr, outer_factor: See `Flight`. Ranks may have different lr if no outer optimizer reads it.
        """
        with self._agreement.exchange():
            assert self._flight is None, "the exchange before has not been used"
            self._flight = Flight(list(numbers), due, lr, outer_factor=outer_factor)
            fragments = self._in_flight()
            common: dict[str, Any] = {"lr": lr} if any(f.reads_inner_lr for f in fragments) else {}
            self._agreement.begin(due=due, **common, outer_factor=outer_factor)
            for i, fragment in zip(numbers, fragments, strict=True):
                fragment.fill(x, bias)
                self._engine.start(i)

    def _in_flight(self) -> list[Fragment]:
        return [] if self._flight is None else [self.fragments[i] for i in self._flight.fragments]

    def advance(self) -> None:
        """Continue what has arrived, without waiting."""
        with self._agreement.exchange():
            self._engine.advance()

    def arrive(self) -> None:
        """Wait for the means of the exchange in flight, if any, without using them."""
        if self._flight is None or self._flight.arrived:
            return
        with self._agreement.exchange():
            self._agreement.end()
            outcome = self._engine.finish()
        self._flight.nonfinite, self._flight.arrived = outcome.nonfinite, True
        if outcome.nonfinite is None:
            for plan, result in outcome.results:
                result.write_to(plan.bucket)

    def land(self, alpha: float) -> None:
        """Use the means of the exchange in flight: take an outer step, and merge the model with its result.

        Args:
            alpha: Share of its own model that the rank keeps. The mean of the models replaces it entirely.
        """
        self.arrive()
        fragments, flight, self._flight = self._in_flight(), self._flight, None
        assert flight is not None, "no exchange is in flight"
        if flight.nonfinite is not None:
            self._drop(flight.nonfinite)
        for fragment in fragments:
            if flight.nonfinite is None:
                fragment.step(flight.lr, flight.outer_factor)
            fragment.merge(alpha if flight.nonfinite is None and flight.lr is not None else 0.0)

    def _drop(self, reason: str) -> None:
        self.dropped += 1
        if self.dropped == 1 and self._warns:
            effect = "every rank drops the steps since the exchange before and continues from its result"
            warn_of_drop(f"in the exchange of pseudo-gradients, {reason}", effect, "dropped_outer_steps")

    # --- state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, after `arrive`. Tensors have the names of parameters."""
        assert self._flight is None or self._flight.arrived, "arrive() must be called first"
        parts = [fragment.state_dict() for fragment in self.fragments]
        return {
            "z0": {name: z0 for part in parts for name, z0 in part["z0"].items()},
            "outer": {name: outer for part in parts for name, outer in part["outer"].items()},
            "compression": {name: states.state_dict() for name, states in self._named().items()},
            "flight": None if self._flight is None else asdict(self._flight),
            "means": {name: mean for fragment in self._in_flight() for name, mean in fragment.means().items()},
            "dropped": self.dropped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        compressors, saved = self._named(), state["compression"]
        for part in ("compression", "z0"):
            check_mapping(part, state[part])
        if compressors.keys() != saved.keys():
            raise ValueError(f"state of other compressors: {sorted(saved)}, not {sorted(compressors)}")
        names = {s.name for fragment in self.fragments for s in fragment.segments}
        if names != state["z0"].keys():
            raise ValueError(f"z0 of another model: of {sorted(state['z0'])}, not {sorted(names)}")
        flight = None if (saved_flight := state["flight"]) is None else _flight_from(saved_flight)
        if flight is not None and not set(flight.fragments) <= set(range(len(self.fragments))):
            raise ValueError(f"an exchange of fragments {flight.fragments} is in flight: use the same fragment_mb")
        for name, part in saved.items():
            check_mapping(name, part)
        check_count("dropped", state["dropped"])
        self.arrive()  # what is in flight ends here: its means and errors are replaced below
        for fragment in self.fragments:
            fragment.load_state_dict(state)
        for name, compressor in compressors.items():
            compressor.load_state_dict(saved[name])
        self._flight, self.dropped = flight, state["dropped"]
        for fragment in self._in_flight():
            fragment.load_means(state["means"])

    # --- ranks that join --------------------------------------------------------------------------

    def join(self) -> None:
        """Forget the error state of the rank whose state was loaded, and continue from z0."""
        for states in self.states:
            states.load_state_dict(without_errors(states.state_dict()))
            if any(bool(error.any()) for error in states.errors()):
                raise ValueError(
                    f"{states.compressor.class_name} cannot join: its state must have what is not sent under one "
                    f"of the keys {', '.join(ERRORS)}, by parameter name"
                )
        for fragment in self.fragments:
            fragment.merge(0.0)

    def _named(self) -> dict[str, BucketStates]:
        return named_methods(self.states)


def _flight_from(state: Any) -> Flight:
    names = {f.name for f in fields(Flight)}
    # older states lack what has a default
    if not isinstance(state, Mapping) or not {"fragments", "due", "lr"} <= state.keys() <= names:
        raise ValueError(f"flight must have {sorted(names)}, not {state!r}")
    return Flight(**state)


def optimizer_text(name: str, named: Sequence[tuple[str, Tensor]]) -> str:
    """The optimizer of a model, for errors."""
    return f"{name} (of {len(named)} tensors, the first {named[0][0]})"


def without_errors(state: Mapping[str, Any]) -> dict[str, Any]:
    """A compressor's state with zeros for all errors. Factors and counters, which all ranks share, remain."""
    return {
        key: {name: torch.zeros_like(error) for name, error in value.items()}
        if key in ERRORS
        else without_errors(value)
        if isinstance(value, Mapping)
        else value
        for key, value in state.items()
    }
