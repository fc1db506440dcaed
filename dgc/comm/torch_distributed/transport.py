"""A transport over torch.distributed: Gloo for tensors in host memory, NCCL for tensors of NVIDIA GPUs.

torch.distributed matches the collectives of a process group by the order in which they are issued. A lane has its
own process group. See dgc.comm.transport.

With NCCL a reply may be used as soon as the collective is issued: the current stream waits for it, the host does
not. `poll` therefore returns True at once, and the order of all rounds is that of the program.
"""

import atexit
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from dgc.comm.channel import Channel, MessageTags
from dgc.comm.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Group,
    ReduceScatter,
    Reply,
    Request,
    as_bytes,
)
from dgc.comm.staging import StagedTransport
from dgc.comm.torch_distributed.groups import Lanes, Place, destroy
from dgc.comm.torch_distributed.messages import GlooChannel, Neighbors, WaitingThreads
from dgc.comm.transport import Transport

_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
# The names before torch 2.13 are deprecated there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
DEFAULT_TIMEOUT = 1800.0  # seconds: that of torch.distributed
MAX_TAG = 2**31 - 1


def connect(
    hierarchical: bool | str = False, timeout: float | None = None, *, point_to_point: bool = False
) -> Transport:
    """Return a TorchTransport. GPU tensors go through pinned host memory if there is no NCCL, or for gossip.

    Args:
        hierarchical: As in TorchTransport.
        timeout: As in TorchTransport, in seconds.
        point_to_point: The transport must carry messages between two ranks. NCCL's messages can deadlock beside
            its collectives, so all messages use Gloo.
    """
    on_gpu = torch.cuda.is_available()
    uses_nccl = on_gpu and dist.is_nccl_available() and not point_to_point
    transport = TorchTransport(hierarchical, timeout, "cpu:gloo,cuda:nccl" if uses_nccl else "gloo")
    return StagedTransport(transport) if on_gpu and not uses_nccl else transport


@dataclass(eq=False)
class TorchFlight:
    """Launched requests, the operations of each, and its output (the reply, before it is complete)."""

    requests: tuple[Request, ...]
    works: tuple[list[Any], ...]  # torch.distributed.Work, or Future of a message
    outputs: tuple[Reply, ...]


class TorchTransport:
    """A transport over torch.distributed. It initialises the default process group unless that has been done.

    Args:
        hierarchical: Create the `local` and `cross` groups as well. "auto": if there are several machines and one
            of them has several ranks. Must be the same on every rank.
        timeout: Seconds after which an operation that some ranks never joined fails. None: 1800.
        backend: Backend of the process groups: "gloo" or "cpu:gloo,cuda:nccl".

    Raises:
        ValueError: torch.distributed cannot be initialised from the environment variables of the launcher.
    """

    def __init__(self, hierarchical: bool | str = False, timeout: float | None = None, backend: str = "gloo"):
        duration = timedelta(seconds=DEFAULT_TIMEOUT if timeout is None else timeout)
        self._owns_default_group = not dist.is_initialized()
        if self._owns_default_group:
            if "RANK" in os.environ:
                dist.init_process_group(backend, timeout=duration)
            else:  # a single process, without a launcher
                dist.init_process_group(backend, timeout=duration, rank=0, world_size=1, store=dist.HashStore())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.point_to_point = "nccl" not in backend  # an Exchange uses Gloo
        self._place = Place()
        machine = self._place.members("local")
        self.local_rank, self.local_size = machine.index(self.rank), len(machine)
        if hierarchical == "auto":
            hierarchical = len(self._place.machines) > 1 and len(self._place.across) > 1
        kinds: tuple[Group, ...] = ("world", "local", "cross") if hierarchical else ("world",)
        self._lanes = Lanes(self._place, kinds, backend, duration)
        self._threads = WaitingThreads()
        self._neighbors = Neighbors(self._threads)
        self._tags = MessageTags(MAX_TAG)
        self._unfinished: set[TorchFlight] = set()
        _open.append(self)

    def group_size(self, group: Group) -> int:
        return len(self.members(group))

    def group_rank(self, group: Group) -> int:
        return self.members(group).index(self.rank)

    def members(self, group: Group) -> list[int]:
        """World ranks of this rank's group of that kind."""
        return self._place.members(group)

    def channel(self) -> Channel:
        """Open a channel over Gloo. Collective."""
        return GlooChannel(self._threads)

    def open_lane(self, lane: str) -> None:
        self._lanes.open(lane)

    def launch(self, name: str, requests: Sequence[Request], lane: str = "") -> TorchFlight:
        started = [self._start(f"{name}.{i}", request, lane) for i, request in enumerate(requests)]
        works, outputs = zip(*started, strict=True) if started else ((), ())
        flight = TorchFlight(tuple(requests), works, outputs)
        self._unfinished.add(flight)
        return flight

    def poll(self, flight: TorchFlight) -> bool:
        return all(
            _uses_stream(request) or all(map(_is_complete, works))
            for request, works in zip(flight.requests, flight.works, strict=True)
        )

    def wait(self, flight: TorchFlight) -> tuple[Reply, ...]:
        replies = []
        for request, works, output in zip(flight.requests, flight.works, flight.outputs, strict=True):
            for work in works:
                work.result() if isinstance(work, Future) else work.wait()
            if isinstance(request, AllReduce | ReduceScatter) and request.op == "mean":
                output = output.div_(self.group_size(request.group))
            replies.append(output)
        self._unfinished.discard(flight)
        return tuple(replies)

    def close(self) -> None:
        """Destroy the process groups of the lanes, and the default group if this transport initialised it.

        Called when the interpreter exits. A thread of Gloo that still holds the tensors of the last operation, or
        one that waits for a message, would otherwise go on during Python's shutdown, which ends the process with
        SIGABRT or SIGSEGV. If an operation is unfinished, as after an exception, only messages end, since the
        destruction of a group might wait for another rank.
        """
        groups = self._threads.close()
        if self._unfinished:
            return
        groups += self._lanes.close()
        if self._owns_default_group and dist.is_initialized():
            groups.append(dist.group.WORLD)
        destroy(groups)

    def _start(self, name: str, request: Request, lane: str) -> tuple[list[Any], Reply]:
        """Start a request. Return its operations and its output."""
        if isinstance(request, Exchange):
            return self._start_exchange(name, request)
        group, members = self._lanes.group(lane, request.group), self.members(request.group)
        tensor, output = request.tensor, cast(Reply, request.tensor)
        match request:
            case AllReduce(_, op):
                work = dist.all_reduce(tensor, _OPS[op], group, async_op=True)
            case AllGather():
                output = tensor.new_empty(len(members) * tensor.numel())
                work = _all_gather(output, tensor, group, async_op=True)
                output = tuple(output.view(len(members), tensor.numel()))
            case ReduceScatter(_, op):
                output = tensor.new_empty(tensor.numel() // len(members))
                work = _reduce_scatter(output, tensor, _OPS[op], group, async_op=True)
            case Broadcast(_, root):
                work = dist.broadcast(tensor, members[root], group, async_op=True)
            case AllToAll(_, splits):
                received = tensor.new_empty(sum(request.expected))
                counts = list(request.expected), list(splits)
                work = dist.all_to_all_single(received, tensor, *counts, group, async_op=True)
                output = received.split(counts[0])
        return [work], output

    def _start_exchange(self, name: str, request: Exchange) -> tuple[list[Any], Reply]:
        members = self.members(request.group)
        sends = {members[to]: as_bytes(tensor) for to, tensor in request.sends.items()}
        receives = {members[source]: as_bytes(tensor) for source, tensor in request.receives.items()}
        if self.rank in receives:  # Gloo has no connection of a rank to itself
            receives.pop(self.rank).copy_(sends.pop(self.rank))
        return self._neighbors.start(self._tags.of(name), sends, receives), request.receives


_open: list[TorchTransport] = []  # the process groups of a transport exist until they are destroyed


@atexit.register
def _close_all() -> None:
    while _open:
        _open.pop().close()


def _uses_stream(request: Request) -> bool:
    """Whether `wait` makes only the current stream wait, not the host."""
    return not isinstance(request, Exchange) and request.tensor.is_cuda


def _is_complete(work: Any) -> bool:
    if isinstance(work, Future):
        return work.done()
    return bool(work.is_completed())
