"""The transport and the model of a gossip algorithm in which each rank of a machine holds a slice of the model."""

from collections.abc import Sequence
from typing import Any

from dgc.bucket import Segment
from dgc.comm.requests import Group, Reply, Request, between_machines
from dgc.comm.transport import Transport
from dgc.gossip.model import FlatModel


class CrossMachineTransport:
    """A transport between the ranks of one local rank, one on each machine. They are its world.

    Args:
        inner (Transport): transport between all ranks, with the group `cross`.
    """

    local_rank, local_size = 0, 1

    def __init__(self, inner: Transport):
        self._inner = inner
        self.rank, self.size = inner.group_rank("cross"), inner.group_size("cross")

    def group_size(self, group: Group) -> int:
        return self.size

    def group_rank(self, group: Group) -> int:
        return self.rank

    def open_lane(self, lane: str) -> None:
        self._inner.open_lane(lane)

    def launch(self, name: str, requests: Sequence[Request], lane: str = "") -> Any:
        return self._inner.launch(name, [between_machines(request) for request in requests], lane)

    def poll(self, flight: Any) -> bool:
        return self._inner.poll(flight)

    def wait(self, flight: Any) -> tuple[Reply, ...]:
        return self._inner.wait(flight)


class ModelSlice(FlatModel):
    """Elements start .. end - 1 of a model. The segments of its tensors are one-dimensional.

    Args:
        model (FlatModel): the whole model.
        start (int): first element.
        end (int): element after the last one.
    """

    def __init__(self, model: FlatModel, start: int, end: int):
        self._model, self.parameters, self.z = model, model.parameters, model.z[start:end]
        self.segments = tuple(
            Segment(s.name, max(s.offset, start) - start, length, (length,), (1,))
            for s in model.segments
            if (length := min(s.offset + s.numel, end) - max(s.offset, start)) > 0
        )

    def gather(self) -> None:
        self._model.gather()

    def scatter(self) -> None:
        self._model.scatter()
