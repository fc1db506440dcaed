"""The exchange that sends fewer bytes: all-gather, or reduce-scatter.

The choice follows from the number of ranks and the planned sizes of payloads, so it is the same on every rank.
With fp32 values and int32 indices the reduce-scatter sends fewer bytes from 4 ranks on. It has a second round, and
a step changes fewer elements. gTop-k is not considered: it needs messages from rank to rank, and in these formats
it sends no fewer bytes than the better of the two.

Bytes per rank: the smaller of those of the two.
"""

from dgc.comm.requests import Conversation
from dgc.compression.protocol import Result
from dgc.compression.sparse.exchange.all_gather import AllGatherExchange
from dgc.compression.sparse.exchange.protocol import Chosen, SparseExchange
from dgc.compression.sparse.exchange.reduce_scatter import ReduceScatterExchange
from dgc.selection import Plan
from dgc.wire import SparseFormat


class AutoExchange:
    """For each bucket, the all-gather unless the reduce-scatter sends fewer bytes."""

    point_to_point = False

    def __init__(self) -> None:
        self._gather, self._scatter = AllGatherExchange(), ReduceScatterExchange()

    def wire_bytes(self, form: SparseFormat, plan: Plan, numel: int, size: int) -> float:
        return self.choose(form, plan, numel, size).wire_bytes(form, plan, numel, size)

    def mean(self, chosen: Chosen) -> Conversation[Result]:
        planned = (chosen.form, chosen.plan, chosen.bucket.numel, chosen.size)
        return (yield from self.choose(*planned).mean(chosen))

    def choose(self, form: SparseFormat, plan: Plan, numel: int, size: int) -> SparseExchange:
        """The exchange for a bucket of `numel` elements."""
        gathered, scattered = (e.wire_bytes(form, plan, numel, size) for e in (self._gather, self._scatter))
        return self._scatter if scattered < gathered else self._gather
