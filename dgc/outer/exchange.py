"""The exchange of fragments: it begins, arrives while training goes on, and is then used."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dgc.arguments import checked
from dgc.comm.meter import TrafficMeter
from dgc.comm.ordered import OrderedConversations
from dgc.comm.transport import Transport
from dgc.compression.protocol import Compressor, Result
from dgc.optim.agreement import Agreement
from dgc.optim.exchange.planning import compressors_in_order
from dgc.optim.options import register_compressors
from dgc.outer.fragment import Fragment

EXCHANGE_STATE = ("z0", "outer", "compression", "flight", "means", "dropped")
ERRORS = ("errors", "residuals")  # keys of a compressor's state with what a rank has not sent, by parameter name
AGREE = (
    "every rank must step its optimizers in the same order, and SlowMo and 0/1 Adam need the same learning rate "
    "on all ranks: give a ReduceLROnPlateau the mean of their losses"
)
SERVER_ERRORS = "server_errors"  # what a rank has not sent of the mean: each rank has a part


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
        self.compressors = compressors_in_order(planned, named)
        register_compressors(self.compressors, transport)
        for plan in planned:
            plan.compressor.plan(plan.bucket, transport.size, transport.rank)
        self._conversations: OrderedConversations[Result] = OrderedConversations(name, transport, meter)
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
            for fragment in fragments:
                for name, conversation in fragment.begin(x, bias):
                    self._conversations.start(name, conversation)

    def _in_flight(self) -> list[Fragment]:
        return [] if self._flight is None else [self.fragments[i] for i in self._flight.fragments]

    def advance(self) -> None:
        """Continue what has arrived, without waiting."""
        with self._agreement.exchange():
            self._conversations.advance()

    def arrive(self) -> None:
        """Wait for the means of the exchange in flight, if any, without using them."""
        if self._flight is None or self._flight.arrived:
            return
        with self._agreement.exchange():
            self._agreement.end()
            results = iter(self._conversations.finish())
        fragments = self._in_flight()
        own = [[next(results) for _ in fragment.planned] for fragment in fragments]
        # a result that is not finite in one bucket drops all of them
        reasons = (result.nonfinite for part in own for result in part if result.nonfinite)
        self._flight.nonfinite, self._flight.arrived = next(reasons, None), True
        for fragment, part in zip(fragments, own, strict=True):
            if self._flight.nonfinite is None:
                fragment.keep(part)
            else:
                fragment.rollback()

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
            warnings.warn(
                f"in the exchange of pseudo-gradients, {reason}: every rank drops the steps since the exchange "
                "before and continues from its result. Further drops are only counted, as dropped_outer_steps",
                stacklevel=2,
            )

    # --- state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, after `arrive`. Tensors have the names of parameters."""
        assert self._flight is None or self._flight.arrived, "arrive() must be called first"
        parts = [fragment.state_dict() for fragment in self.fragments]
        return {
            "z0": {name: z0 for part in parts for name, z0 in part["z0"].items()},
            "outer": {name: outer for part in parts for name, outer in part["outer"].items()},
            "compression": {name: compressor.state_dict() for name, compressor in self._named()},
            "flight": None if self._flight is None else asdict(self._flight),
            "means": {name: mean for fragment in self._in_flight() for name, mean in fragment.means().items()},
            "dropped": self.dropped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        compressors, saved = dict(self._named()), state["compression"]
        if compressors.keys() != saved.keys():
            raise ValueError(f"state of other compressors: {sorted(saved)}, not {sorted(compressors)}")
        names = {s.name for fragment in self.fragments for s in fragment.segments}
        if names != state["z0"].keys():
            raise ValueError(f"z0 of another model: of {sorted(state['z0'])}, not {sorted(names)}")
        flight = None if (saved_flight := state["flight"]) is None else _flight_from(saved_flight)
        if flight is not None and not set(flight.fragments) <= set(range(len(self.fragments))):
            raise ValueError(f"an exchange of fragments {flight.fragments} is in flight: use the same fragment_mb")
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
        for compressor in self.compressors:
            compressor.load_state_dict(without_errors(compressor.state_dict()))
            if any(bool(error.any()) for error in compressor.errors()):
                raise ValueError(
                    f"{type(compressor).__name__} cannot join: its state must have what is not sent under one of "
                    f"the keys {', '.join(ERRORS)}, by parameter name"
                )
        for fragment in self.fragments:
            fragment.merge(0.0)

    def _named(self) -> list[tuple[str, Any]]:
        return [(f"{type(c).__name__}.{i}", c) for i, c in enumerate(self.compressors)]


def _flight_from(state: Any) -> Flight:
    names = {f.name for f in fields(Flight)}
    # older states lack what has a default
    if not isinstance(state, Mapping) or not {"fragments", "due", "lr"} <= state.keys() <= names:
        raise ValueError(f"flight must have {sorted(names)}, not {state!r}")
    return Flight(**state)


def optimizer_text(name: str, named: Sequence[tuple[str, Tensor]]) -> str:
    """The optimizer of a model, for errors."""
    return f"{name} (of {len(named)} tensors, the first {named[0][0]})"


def keeps_own_errors(compressor: Compressor) -> bool:
    """Whether the compressor has its error state on the rank whose pseudo-gradients it is of."""
    return SERVER_ERRORS not in compressor.state_dict()


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
