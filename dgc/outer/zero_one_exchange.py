"""The messages of 0/1 Adam: buffers with one part for each tensor, averaged as gradients or compressed."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from dgc.comm.meter import TrafficMeter
from dgc.comm.ordered import OrderedConversations
from dgc.comm.transport import Transport
from dgc.compression.protocol import Result, StatelessCompressor, conversation_of
from dgc.compression.route import Route
from dgc.gossip.model import FlatModel
from dgc.optim.agreement import Agreement
from dgc.optim.exchange.planning import compressors_in_order, plan_buckets
from dgc.optim.options import register_compressors
from dgc.outer.exchange import AGREE, optimizer_text


class ZeroOneExchange:
    """Buffers in fp32, by parameter name, whose means over the ranks replace them. Construction is collective.

    Args:
        model: The model of this rank.
        route: Chooses the compressors.
        gradients: Averages gradients.
        bucket_mb: Largest size of a bucket in MB.
        transport: Connects the ranks.
        meter: Counts bytes and seconds.
        name: Prefix of lanes and messages, unique on the transport.

    Raises:
        ValueError: A compressor belongs to another optimizer, or does not fit the transport.
    """

    def __init__(
        self,
        model: FlatModel,
        route: Route,
        gradients: StatelessCompressor,
        bucket_mb: float,
        transport: Transport,
        meter: TrafficMeter,
        name: str,
    ):
        named = [(s.name, s.of(model.z)) for s in model.segments]
        self._planned = plan_buckets(named, route.compressor_for, bucket_mb, name)
        self.compressors = compressors_in_order(self._planned, named)
        register_compressors(self.compressors, transport)
        for plan in self._planned:
            plan.compressor.plan(plan.bucket, transport.size, transport.rank)
        self.parts = {s.name: s.of(plan.bucket.flat) for plan in self._planned for s in plan.bucket.segments}
        self.dropped = 0
        self._gradients = gradients
        self._conversations: OrderedConversations[Result] = OrderedConversations(name, transport, meter)
        self._agreement = Agreement(transport, optimizer_text(name, named), "an exchange of 0/1 Adam", AGREE)
        self._warns = transport.rank == 0

    def zero_(self) -> None:
        for plan in self._planned:
            plan.bucket.flat.zero_()

    def average(self, common: Mapping[str, object], are_gradients: bool = False) -> bool:
        """Replace the buffers by their means, and return True. If these are not finite, return False.

        Args:
            common: What must be equal on every rank, by name.
            are_gradients: The buffers hold gradients, to be sent by `gradients` without error state.

        Raises:
            ValueError: Some of `common` is not.
        """
        with self._agreement.exchange():
            self._agreement.begin(are_gradients=are_gradients, **common)
            for plan in self._planned:
                name, compressor = plan.bucket.name, plan.compressor
                if are_gradients:
                    name, compressor = f"{name}.gradients", self._gradients  # messages of a name have one size
                self._conversations.start(name, conversation_of(compressor, plan.bucket))
            self._agreement.end()
            results = self._conversations.finish()
        reason = next((result.nonfinite for result in results if result.nonfinite), None)
        for plan, result in zip(self._planned, results, strict=True):
            if reason is None:
                result.write_to(plan.bucket)
            elif not are_gradients:
                plan.compressor.rollback(plan.bucket)
        if reason is not None:
            self._drop(reason)
        return reason is None

    def _drop(self, reason: str) -> None:
        self.dropped += 1
        if self.dropped == 1 and self._warns:
            warnings.warn(
                f"in an exchange of 0/1 Adam, {reason}: every rank drops the steps since the exchange before. "
                "Further drops are only counted, as dropped_exchanges",
                stacklevel=2,
            )

    def errors(self) -> Iterable[Tensor]:
        return (error for compressor in self.compressors for error in compressor.errors())

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        compression = {name: compressor.state_dict() for name, compressor in self._named()}
        return {"compression": compression, "dropped": self.dropped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        compressors, saved = dict(self._named()), state["compression"]
        if compressors.keys() != saved.keys():
            raise ValueError(f"state of other compressors: {sorted(saved)}, not {sorted(compressors)}")
        for name, compressor in compressors.items():
            compressor.load_state_dict(saved[name])
        self.dropped = state["dropped"]

    def _named(self) -> list[tuple[str, Any]]:
        return [(f"{type(c).__name__}.{i}", c) for i, c in enumerate(self.compressors)]
