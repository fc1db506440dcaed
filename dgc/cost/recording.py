"""The requests of one rank, recorded without a network.

The conversation of the last rank gets replies as if every rank sent what this one sends. One process can thus
record what a rank of 4096 sends: replies are not copied, and of many ranks the last all-gather is not decoded.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from dgc.bucket import Bucket
from dgc.comm.meter import cross_wire_bytes, payload_bytes, wire_bytes
from dgc.comm.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Conversation,
    Exchange,
    ReduceScatter,
    Request,
)
from dgc.compression.protocol import Compressor, conversation_of
from dgc.cost.model import Message, Traffic

HALVES = (torch.float16, torch.bfloat16)
REFERENCE_SIZE = 4  # machines of the run that tells which all-gather is the last round

Plan = Callable[[int, int], Sequence[tuple[Bucket, Compressor]]]


def record(plan: Plan, size: int, local_size: int = 1, decoded_bytes: int = 2**24) -> Traffic:
    """Record what the last of `size` ranks sends in one exchange.

    A conversation on more than 8 machines is ended at an all-gather if on 4 machines it made the same requests, of
    which this was the last: the replies grow with the number of ranks.

    Args:
        plan: Given the number of ranks and the rank, returns the buckets, with gradients, and their compressors.
            It is called once or twice and must make new compressors each time.
        size: Number of ranks. For a compressor that sends from rank to rank, a power of two.
        local_size: Ranks of each machine. It must divide `size`.
        decoded_bytes: Largest size of the replies to such an all-gather that are decoded nevertheless.

    Raises:
        ValueError: `local_size` does not divide `size`, or no reply to a request can be made.
    """
    if size < 1 or local_size < 1 or size % local_size:
        raise ValueError(f"local_size must divide the number of ranks, {size}, but it is {local_size}")
    ends: list[tuple[str, ...]] | None = None
    if size > 2 * REFERENCE_SIZE * local_size:
        reference = record(plan, REFERENCE_SIZE * local_size, local_size)
        ends = [tuple(message.kind for message in bucket) for bucket in reference.buckets]
    rank = size - 1
    planned = plan(size, rank)
    recorders = [_Recorder(size, local_size) for _ in planned]
    for i, (recorder, (bucket, compressor)) in enumerate(zip(recorders, planned, strict=True)):
        recorder.run(conversation_of(compressor, bucket), ends[i] if ends else (), decoded_bytes)
    decode = [recorder.decode for recorder in recorders]
    late = None if any(seconds is None for seconds in decode) else sum(seconds or 0.0 for seconds in decode)
    early = sum(recorder.encode for recorder in recorders)
    return Traffic(size, local_size, tuple(tuple(recorder.messages) for recorder in recorders), early, late)


class _Recorder:
    """The messages of one conversation of the last rank, and its seconds. `decode`: None if it was ended early."""

    def __init__(self, size: int, local_size: int):
        self.messages: list[Message] = []
        self.encode = 0.0
        self.decode: float | None = 0.0
        self._sizes = {"world": size, "local": local_size, "cross": size // local_size}
        self._inner = {"world": local_size, "local": local_size, "cross": 1}
        self._sent: dict[int, Tensor] = {}  # the last message from rank to rank, by length

    def run(self, conversation: Conversation[Any], ends: tuple[str, ...], decoded_bytes: int) -> None:
        start = perf_counter()
        requests = next(conversation, None)
        self.encode = perf_counter() - start
        later = 0.0
        while requests is not None:
            self.messages += [self._message(request) for request in requests]
            if ends and ends[-1] == "AllGather" and ends == tuple(message.kind for message in self.messages):
                if self.messages[-1].size * self.messages[-1].payload > decoded_bytes:
                    conversation.close()
                    self.decode = None
                    return
            replies = tuple(self._reply(request) for request in requests)
            start = perf_counter()
            try:
                requests = conversation.send(replies)
            except StopIteration:
                requests = None
            later += perf_counter() - start
        self.decode = later

    def _message(self, request: Request) -> Message:
        size, inner = self._sizes[request.group], self._inner[request.group]
        rank, payload, peers, awaited = size - 1, payload_bytes(request, size - 1), 0, 0
        half = isinstance(request, AllReduce | ReduceScatter) and request.tensor.dtype in HALVES
        if isinstance(request, AllToAll):
            peers = sum(n > 0 for to, n in enumerate(request.splits) if to != rank)
        if isinstance(request, Exchange):
            self._sent |= {tensor.numel(): tensor for to, tensor in request.sends.items() if to != rank}
            peers = sum(to != rank for to in request.sends)
            awaited = max((tensor.nbytes for tensor in self._sent.values()), default=0)
        wire = wire_bytes(request, rank, size)
        cross = cross_wire_bytes(request, rank, size, self._inner["world"])
        return Message(type(request).__name__, size, inner, payload, wire, cross, half, peers, awaited)

    def _reply(self, request: Request) -> Any:
        """The reply of ranks that all contribute what this rank does."""
        size = self._sizes[request.group]
        match request:
            case AllReduce(tensor) | Broadcast(tensor):
                return tensor
            case AllGather(tensor):
                return (tensor,) * size
            case ReduceScatter(tensor):
                return tensor[tensor.numel() // size * (size - 1) :]
            case AllToAll(tensor, splits):
                own = tensor[tensor.numel() - splits[-1] :]
                if any(n != splits[-1] for n in request.expected):
                    raise ValueError("an all-to-all whose parts differ in length cannot be recorded by one rank")
                return (own,) * size
            case Exchange(_, receives):
                missing = sorted(n for n in {t.numel() for t in receives.values()} if n not in self._sent)
                if missing:
                    raise ValueError(
                        f"no message of {missing} elements was sent, so that the reply cannot be made: "
                        "record a power of two of ranks"
                    )
                return {rank: self._sent[tensor.numel()] for rank, tensor in receives.items()}
