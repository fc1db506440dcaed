"""The model of a rank as one flat vector, for gossip to send and average."""

from collections.abc import Sequence

import torch
from jaxtyping import Float32
from torch import Tensor

from dgc.bucket import Segment, lay_out


class FlatModel:
    """A model as one flat vector z [n] fp32, which holds all parameters.

    fp32 parameters are views of z. Parameters of other dtypes are rounded copies of z.

    Call `scatter` after a change of z, and `gather` after a change of the parameters.

    Args:
        named_parameters (sequence): (name, parameter) pairs.

    Raises:
        ValueError: if there are no parameters, they are on several devices, or a dtype is not floating-point.

    Example:
        >>> FlatModel(list(torch.nn.Linear(3, 2).named_parameters())).z.shape
        torch.Size([8])
    """

    def __init__(self, named_parameters: Sequence[tuple[str, Tensor]]):
        if not named_parameters:
            raise ValueError("gossip needs at least one parameter that requires a gradient")
        devices = sorted({str(p.device) for _, p in named_parameters})
        if len(devices) > 1:
            raise ValueError(f"gossip needs all parameters on one device, not on {', '.join(devices)}")
        for name, p in named_parameters:
            if not p.is_floating_point():
                raise ValueError(f"gossip averages floating-point numbers, but {name} has dtype {p.dtype}")
        self.parameters = [p for _, p in named_parameters]
        self.segments: tuple[Segment, ...] = lay_out(named_parameters)
        numel = sum(segment.numel for segment in self.segments)
        self.z: Float32[Tensor, "n"] = torch.empty(numel, dtype=torch.float32, device=self.parameters[0].device)
        self._views = [segment.of(self.z) for segment in self.segments]
        with torch.no_grad():
            for p, view in zip(self.parameters, self._views, strict=True):
                view.copy_(p)
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        """Copies parameters that were moved to other memory. Adds changes of parameters of other dtypes to z."""
        for p, view in zip(self.parameters, self._views, strict=True):
            if p.dtype != view.dtype:
                view.sub_(view.to(p.dtype)).add_(p)
            elif p.data_ptr() != view.data_ptr():
                view.copy_(p)
                p.data = view

    @torch.no_grad()
    def scatter(self) -> None:
        """Copies z to the parameters that are not views of it."""
        for p, view in zip(self.parameters, self._views, strict=True):
            if p.data_ptr() != view.data_ptr():
                p.copy_(view)
