"""Copies from a GPU to pinned host memory: of numbers that an algorithm reads, and of all messages over a
transport that needs host memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dgc.comm.channel import Channel, open_channel
from dgc.comm.requests import Exchange, Reply, Request
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

    def poll(self, flight: Any = None) -> bool:
        return self._event is None or self._event.query()

    def wait(self, flight: Any = None) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._host.tolist()
        return numbers


def pinned_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, complete after the work that is queued on the tensor's device."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


@dataclass(eq=False)
class StagedFlight:
    """Launched requests, with tensors in host memory."""

    name: str
    requests: tuple[Request, ...]
    lane: str
    ready: Any  # torch.cuda.Event after the copies to the host; None if there were none
    device: torch.device | None  # of the replies, if they are copied
    inner: Any = None  # flight of the inner transport, when the copies are complete


class StagedTransport(WrappingTransport):
    """A transport that sends GPU tensors through host memory over another one. CPU tensors are not copied.

    A message is launched on the other transport when its copy is complete, in the order of its lane. `wait` first
    launches all pending messages. Replies are copied back to the GPU when they arrive.
    """

    _make_event: Callable[[], Any] = torch.cuda.Event

    def __init__(self, inner: Transport):
        super().__init__(inner)
        self._pending: list[StagedFlight] = []  # not launched on the inner transport yet

    @staticmethod
    def _needs_copy(tensor: Tensor) -> bool:
        return tensor.is_cuda

    def channel(self) -> Channel:
        """Open a channel of the inner transport, for tensors in host memory."""
        return open_channel(self.inner)

    def launch(self, name: str, requests: Sequence[Request], lane: str = "") -> StagedFlight:
        tensors = [tensor for request in requests for tensor in _tensors(request)]
        device = next((tensor.device for tensor in tensors if self._needs_copy(tensor)), None)
        ready = None
        if device is not None:
            requests = [_map_tensors(request, pinned_copy) for request in requests]
            ready = self._make_event()
            ready.record()
        flight = StagedFlight(name, tuple(requests), lane, ready, device)
        self._pending.append(flight)
        self._launch_ready()
        return flight

    def poll(self, flight: StagedFlight) -> bool:
        self._launch_ready()
        return flight.inner is not None and self.inner.poll(flight.inner)

    def wait(self, flight: StagedFlight) -> tuple[Reply, ...]:
        # launch everything pending: two ranks could each wait for a message that is pending on the other
        for other in self._pending:
            if other.ready is not None:
                other.ready.synchronize()
        self._launch_ready()
        replies = self.inner.wait(flight.inner)
        return replies if flight.device is None else tuple(_to_device(reply, flight.device) for reply in replies)

    def _launch_ready(self) -> None:
        waiting: list[StagedFlight] = []
        for flight in self._pending:
            is_behind = any(flight.lane == other.lane for other in waiting)
            if is_behind or not (flight.ready is None or flight.ready.query()):
                waiting.append(flight)
            else:
                flight.inner = self.inner.launch(flight.name, flight.requests, flight.lane)
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
    return replace(request, tensor=change(request.tensor))


def _to_device(reply: Reply, device: torch.device) -> Reply:
    if isinstance(reply, Tensor):
        return reply.to(device, non_blocking=True)
    if isinstance(reply, dict):
        return {source: _to_device(part, device) for source, part in reply.items()}
    return tuple(_to_device(part, device) for part in reply)
