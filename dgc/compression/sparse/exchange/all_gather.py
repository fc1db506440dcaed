"""All-gather: every rank receives the selection of every rank.

    result = 1/N * sum over ranks          in rank order, so that replicas stay equal bit for bit

One round. Bytes per rank: b (N-1) for a payload of b bytes.
"""

from dgc.comm.meter import all_gather_wire_bytes
from dgc.comm.requests import AllGather, Conversation
from dgc.compression.protocol import Result
from dgc.compression.sparse.exchange.protocol import Chosen
from dgc.selection import Plan
from dgc.wire import SparseFormat


class AllGatherExchange:
    """Every rank sends its whole selection to every rank."""

    point_to_point = False

    def wire_bytes(self, form: SparseFormat, plan: Plan, numel: int, size: int) -> float:
        return all_gather_wire_bytes(form.nbytes(plan.per_tensor, numel), size)

    def mean(self, chosen: Chosen) -> Conversation[Result]:
        encoded = chosen.encode()
        chosen.memory.sent_(chosen.bucket, encoded.sent)
        (payloads,) = yield (AllGather(encoded.payload),)
        return (yield from chosen.mean_of(payloads))
