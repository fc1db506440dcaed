"""GPU tensors over a transport that needs host memory, through pinned buffers.

A message is copied to the host after the work that is already queued on the GPU. The transport gets the message
once the copy is done. `poll` checks for this without waiting; `wait` passes on all launched messages. Replies are
copied back to the GPU when they arrive.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dgc.comm.channel import Channel, channel_of
from dgc.comm.requests import Exchange, Group, Reply, Request
from dgc.comm.transport import Transport


@runtime_checkable
class Event(Protocol):
    """The methods of torch.cuda.Event that are used."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


@dataclass(eq=False)
class StagedFlight:
    """Launched requests.

    Attributes:
        requests: The requests with tensors in host memory.
        ready: Event after the copies to the host; None if there were none.
        device: Device of the replies.
        inner: The carrier's flight. None until the copies are done.
    """

    name: str
    requests: tuple[Request, ...]
    ready: Event | None
    device: torch.device
    inner: Any = None


class Staged:
    """A transport that sends GPU tensors through host memory over another transport. CPU tensors are not copied.

    Args:
        carrier: Transport for tensors in host memory.
        is_remote: Whether a tensor must be copied to the host. For tests without a GPU.
        make_event: Creates an event. For tests without a GPU.
    """

    def __init__(
        self,
        carrier: Transport,
        is_remote: Callable[[Tensor], bool] = lambda tensor: tensor.is_cuda,
        make_event: Callable[[], Event] = torch.cuda.Event,
    ):
        self._carrier, self._is_remote, self._make_event = carrier, is_remote, make_event
        self._held: list[StagedFlight] = []  # launched and not yet passed to the carrier
        self.rank, self.size = carrier.rank, carrier.size
        self.local_rank, self.local_size = carrier.local_rank, carrier.local_size

    def group_size(self, group: Group) -> int:
        return self._carrier.group_size(group)

    def group_rank(self, group: Group) -> int:
        return self._carrier.group_rank(group)

    def channel(self) -> Channel:
        """Open a channel of the carrier, for tensors in host memory."""
        return channel_of(self._carrier)

    def launch(self, name: str, requests: Sequence[Request]) -> StagedFlight:
        tensors = [tensor for request in requests for tensor in _tensors(request)]
        device = next((tensor.device for tensor in tensors if self._is_remote(tensor)), None)
        if device is None:
            flight = StagedFlight(name, tuple(requests), None, torch.device("cpu"))
        else:
            copies = tuple(_mapped(request, self._to_host) for request in requests)
            ready = self._make_event()
            ready.record()
            flight = StagedFlight(name, copies, ready, device)
        self._held.append(flight)
        self._depart(flight)
        return flight

    def poll(self, flight: StagedFlight) -> bool:
        return self._depart(flight) and self._carrier.poll(flight.inner)

    def wait(self, flight: StagedFlight) -> tuple[Reply, ...]:
        # pass on everything launched; otherwise two ranks could each wait for a message that the other holds back
        for other in list(self._held):
            if other.ready is not None:
                other.ready.synchronize()
            self._depart(other)
        replies = self._carrier.wait(flight.inner)
        return replies if flight.ready is None else tuple(_sent_to(reply, flight.device) for reply in replies)

    def _depart(self, flight: StagedFlight) -> bool:
        """Pass the messages to the carrier if they are in host memory. Returns whether that has happened."""
        if flight.inner is None and (flight.ready is None or flight.ready.query()):
            flight.inner = self._carrier.launch(flight.name, flight.requests)
            self._held.remove(flight)
        return flight.inner is not None

    @staticmethod
    def _to_host(tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return host.copy_(tensor, non_blocking=True)


def _tensors(request: Request) -> list[Tensor]:
    if isinstance(request, Exchange):
        return [*request.sends.values(), *request.receives.values()]
    return [request.tensor]


def _mapped(request: Request, change: Callable[[Tensor], Tensor]) -> Request:
    if isinstance(request, Exchange):
        sends = {to: change(tensor) for to, tensor in request.sends.items()}
        receives = {
            source: torch.empty(into.shape, dtype=into.dtype, pin_memory=into.is_cuda)
            for source, into in request.receives.items()
        }
        return replace(request, sends=sends, receives=receives)
    return replace(request, tensor=change(request.tensor))


def _sent_to(reply: Reply, device: torch.device) -> Reply:
    if isinstance(reply, Tensor):
        return reply.to(device, non_blocking=True)
    if isinstance(reply, dict):
        return {source: _sent_to(part, device) for source, part in reply.items()}
    return tuple(_sent_to(part, device) for part in reply)
