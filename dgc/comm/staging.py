"""Copies from a GPU to pinned host memory: of numbers that an algorithm reads, and of all messages over a
transport that needs host memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dgc.comm.channel import Channel, open_channel
from dgc.comm.requests import AllGather, AllToAll, Exchange, Reply, Request
from dgc.comm.transport import Transport, WrappingTransport


class HostCopy:
    """A copy of numbers [n] to the host, after the work queued on their device. It is awaited like a transport."""

    def __init__(self, numbers: Tensor):
        self._event: torch.cuda.Event | None = None
        self._host = numbers
        if numbers.is_cuda:
            self._host = pinned_copy(numbers)
            self._event = torch.cuda.Event()
            self._event.record()

    def poll(self, work: Any = None) -> bool:
        return self._event is None or self._event.query()

    def wait(self, work: Any = None) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._host.tolist()
        return numbers


def pinned_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, complete after the work that is queued on the tensor's device."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


@dataclass(eq=False)
class StagedWork:
    """Launched requests, with tensors in host memory."""

    name: str
    requests: tuple[Request, ...]
    communicator: str
    ready: Any  # torch.cuda.Event after the copies to the host; None if there were none
    device: torch.device | None  # of the replies, if they are copied
    inner: Any = None  # work of the inner transport, when the copies are complete


class StagedTransport(WrappingTransport):
    """A transport that sends GPU tensors through host memory over another one. CPU tensors are not copied.

    A message is launched on the other transport when its copy is complete, in the order of its communicator.
    `wait` first launches all pending messages. Replies are copied back to the GPU when they arrive.
    """

    _make_event: Callable[[], Any] = torch.cuda.Event

    def __init__(self, inner: Transport):
        super().__init__(inner)
        self._pending: list[StagedWork] = []  # not launched on the inner transport yet

    @staticmethod
    def _needs_copy(tensor: Tensor) -> bool:
        return tensor.is_cuda

    def channel(self) -> Channel:
        """Open a channel of the inner transport, for tensors in host memory."""
        return open_channel(self.inner)

    def launch(self, name: str, requests: Sequence[Request], communicator: str = "") -> StagedWork:
        tensors = [tensor for request in requests for tensor in _tensors(request)]
        device = next((tensor.device for tensor in tensors if self._needs_copy(tensor)), None)
        ready = None
        if device is not None:
            requests = [_map_tensors(request, pinned_copy) for request in requests]
            ready = self._make_event()
            ready.record()
        work = StagedWork(name, tuple(requests), communicator, ready, device)
        self._pending.append(work)
        self._launch_ready()
        return work

    def poll(self, work: StagedWork) -> bool:
        self._launch_ready()
        return work.inner is not None and self.inner.poll(work.inner)

    def wait(self, work: StagedWork) -> tuple[Reply, ...]:
        # launch everything pending: two ranks could each wait for a message that is pending on the other
        for other in self._pending:
            if other.ready is not None:
                other.ready.synchronize()
        self._launch_ready()
        replies = self.inner.wait(work.inner)
        return replies if work.device is None else tuple(_to_device(reply, work.device) for reply in replies)

    def _launch_ready(self) -> None:
        waiting: list[StagedWork] = []
        for work in self._pending:
            is_behind = any(work.communicator == other.communicator for other in waiting)
            if is_behind or not (work.ready is None or work.ready.query()):
                waiting.append(work)
            else:
                work.inner = self.inner.launch(work.name, work.requests, work.communicator)
        self._pending = waiting


def _tensors(request: Request) -> list[Tensor]:
    if isinstance(request, Exchange):
        return [*request.sends.values(), *request.receives.values()]
    return [request.tensor]


def _map_tensors(request: Request, change: Callable[[Tensor], Tensor]) -> Request:
    if isinstance(request, Exchange):
        sends = {to: change(tensor) for to, tensor in request.sends.items()}
        receives = {
            source: torch.empty(into.shape, dtype=into.dtype, pin_memory=into.is_cuda)
            for source, into in request.receives.items()
        }
        return replace(request, sends=sends, receives=receives)
    if isinstance(request, AllGather | AllToAll):
        return replace(request, tensor=change(request.tensor), into=None)  # it is on the GPU
    return replace(request, tensor=change(request.tensor))


def _to_device(reply: Reply, device: torch.device) -> Reply:
    if isinstance(reply, Tensor):
        return reply.to(device, non_blocking=True)
    if isinstance(reply, dict):
        return {source: _to_device(part, device) for source, part in reply.items()}
    return tuple(_to_device(part, device) for part in reply)
