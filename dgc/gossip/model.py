"""The model of a rank as one flat vector, for gossip to send and average."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float32
from torch import Tensor

from dgc.core.arguments import checked
from dgc.core.bucket import Segment, lay_out, local_part


def of_own_storage(view: Tensor) -> Tensor:
    """The memory of a view as a tensor whose storage is this part alone.

    torch.save and deepcopy take the whole storage of a tensor. The memory lives as long as one of its tensors.
    """
    # DLPack gives dimensions of size 1 another stride
    return torch.from_dlpack(view).as_strided(view.shape, view.stride())


@checked
class FlatModel:
    """A model as one flat vector z [n] fp32: all parameters that are not empty, and then their momenta.

    fp32 parameters share the memory of z, others are rounded copies. Of what FSDP2 has sharded, z has a copy of
    this rank's part. Call `scatter` after a change of z, and `gather` after a change of the parameters.

    Args:
        named_parameters (sequence): (name, parameter) pairs.
        momenta (sequence): (name, tensor) pairs of the optimizer's momenta that are exchanged with the parameters.

    Attributes:
        parameters: Those that are not empty.
        segments: The place of each tensor in z. `pairs` has the places of the parameters.
        numel: Elements of the parameters, the first of z.
        momenta: Names of the momenta.

    Raises:
        ValueError: if there are no parameters, they are on several devices, or a dtype is not floating-point.

    Example:
        >>> FlatModel(list(torch.nn.Linear(3, 2).named_parameters())).z.shape
        torch.Size([8])
    """

    def __init__(self, named_parameters: Sequence[tuple[str, Tensor]], momenta: Sequence[tuple[str, Tensor]] = ()):
        with torch.no_grad():
            parts = [
                (name, p, part) for name, p in (*named_parameters, *momenta) if (part := local_part(p)).numel()
            ]
        self.momenta = frozenset(name for name, _ in momenta)
        self.parameters = [p for name, p, _ in parts if name not in self.momenta]
        if not self.parameters:
            raise ValueError("gossip needs at least one parameter that requires a gradient and has elements")
        devices = sorted({str(p.device) for _, p in named_parameters})
        if len(devices) > 1:
            raise ValueError(f"gossip needs all parameters on one device, not on {', '.join(devices)}")
        for name, p in named_parameters:
            if not p.is_floating_point():
                raise ValueError(f"gossip averages floating-point numbers, but {name} has dtype {p.dtype}")
        self.segments: tuple[Segment, ...] = lay_out([(name, part) for name, _, part in parts])
        self.numel = sum(segment.numel for _, segment in self.pairs())
        n = sum(segment.numel for segment in self.segments)
        self.z: Float32[Tensor, "n"] = torch.empty(n, dtype=torch.float32, device=self.parameters[0].device)
        self._tensors = [tensor for _, tensor, _ in parts]
        self._views = [segment.of(self.z) for segment in self.segments]
        with torch.no_grad():
            for (_, _, part), view in zip(parts, self._views, strict=True):
                view.copy_(part)
        self.gather()

    def pairs(self) -> Iterator[tuple[Tensor, Segment]]:
        """The parameters and their places in z."""
        return zip(self.parameters, self.segments, strict=False)

    @torch.no_grad()
    def gather(self) -> None:
        """Copies parameters that were moved to other memory. Adds changes of parameters of other dtypes to z."""
        for p, view in zip(self._tensors, self._views, strict=True):
            part = local_part(p)
            if part.dtype != view.dtype:
                view.sub_(view.to(part.dtype)).add_(part)
            elif part.data_ptr() != view.data_ptr():
                view.copy_(part)
                if part is p:
                    p.data = of_own_storage(view)

    @torch.no_grad()
    def scatter(self) -> None:
        """Copies z to the parameters that do not share its memory."""
        for p, view in zip(self._tensors, self._views, strict=True):
            part = local_part(p)
            if part.data_ptr() != view.data_ptr():
                part.copy_(view)


class ModelSlice(FlatModel):
    """Elements start .. end - 1 of a model. The segments of its tensors are one-dimensional."""

    def __init__(self, model: FlatModel, start: int, end: int):
        self._model, self.parameters, self.z = model, model.parameters, model.z[start:end]
        self.momenta = model.momenta
        self.segments = tuple(
            Segment(s.name, max(s.offset, start) - start, length, (length,), (1,))
            for s in model.segments
            if (length := min(s.offset + s.numel, end) - max(s.offset, start)) > 0
        )

    def gather(self) -> None:
        self._model.gather()

    def scatter(self) -> None:
        self._model.scatter()
