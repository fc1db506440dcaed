"""Recorded exchanges: the requests of one rank without a network, and its seconds of computing.

The conversation of the last rank gets replies as if every rank sent what this one sends (`AlikeRanks`). One
process can thus record what a rank of 4096 sends: replies are not copied, and of many ranks the last all-gather is
not decoded. If ranks of a machine differ, each of the last machine's is recorded, one after another.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from dgc.bucket import Bucket
from dgc.comm.meter import bytes_of, nbytes
from dgc.comm.requests import (
    AllReduce,
    AllToAll,
    Broadcast,
    Conversation,
    Exchange,
    ReduceScatter,
    Request,
    next_requests,
)
from dgc.comm.transport import Transport
from dgc.compression.protocol import Compressor, conversation_of
from dgc.cost.alike import AlikeRanks
from dgc.cost.machine import are_alike, machine_of
from dgc.cost.model import Compute, Message, Traffic

REDUCED = {"AllReduce", "ReduceScatter", "Broadcast"}  # their replies do not grow with the number of ranks
HALVES = (torch.float16, torch.bfloat16)
REFERENCE_SIZE = 4  # machines of the run that tells which all-gather is the last round

Planned = Sequence[tuple[Bucket, Compressor]]
Plan = Callable[[int, int], Planned]
Refill = Callable[[Planned, int], None]


def record(plan: Plan, size: int, local_size: int = 1, decoded_bytes: int = 2**24) -> Traffic:
    """Record what the last of `size` ranks sends in one exchange, and the others of its machine if they differ.

    A conversation on more than 8 machines is ended at an all-gather if on 4 machines it made the same requests, of
    which this was the last: the replies grow with the number of ranks.

    Args:
        plan: Given the number of ranks and the rank, returns the buckets, with gradients, and their compressors.
            It is called once or twice for each recorded rank, and must make new compressors each time.
        size: Number of ranks. For a compressor that sends from rank to rank, a power of two.
        local_size: Ranks of each machine. It must divide `size`.
        decoded_bytes: Largest size of the replies to such an all-gather that are decoded nevertheless.

    Raises:
        ValueError: `local_size` does not divide `size`, or no reply to a request can be made.
    """
    (traffic,) = record_steps(plan, size, local_size, decoded_bytes=decoded_bytes)
    return traffic


def record_steps(
    plan: Plan,
    size: int,
    local_size: int = 1,
    steps: int = 1,
    refill: Refill | None = None,
    decoded_bytes: int = 2**24,
) -> list[Traffic]:
    """Record several exchanges of the same compressors, so that their state becomes that of training.

    Args:
        plan: As for `record`.
        size: As for `record`.
        local_size: As for `record`.
        steps: Number of exchanges.
        refill: Sets the gradients of the planned buckets before exchange number 0, 1, ... None: a single exchange
            of what `plan` has set.
        decoded_bytes: As for `record`.

    Raises:
        ValueError: As for `record`, or several steps without `refill`, which would exchange their own means.
    """
    if steps < 1 or (steps > 1 and refill is None):
        raise ValueError(f"record_steps: {steps} steps need a function `refill` that sets the gradients of each")

    def record_rank(local_rank: int) -> list[Traffic]:
        return _record_rank(plan, AlikeRanks(size, local_size, local_rank), steps, refill, decoded_bytes)

    last = record_rank(local_size - 1)
    if are_alike(last[-1]):
        return last
    others = [record_rank(local_rank) for local_rank in range(local_size - 1)]
    return [machine_of(ranks) for ranks in zip(*others, last, strict=True)]


def _record_rank(
    plan: Plan, ranks: AlikeRanks, steps: int, refill: Refill | None, decoded_bytes: int
) -> list[Traffic]:
    size, local_size = ranks.size, ranks.local_size
    ends: list[tuple[str, ...]] | None = None
    if size > 2 * REFERENCE_SIZE * local_size:
        fewer = AlikeRanks(REFERENCE_SIZE * local_size, local_size, ranks.local_rank)
        reference = _record_rank(plan, fewer, steps, refill, decoded_bytes)[-1]
        ends = [tuple(message.kind for message in bucket) for bucket in reference.buckets]
    planned = plan(size, ranks.rank)
    found = []
    for step in range(steps):
        if refill is not None:
            refill(planned, step)
        recorders = [_Recorder(ranks, bucket) for bucket, _ in planned]
        for i, (recorder, (bucket, compressor)) in enumerate(zip(recorders, planned, strict=True)):
            recorder.run(conversation_of(compressor, bucket), ends[i] if ends else (), decoded_bytes)
            bucket.release()
        decode = [recorder.decode for recorder in recorders]
        late = None if any(seconds is None for seconds in decode) else sum(seconds or 0.0 for seconds in decode)
        early = sum(recorder.encode for recorder in recorders)
        messages = tuple(tuple(recorder.messages) for recorder in recorders)
        found.append(Traffic(size, local_size, messages, early, late, tuple(b.numel for b, _ in planned)))
    return found


class _Recorder:
    """The messages of one conversation of a rank, and its seconds. `decode`: None if it was ended early."""

    def __init__(self, ranks: AlikeRanks, bucket: Bucket):
        self.messages: list[Message] = []
        self.encode = 0.0
        self.decode: float | None = 0.0
        self._ranks, self._device = ranks, bucket.device

    def run(self, conversation: Conversation[Any], ends: tuple[str, ...], decoded_bytes: int) -> None:
        start = self._now()
        requests = self._next(conversation, None)
        self.encode = self._now() - start
        later = 0.0
        while requests is not None:
            replies = tuple(self._ranks.reply(request) for request in requests)
            self.messages += [self._message(request) for request in requests]
            if ends and ends[-1] == "AllGather" and ends == tuple(message.kind for message in self.messages):
                if self.messages[-1].size * self.messages[-1].payload > decoded_bytes:
                    conversation.close()
                    self.decode = None
                    return
            start = self._now()
            requests = self._next(conversation, replies)
            later += self._now() - start
        self.decode = later

    @staticmethod
    def _next(conversation: Conversation[Any], replies: tuple[Any, ...] | None) -> tuple[Request, ...] | None:
        try:
            return next_requests(conversation, replies)
        except StopIteration:
            return None

    def _message(self, request: Request) -> Message:
        return message_of(request, self._ranks, self._ranks.awaited if isinstance(request, Exchange) else 0)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()


def message_of(request: Request, ranks: Transport, awaited: int = 0) -> Message:
    """The message of a request.

    Args:
        request: What this rank sends.
        ranks: Transport of this rank.
        awaited: For an Exchange, bytes that it waits for.
    """
    size, rank, local = ranks.group_size(request.group), ranks.group_rank(request.group), ranks.local_size
    inner = 1 if request.group == "cross" else local
    payload, wire, cross = bytes_of(request, rank, size, local)
    peers = 0
    half = isinstance(request, AllReduce | ReduceScatter) and request.tensor.dtype in HALVES
    if isinstance(request, Broadcast):
        awaited = nbytes(request.tensor)
    if isinstance(request, AllToAll):
        awaited = (sum(request.expected) - request.expected[rank]) * request.tensor.element_size()
        peers = sum(n > 0 for to, n in enumerate(request.splits) if to != rank)
    if isinstance(request, Exchange):
        peers = sum(to != rank for to in request.sends)
    return Message(type(request).__name__, size, inner, payload, wire, cross, half, peers, awaited)


def typical(traffics: Sequence[Traffic]) -> Traffic:
    """The last of several exchanges of the same compressors, with the median seconds of all.

    Args:
        traffics: Exchanges whose last replies were decoded.

    Raises:
        ValueError: The replies of one were not decoded.
    """
    decode = [traffic.decode for traffic in traffics if traffic.decode is not None]
    if len(decode) < len(traffics):
        raise ValueError(f"{len(traffics) - len(decode)} of {len(traffics)} exchanges were not decoded")
    encode = median(traffic.encode for traffic in traffics)
    return replace(traffics[-1], encode=encode, decode=median(decode))


def fit_computing(traffics: Sequence[Traffic]) -> Compute:
    """Median time of encoding, and a line through the times of decoding; it neither falls nor begins below 0.

    It is flat for a method that only reduces: what a rank decodes is as large for any number of ranks.

    Args:
        traffics: Recorded exchanges of at least two numbers of ranks.

    Raises:
        ValueError: All exchanges whose last replies were decoded have the same number of ranks.
    """
    points = [(traffic.size, traffic.decode) for traffic in traffics if traffic.decode is not None]
    if len({size for size, _ in points}) < 2:
        raise ValueError("a line through the times of decoding needs exchanges of two or more numbers of ranks")
    x, y = (sum(point[i] for point in points) / len(points) for i in range(2))
    spread = sum((size - x) ** 2 for size, _ in points)
    slope = sum((size - x) * (seconds - y) for size, seconds in points) / spread
    slope = min(max(0.0, slope), y / x)
    kinds = {message.kind for traffic in traffics for bucket in traffic.buckets for message in bucket}
    if kinds and kinds <= REDUCED:
        slope = 0.0
    return Compute(median(traffic.encode for traffic in traffics), y - slope * x, slope)
