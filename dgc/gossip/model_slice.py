"""The model of a gossip algorithm in which each rank of a machine holds a slice of the model."""

from dgc.bucket import Segment
from dgc.gossip.model import FlatModel


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
