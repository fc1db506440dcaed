"""Messages of GPU tensors over a transport that needs host memory, by way of pinned buffers.

A message is copied to the host behind what the GPU has queued; the transport gets it once the copy is done,
which `poll` finds out without waiting; whoever waits hands over all that was launched. Replies go back to the GPU
as they come.
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
    """The parts of torch.cuda.Event that are used."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


@dataclass(eq=False)
class StagedFlight:
    """inner: the carrier's flight, from when the copies in `requests` are `ready`. device: where replies go."""

    name: str
    requests: tuple[Request, ...]
    ready: Event | None
    device: torch.device
    inner: Any = None


class Staged:
    """A transport that carries GPU tensors through the host memory of another one, and CPU tensors as they are.

    is_remote and make_event are for tests without a GPU.
    """

    def __init__(
        self,
        carrier: Transport,
        is_remote: Callable[[Tensor], bool] = lambda tensor: tensor.is_cuda,
        make_event: Callable[[], Event] = torch.cuda.Event,
    ):
        self._carrier, self._is_remote, self._make_event = carrier, is_remote, make_event
        self._held: list[StagedFlight] = []  # launched and not yet handed over
        self.rank, self.size = carrier.rank, carrier.size
        self.local_rank, self.local_size = carrier.local_rank, carrier.local_size

    def group_size(self, group: Group) -> int:
        return self._carrier.group_size(group)

    def group_rank(self, group: Group) -> int:
        return self._carrier.group_rank(group)

    def channel(self) -> Channel:
        """In host memory, as the carrier's."""
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
        # all that was launched, or two ranks could wait for what the other still holds back
        for other in list(self._held):
            if other.ready is not None:
                other.ready.synchronize()
            self._depart(other)
        replies = self._carrier.wait(flight.inner)
        return replies if flight.ready is None else tuple(_sent_to(reply, flight.device) for reply in replies)

    def _depart(self, flight: StagedFlight) -> bool:
        """Hand the messages over as soon as they lie in host memory; whether that has happened."""
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
