"""The world and the model that a gossip algorithm uses if each rank of a machine holds a slice of the model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dgc.bucket import Segment
from dgc.comm.requests import Group, Reply, Request
from dgc.comm.transport import Transport
from dgc.gossip.model import FlatModel


class Cross:
    """A transport between the ranks with this local rank, one on each machine."""

    local_rank, local_size = 0, 1

    def __init__(self, inner: Transport):
        self._inner = inner
        self.rank, self.size = inner.group_rank("cross"), inner.group_size("cross")

    def group_size(self, group: Group) -> int:
        return self.size

    def group_rank(self, group: Group) -> int:
        return self.rank

    def launch(self, name: str, requests: Sequence[Request]) -> Any:
        assert all(request.group == "world" for request in requests), "gossip talks to its world"
        return self._inner.launch(name, [replace(request, group="cross") for request in requests])

    def poll(self, flight: Any) -> bool:
        return self._inner.poll(flight)

    def wait(self, flight: Any) -> tuple[Reply, ...]:
        return self._inner.wait(flight)


class Slice(FlatModel):
    """Elements first .. end - 1 of a model. Tensors in it are one-dimensional."""

    def __init__(self, whole: FlatModel, first: int, end: int):
        self._whole, self.parameters, self.z = whole, whole.parameters, whole.z[first:end]
        self.segments = tuple(
            Segment(s.name, max(s.offset, first) - first, length, (length,), (1,))
            for s in whole.segments
            if (length := min(s.offset + s.numel, end) - max(s.offset, first)) > 0
        )

    def gather(self) -> None:
        self._whole.gather()

    def scatter(self) -> None:
        self._whole.scatter()
