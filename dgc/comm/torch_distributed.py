"""A transport over torch.distributed: Gloo for tensors in host memory, NCCL for tensors of NVIDIA GPUs.

torch.distributed matches the collectives of a process group by the order in which they are issued. A communicator
has process groups of its own (see dgc.comm.transport). The groups of a transport are separate from the groups of
the user, such as the default group that DDP uses.

With NCCL a reply may be used as soon as the collective is issued: the current stream waits for it, the host does
not. `poll` therefore returns True at once, and all rounds follow the order of the program.

A Gloo message is known to be complete only when a call that waits for it returns. Threads wait (`WaitingThreads`),
so that other threads can ask whether a message is complete.

An all-gather or all-to-all over Gloo is one message from each rank to each other one (`exchange_parts`). All use
the connections of the default communicator, where data is sent in the order of the requests. On connections of
their own, the means of the first buckets would share a link with the gradients of later ones and delay these.
"""

import atexit
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import assert_never

from dgc.comm.channel import Channel, MessageTags
from dgc.comm.presence import Address, Presence, explain
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
    reply_of_one,
)
from dgc.comm.staging import StagedTransport
from dgc.comm.transport import GroupedTransport, Groups, Transport
from dgc.launch import check_restarts

_OPS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
# The names before torch 2.13 are deprecated there.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "_allgather_base"  # of a group
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
DEFAULT_TIMEOUT = 1800.0  # seconds: the default of torch.distributed
MAX_TAG = 2**31 - 1
FOREVER = timedelta(days=365)  # an asynchronous rank may wait as long as it likes
SEND_TIME = 10.0  # seconds
END_TIME = 5.0  # seconds
NO_GROUP = "group {kind!r} does not exist: use TorchTransport(hierarchical=True)"


def connect(
    hierarchical: bool | str = False,
    timeout: float | None = None,
    *,
    point_to_point: bool = False,
    groups: Groups | None = None,
) -> Transport:
    """Return a TorchTransport. GPU tensors go through pinned host memory if there is no NCCL, or for gossip.

    Args:
        hierarchical, timeout, groups: As in TorchTransport.
        point_to_point: The transport must carry messages between two ranks. NCCL's messages can deadlock beside
            its collectives, so all messages use Gloo.

    Raises:
        LaunchError: As `check_restarts`.
    """
    check_restarts(os.environ)
    on_gpu = torch.cuda.is_available()
    uses_nccl = on_gpu and dist.is_nccl_available() and not point_to_point
    transport = TorchTransport(hierarchical, timeout, "cpu:gloo,cuda:nccl" if uses_nccl else "gloo", groups)
    return StagedTransport(transport) if on_gpu and not uses_nccl else transport


@dataclass(eq=False)
class TorchWork:
    """Launched requests, the operations of each, and its output (the reply, before it is complete)."""

    requests: tuple[Request, ...]
    operations: tuple[list[Any], ...]  # torch.distributed.Work, or Future of a message
    outputs: tuple[Reply, ...]


class TorchTransport(GroupedTransport):
    """A transport over torch.distributed. It initialises the default process group unless that has been done.

    Args:
        hierarchical: As in `dgc.comm.connect.connect`.
        timeout: Seconds after which an operation that some ranks never joined fails. None: 1800.
        backend: Backend of the process groups: "gloo" or "cpu:gloo,cuda:nccl".
        groups: The groups `local` and `cross`, such as those of a mesh, alike on all ranks. None: by machine.

    Raises:
        ValueError: torch.distributed cannot be initialised from the environment variables of the launcher.
    """

    def __init__(
        self,
        hierarchical: bool | str = False,
        timeout: float | None = None,
        backend: str = "gloo",
        groups: Groups | None = None,
    ):
        self.timeout = timeout
        duration = timedelta(seconds=DEFAULT_TIMEOUT if timeout is None else timeout)
        self._owns_default_group = not dist.is_initialized()
        if self._owns_default_group:
            if "RANK" in os.environ:
                dist.init_process_group(backend, timeout=duration)
            else:  # a single process, without a launcher
                dist.init_process_group(backend, timeout=duration, rank=0, world_size=1, store=dist.HashStore())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.point_to_point = "nccl" not in backend  # an Exchange uses Gloo
        self._presence = Presence(os.environ.get("MASTER_ADDR", ""))
        by_machine, self._addresses = find_groups(self._presence.address)
        self._place = by_machine if groups is None else groups
        machine = self._place.members["local"]
        self.local_rank, self.local_size = machine.index(self.rank), len(machine)
        if hierarchical == "auto":
            hierarchical = len(self._place.partition["local"]) > 1 and len(self._place.partition["cross"]) > 1
        kinds: tuple[Group, ...] = ("world", "local", "cross") if hierarchical else ("world",)
        self._kinds, self._backend, self._timeout = kinds, backend, duration
        self._communicators: dict[tuple[str, Group], Any] = {}  # process groups
        self.open_communicator("")
        self._threads = WaitingThreads()
        self._neighbors = GlooChannel(self._threads)
        self._tags = MessageTags(MAX_TAG)
        self._unfinished: set[TorchWork] = set()
        _open.append(self)

    def members(self, group: Group) -> list[int]:
        return self._place.members[group]

    def channel(self) -> Channel:
        """Open a channel over Gloo. Collective."""
        return GlooChannel(self._threads)

    def open_communicator(self, communicator: str, kinds: Sequence[Group] | None = None) -> None:
        """Create its process groups, at the same point of the program on every rank. Collective."""
        kinds = self._kinds if kinds is None else kinds
        if missing := set(kinds) - set(self._kinds):
            raise ValueError(NO_GROUP.format(kind=missing.pop()))
        opened = [(kind, self._communicators.get(("", kind))) for kind in kinds]
        if self.size == 1 and all(group is not None for _, group in opened):
            # one rank waits for none, so that its collectives need no order; each group has threads
            self._communicators.update({(communicator, kind): group for kind, group in opened})
            return
        own: dict[tuple[int, ...], Any] = {}  # two kinds with the same ranks share a group
        for kind in kinds:
            for ranks in self._place.partition[kind]:
                if tuple(ranks) not in own:
                    own[tuple(ranks)] = dist.new_group(ranks, self._timeout, self._backend)
            self._communicators[communicator, kind] = own[tuple(self._place.members[kind])]

    def launch(self, name: str, requests: Sequence[Request], communicator: str = "") -> TorchWork:
        started = [self._start(f"{name}.{i}", request, communicator) for i, request in enumerate(requests)]
        operations, outputs = zip(*started, strict=True) if started else ((), ())
        work = TorchWork(tuple(requests), operations, outputs)
        self._unfinished.add(work)
        return work

    def poll(self, work: TorchWork) -> bool:
        for request, operations in zip(work.requests, work.operations, strict=True):
            if not isinstance(request, Exchange) and request.tensor.is_cuda:
                continue  # `wait` makes only the current stream wait, not the host
            for operation in operations:
                if not (operation.done() if isinstance(operation, Future) else operation.is_completed()):
                    return False
        return True

    def wait(self, work: TorchWork) -> tuple[Reply, ...]:
        replies = []
        for request, operations, output in zip(work.requests, work.operations, work.outputs, strict=True):
            for i, operation in enumerate(operations):
                try:
                    operation.result() if isinstance(operation, Future) else operation.wait()
                except RuntimeError as error:
                    reason = explain(self._partners(request, i), self._addresses)
                    raise type(error)(f"{reason}. The network's own message: {error}") from error
            if isinstance(request, (AllReduce, ReduceScatter)) and request.op == "mean":
                size = self.group_size(request.group)
                output = output.div_(size) if size > 1 else output
            replies.append(output)
        self._unfinished.discard(work)
        return tuple(replies)

    def _partners(self, request: Request, i: int) -> list[int]:
        """The ranks that operation number i of a request waits for."""
        members = self.members(request.group)
        if isinstance(request, Exchange):
            return [[members[source] for source in request.receives if members[source] != self.rank][i]]
        return [rank for rank in members if rank != self.rank]

    def close(self) -> None:
        """Destroy the process groups of the communicators, and the default group if this transport initialised it.

        Called when the interpreter exits. A thread of Gloo that still holds the tensors of the last operation, or
        one that waits for a message, would otherwise go on during Python's shutdown, which ends the process with
        SIGABRT or SIGSEGV. If an operation is unfinished, as after an exception, only messages end, since the
        destruction of a group might wait for another rank.
        """
        self._presence.close()
        groups = self._threads.close()
        if self._unfinished:
            return
        groups += self._communicators.values()
        self._communicators.clear()
        if self._owns_default_group and dist.is_initialized():
            groups.append(dist.group.WORLD)
        destroy(groups)

    def _start(self, name: str, request: Request, communicator: str) -> tuple[list[Any], Reply]:
        """Start a request. Return its operations and its output."""
        if isinstance(request, Exchange):
            return self._start_exchange(name, request)
        if request.group not in self._kinds:
            raise ValueError(NO_GROUP.format(kind=request.group))
        group, members = self._communicators[communicator, request.group], self.members(request.group)
        if len(members) == 1:
            return [], reply_of_one(request)
        tensor = request.tensor
        output: Reply = tensor
        match request:
            case AllReduce(_, op):
                work = group.allreduce([tensor], _OPS[op])  # not dist.all_reduce, which takes twice the time
            case AllGather():
                gathered = (
                    tensor.new_empty(len(members) * tensor.numel()) if request.into is None else request.into
                )
                output = gathered.view(len(members), tensor.numel()).unbind()
                if tensor.is_cuda:
                    work = getattr(group, _ALL_GATHER)(gathered, tensor)
                else:
                    work = self._exchange_parts(name, output, [tensor] * len(members), request.group)
            case ReduceScatter(_, op):
                output = tensor.new_empty(tensor.numel() // len(members))
                work = _reduce_scatter(output, tensor, _OPS[op], group, async_op=True)
            case Broadcast(_, root):
                work = dist.broadcast(tensor, members[root], group, async_op=True)
            case AllToAll(_, splits):
                received = tensor.new_empty(sum(request.expected)) if request.into is None else request.into
                output = received.split(request.expected)
                if tensor.is_cuda:
                    counts = list(request.expected), list(splits)
                    work = dist.all_to_all_single(received, tensor, *counts, group, async_op=True)
                else:
                    work = self._exchange_parts(name, output, tensor.split(splits), request.group)
            case _:
                assert_never(request)
        return [work], output

    def _exchange_parts(
        self, name: str, arrived: Sequence[Tensor], parts: Sequence[Tensor], kind: Group
    ) -> Future[None]:
        group = self._communicators["", kind]
        messages = exchange_parts(arrived, parts, group, self._tags.of(name))
        return self._threads.wait_for(Together(messages), group=group)

    def _start_exchange(self, name: str, request: Exchange) -> tuple[list[Any], Reply]:
        """Messages are matched by name (the tag) and, under one name, in the order of sending."""
        members, tag = self.members(request.group), self._tags.of(name)
        sends = {members[to]: as_bytes(tensor) for to, tensor in request.sends.items()}
        receives = {members[source]: as_bytes(tensor) for source, tensor in request.receives.items()}
        if self.rank in receives:  # Gloo has no connection of a rank to itself
            receives.pop(self.rank).copy_(sends.pop(self.rank))
        works = [self._neighbors.irecv(buffer, tag, source) for source, buffer in receives.items()]
        for to, message in sends.items():
            self._neighbors.isend(to, message, tag)
        return works, request.receives


_open: list[TorchTransport] = []  # the process groups of a transport exist until they are destroyed


def close(transport: Transport) -> None:
    """End a transport that `connect` returned, with its process groups. All ranks must have ended its use."""
    inner = transport.inner if isinstance(transport, StagedTransport) else transport
    assert isinstance(inner, TorchTransport)
    inner.close()
    _open.remove(inner)


@atexit.register
def _close_all() -> None:
    while _open:
        _open.pop().close()


def find_groups(address: Address | None) -> tuple[Groups, list[Address | None]]:
    """Return the groups and the addresses of all ranks. Collective.

    A machine is a host, or one agent of torchrun on a host. The local rank counts within the machine.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, ((socket.gethostname(), os.environ.get("GROUP_RANK", "")), address))
    machines, addresses = zip(*found, strict=True)
    names = dict.fromkeys(machines)
    groups = [[r for r, other in enumerate(machines) if other == name] for name in names]
    return Groups(dist.get_rank(), groups), list(addresses)


def exchange_parts(arrived: Sequence[Tensor], parts: Sequence[Tensor], group: Any, tag: int) -> list[Any]:
    """Send part r to rank r of a group over Gloo, and receive `arrived[r]` from it. Messages match by their tag.

    The messages that are returned must be waited for, sends too: Gloo sends from the memory of `parts`.

    Gloo's all-to-all takes 1.5 times as long on a slow link. A receiver tells each sender that it is ready. There
    these small messages wait behind the data of its own sends. Here they go before all data.
    """
    own, ranks = group.rank(), len(parts)
    arrived[own].copy_(parts[own])
    others = [(own + i) % ranks for i in range(1, ranks)]  # at one time, the ranks send to different ones
    messages = [group.recv([arrived[r]], r, tag) for r in reversed(others) if arrived[r].numel()]
    return messages + [group.send([parts[r]], r, tag) for r in others if parts[r].numel()]


def close_connections(group: Any) -> None:
    """Let all messages of a process group over Gloo fail: it closes the connections when one of them times out."""
    if group.size() > 1:
        with suppress(RuntimeError):
            receive = group.recv([torch.empty(1, dtype=torch.uint8)], (group.rank() + 1) % group.size(), 0)
            receive.wait(timedelta(milliseconds=1))


def destroy(groups: list[Any]) -> None:
    """Destroy process groups that the program has not destroyed itself, and empty the list.

    The threads of a group end with the last reference to it, and may take 0.1 s: all references end at one time.
    """
    threads = []
    while groups:
        reference = [groups.pop(0)]
        if dist.is_initialized():
            with suppress(ValueError):  # it does not exist any more
                dist.destroy_process_group(reference[0])
        threads.append(Thread(target=reference.clear))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Together:
    """Messages that one thread waits for."""

    def __init__(self, messages: Sequence[Any]) -> None:
        self._messages = messages

    def wait(self) -> None:
        for message in self._messages:
            message.wait()


class WaitingThreads:
    """Threads that wait for messages. There are as many as there were messages at one time.

    When Python shuts down, a thread that returns from Gloo, or releases an object of it, ends the process with
    SIGABRT. `close` therefore ends the threads before.
    """

    def __init__(self) -> None:
        self.channels: list[GlooChannel] = []
        self._queue: SimpleQueue[tuple[Any, Future[None]] | None] = SimpleQueue()
        self._idle = Semaphore(0)
        self._threads: list[Thread] = []
        self.sends: set[Future[None]] = set()
        self.from_any: set[Future[None]] = set()
        self._groups: dict[Future[None], Any] = {}  # of messages outside of channels

    def wait_for(self, work: Any, kind: set[Future[None]] | None = None, group: Any = None) -> Future[None]:
        """Wait for a message in another thread. The future has its exception if it failed.

        Args:
            work: The send or receive.
            kind: `sends`, or `from_any` for a receive from any rank.
            group: The process group, unless it belongs to a channel.
        """
        future: Future[None] = Future()
        if kind is not None:
            kind.add(future)
            future.add_done_callback(kind.discard)
        if group is not None:
            self._groups[future] = group
            future.add_done_callback(self._groups.pop)
        self._queue.put((work, future))
        if not self._idle.acquire(blocking=False):
            # a daemon: otherwise Python would wait for it before `close` is called
            self._threads.append(Thread(target=self._run, name="dgc-messages", daemon=True))
            self._threads[-1].start()
        return future

    def close(self) -> list[Any]:
        """Wait until all messages are sent, end the threads, and return the process groups, for `destroy`.

        It waits for sends at most `SEND_TIME`: another rank may have stopped. Receives that are left fail. Only a
        receive from any rank does not: its thread stays inside Gloo, where no message can arrive any more.
        """
        wait(list(self.sends), SEND_TIME)
        groups = [channel.close() for channel in self.channels]
        self.channels.clear()
        for group in set(self._groups.copy().values()):
            close_connections(group)
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + END_TIME
        while sum(thread.is_alive() for thread in self._threads) > len(self.from_any) and time.monotonic() < end:
            time.sleep(0.001)
        return groups

    def _run(self) -> None:
        while (waiting := self._queue.get()) is not None:
            work, future = waiting
            try:
                work.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del work, future, waiting  # the thread must not keep the message's memory
            self._idle.release()


class GlooChannel:
    """A `Channel` over a process group of its own. Construction is collective."""

    def __init__(self, threads: WaitingThreads) -> None:
        self._group: Any = dist.new_group(timeout=FOREVER, backend="gloo")
        self._threads = threads
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        threads.channels.append(self)

    def close(self) -> Any:
        """Close the connections, and return the process group."""
        group, self._group = self._group, None
        close_connections(group)
        return group

    def isend(self, to: int, message: Tensor, tag: int) -> Future[None]:
        return self._threads.wait_for(dist.isend(message, to, self._group, tag), self._threads.sends)

    def irecv(self, buffer: Tensor, tag: int, source: int | None = None) -> Future[None]:
        """source: the only rank whose message is received. None: any rank."""
        kind = self._threads.from_any if source is None else None
        return self._threads.wait_for(dist.irecv(buffer, source, self._group, tag), kind)

    def test(self, handle: Future[None]) -> bool:
        if handle.done():
            handle.result()  # raises the exception of a message that failed
        return handle.done()
