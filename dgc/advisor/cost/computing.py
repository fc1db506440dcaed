"""Recorded exchanges: the requests of one rank without a network, and its seconds of computing.

The conversation of the last rank gets replies as if every rank sent what this one sends (`AlikeRanks`). One
process can thus record what a rank of 4096 sends. If ranks of a machine differ, each of the last machine's is
recorded, one after another: on two levels, each rank of a machine has a share of every bucket
(dgc/engine/hierarchy.py). Shares hold whole tensors, so one rank may have most of a bucket and another nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_never

from dgc.advisor.cost.model import Compute, RecordedMessage, Traffic
from dgc.comm.meter import bytes_of
from dgc.comm.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Conversation,
    Exchange,
    Group,
    ReduceScatter,
    Reply,
    Request,
    next_requests,
)
from dgc.comm.transport import Transport
from dgc.core.bucket import Bucket
from dgc.core.protocol import Compressor
from dgc.engine.state import BucketStates

REDUCED = {"AllReduce", "ReduceScatter", "Broadcast"}  # their replies do not grow with the number of ranks
HALVES = (torch.float16, torch.bfloat16)
CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
DECODED_BYTES = 2**24  # of replies to the last all-gather; larger ones are not decoded
REFERENCE_SIZE = 4  # machines of the run that tells which all-gather is the last round

Planned = Sequence[tuple[Bucket, Compressor | BucketStates]]
Plan = Callable[[int, int], Planned]
Refill = Callable[[Planned, int], None]


class AlikeRanks:
    """A transport without a network. Replies are not copied: one tensor stands for the tensors of all ranks.

    Args:
        size: Number of ranks.
        local_size: Ranks of each machine. It must divide `size`.
        local_rank: Number of the rank on the last machine. None: the last one.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> from dgc.advisor.cost import AlikeRanks
        >>> AlikeRanks(size=4096, local_size=8).group_size("cross")
        512
    """

    timeout: float | None = None
    point_to_point = True

    def __init__(self, size: int, local_size: int = 1, local_rank: int | None = None):
        if size < 1 or local_size < 1 or size % local_size:
            raise ValueError(f"local_size must divide the number of ranks, {size}, but it is {local_size}")
        self.size, self.local_size = size, local_size
        self.local_rank = local_size - 1 if local_rank is None else local_rank
        if not 0 <= self.local_rank < local_size:
            raise ValueError(f"local_rank must be from 0 to {local_size - 1}, not {local_rank}")
        self.rank = size - local_size + self.local_rank
        self._sent: dict[int, Tensor] = {}  # the last message from rank to rank, by length

    def group_size(self, group: Group) -> int:
        return {"world": self.size, "local": self.local_size, "cross": self.size // self.local_size}[group]

    def group_rank(self, group: Group) -> int:
        return {"world": self.rank, "local": self.local_rank, "cross": self.group_size("cross") - 1}[group]

    def open_communicator(self, communicator: str, kinds: Sequence[Group] | None = None) -> None:
        """There is no order to keep."""

    def launch(self, name: str, requests: Sequence[Request], communicator: str = "") -> Any:
        return tuple(self.reply(request) for request in requests)

    def poll(self, work: Any) -> bool:
        return True

    def wait(self, work: tuple[Reply, ...]) -> tuple[Reply, ...]:
        return work

    @property
    def awaited(self) -> int:
        """Bytes of the longest message from rank to rank so far."""
        return max((tensor.nbytes for tensor in self._sent.values()), default=0)

    def reply(self, request: Request) -> Reply:
        """The reply. Raises ValueError if it is not known, as this rank sends nothing like what it receives."""
        size, rank = self.group_size(request.group), self.group_rank(request.group)
        match request:
            case AllReduce(tensor) | Broadcast(tensor):
                return tensor
            case AllGather(tensor):
                return (tensor,) * size
            case ReduceScatter(tensor):
                return tensor[tensor.numel() // size * rank :][: tensor.numel() // size]
            case AllToAll(tensor, splits):
                own = tensor[sum(splits[:rank]) :][: splits[rank]]
                if any(n != splits[rank] for n in request.expected):
                    raise ValueError("an all-to-all whose parts differ in length cannot be recorded by one rank")
                return (own,) * size
            case Exchange(sends, receives):
                self._sent |= {t.numel(): t for to, t in sends.items() if to != rank}
                missing = sorted(n for n in {t.numel() for t in receives.values()} if n not in self._sent)
                if missing:
                    raise ValueError(
                        f"no message of {missing} elements was sent, so that the reply cannot be made: "
                        "record a power of two of ranks"
                    )
                return {source: self._sent[tensor.numel()] for source, tensor in receives.items()}
            case _:
                assert_never(request)


def record_steps(
    plan: Plan,
    size: int,
    local_size: int = 1,
    steps: int = 1,
    refill: Refill | None = None,
) -> list[Traffic]:
    """Record what the last of `size` ranks sends, and the others of its machine if they differ.

    Several exchanges of the same compressors bring their state to their state in training. A conversation on more
    than 8 machines is ended at an all-gather if on 4 machines it made the same requests, of which this was the
    last, and the replies, which grow with the number of ranks, exceed DECODED_BYTES.

    Args:
        plan: Given the number of ranks and the rank, returns the buckets, with gradients, and for each its
            compressor, or the states that an exchange keeps before its first step. It is called once or twice for
            each recorded rank.
        size, local_size: As in `AlikeRanks`. For a compressor that sends from rank to rank, a power of two.
        steps: Number of exchanges.
        refill: Sets the gradients of the planned buckets before exchange number 0, 1, ... None: for a single one.

    Raises:
        ValueError: As AlikeRanks and its `reply`, or there are several steps without `refill`.
    """
    if steps < 1 or (steps > 1 and refill is None):
        raise ValueError(f"record_steps: {steps} steps need a function `refill` that sets the gradients of each")

    def record_rank(local_rank: int) -> list[Traffic]:
        return _record_rank(plan, AlikeRanks(size, local_size, local_rank), steps, refill)

    last = record_rank(local_size - 1)
    messages = [message for bucket in last[-1].buckets for message in bucket]
    if local_size == 1 or all(of.size == size and of.kind != "Exchange" for of in messages):
        return last  # every message is a collective of all ranks, so all ranks of a machine are alike
    others = [record_rank(local_rank) for local_rank in range(local_size - 1)]
    return [machine_of(ranks) for ranks in zip(*others, last, strict=True)]


def _record_rank(plan: Plan, ranks: AlikeRanks, steps: int, refill: Refill | None) -> list[Traffic]:
    size, local_size = ranks.size, ranks.local_size
    ends: list[tuple[str, ...]] | None = None
    if size > 2 * REFERENCE_SIZE * local_size:
        fewer = AlikeRanks(REFERENCE_SIZE * local_size, local_size, ranks.local_rank)
        reference = _record_rank(plan, fewer, steps, refill)[-1]
        ends = [tuple(message.kind for message in bucket) for bucket in reference.buckets]
    planned = plan(size, ranks.rank)
    states = {id(of): of if isinstance(of, BucketStates) else BucketStates(of) for _, of in planned}
    for bucket, of in planned:
        if not isinstance(of, BucketStates):
            states[id(of)].add(bucket, size, ranks.rank)
    found = []
    for step in range(steps):
        if refill is not None:
            refill(planned, step)
        recorded = []
        for i, (bucket, of) in enumerate(planned):
            conversation = states[id(of)].reduce(bucket)
            recorded.append(_record(conversation, ranks, bucket.device, ends[i] if ends else ()))
            bucket.release()
        messages, elements = tuple(of for of, _, _ in recorded), tuple(bucket.numel for bucket, _ in planned)
        later = [seconds for _, _, seconds in recorded if seconds is not None]
        decode = sum(later) if len(later) == len(recorded) else None
        found.append(
            Traffic(size, local_size, messages, sum(encode for _, encode, _ in recorded), decode, elements)
        )
    return found


def _record(
    conversation: Conversation[Any],
    ranks: AlikeRanks,
    device: torch.device,
    ends: tuple[str, ...],
) -> tuple[tuple[RecordedMessage, ...], float, float | None]:
    """The messages of a conversation, and its seconds before and after the first one; None if it ends early."""
    messages: list[RecordedMessage] = []
    seconds: list[float] = []  # before each message, and after the last one
    replies: tuple[Reply, ...] | None = None
    while True:
        start = _now(device)
        try:
            requests = next_requests(conversation, replies)
        except StopIteration:
            seconds.append(_now(device) - start)
            return tuple(messages), seconds[0], sum(seconds[1:])
        seconds.append(_now(device) - start)
        replies = tuple(ranks.reply(request) for request in requests)
        messages += [message_of(of, ranks, ranks.awaited if isinstance(of, Exchange) else 0) for of in requests]
        if ends and ends[-1] == "AllGather" and ends == tuple(message.kind for message in messages):
            if messages[-1].size * messages[-1].payload > DECODED_BYTES:
                conversation.close()
                return tuple(messages), seconds[0], None


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def message_of(request: Request, ranks: Transport, awaited: int = 0) -> RecordedMessage:
    """The message of a request of this rank. awaited: for an Exchange, bytes that it waits for."""
    size, rank, local = ranks.group_size(request.group), ranks.group_rank(request.group), ranks.local_size
    inner = 1 if request.group == "cross" else local
    payload, wire, cross = bytes_of(request, rank, size, local)
    peers = 0
    half = isinstance(request, AllReduce | ReduceScatter) and request.tensor.dtype in HALVES
    if isinstance(request, Broadcast):
        awaited = request.tensor.nbytes
    if isinstance(request, AllToAll):
        awaited = (sum(request.expected) - request.expected[rank]) * request.tensor.element_size()
        peers = sum(n > 0 for to, n in enumerate(request.splits) if to != rank)
    if isinstance(request, Exchange):
        peers = sum(to != rank for to in request.sends)
    return RecordedMessage(type(request).__name__, size, inner, payload, wire, cross, half, peers, awaited)


def typical(traffics: Sequence[Traffic]) -> Traffic:
    """The last of several decoded exchanges of the same compressors, with the median seconds of all."""
    decode = [traffic.decode for traffic in traffics if traffic.decode is not None]
    if len(decode) < len(traffics):
        raise ValueError(f"{len(traffics) - len(decode)} of {len(traffics)} exchanges were not decoded")
    encode = median(traffic.encode for traffic in traffics)
    return replace(traffics[-1], encode=encode, decode=median(decode))


def fit_computing(traffics: Sequence[Traffic]) -> Compute:
    """Median time of encoding, and a line through the times of decoding; it neither falls nor begins below 0.

    It is flat for a method that only reduces: what a rank decodes is as large for any number of ranks.

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


def machine_of(ranks: Sequence[Traffic]) -> Traffic:
    """The traffic of a machine, with the computing of the slowest of its `ranks`, which were recorded one by one.

    Messages to all ranks, or to the ranks of the machine, are the same on all of its ranks, in number and order.
    Those in between go to the rank's own group on other machines, and ranks may differ in their number.
    """
    decode = [traffic.decode for traffic in ranks]
    buckets = []
    for messages in zip(*(traffic.buckets for traffic in ranks), strict=True):
        by_place = [_places(of) for of in messages]
        places = sorted({place for of in by_place for place in of})
        buckets.append(tuple(_together([of[place] for of in by_place if place in of]) for place in places))
    return replace(
        ranks[0],
        buckets=tuple(buckets),
        encode=max(traffic.encode for traffic in ranks),
        decode=None if None in decode else max(seconds or 0.0 for seconds in decode),
    )


def _places(messages: Sequence[RecordedMessage]) -> dict[tuple[int, int], RecordedMessage]:
    """By number of messages with the machine's other ranks so far, and of those without since the last one."""
    found, shared, own = {}, 0, 0
    for message in messages:
        shared, own = (shared, own + 1) if message.inner == 1 else (shared + 1, 0)
        found[shared, own] = message
    return found


def _together(messages: Sequence[RecordedMessage]) -> RecordedMessage:
    """What ranks of a machine send at the same time: the largest message, and the bytes of all on the card."""
    return replace(
        max(messages, key=lambda message: message.wire),
        awaited=max(message.awaited for message in messages),
        machine=sum(message.cross for message in messages),
    )


def evict_caches() -> None:
    """Replace the content of this machine's caches, as a step of a large model does."""
    _larger_than_caches().add_(1.0)


@cache
def _larger_than_caches() -> Tensor:
    return torch.zeros(2 * last_level_cache() // 4, dtype=torch.float32)


def last_level_cache(folder: Path = CACHE) -> int:
    """Bytes of the largest cache of a core, as Linux reports it; 64 MiB if it does not."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [file.read_text().strip() for file in folder.glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=2**26)
