"""Compression operators Q for differences of models. Each has a payload of fixed size.

TopK    the ceil(ratio d) elements of largest magnitude of each tensor of d, in the format of `dgc.wire`
Sign    (|v|_1 / d) sign(v) of each tensor of d elements; 0 is sent as a negative element

Bytes, rounded up to a multiple of 8: TopK 24, and for each element 4 and the bytes of a value; Sign 24, and
4 + 4 ceil(d/32) for each tensor.

gamma is the default consensus step size of `choco` for an operator. On rings of 2 to 16 ranks, models converge to
each other with twice the ratio of TopK, and mostly diverge with 4 times the ratio.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

import dgc.kernels as kernels
from dgc.arguments import checked
from dgc.bucket import Segment
from dgc.comm.requests import as_bytes
from dgc.gossip.envelope import message_of, opened, write_header_
from dgc.kernels import SparseVector
from dgc.selection.plan import Plan, plan_selection
from dgc.wire import CastValues, PlainIndices, SparseFormat
from dgc.wire.checks import read_scalars
from dgc.wire.sealed import sealed_bytes

FP32 = 4  # bytes
DIFFERENCE = "a difference of CHOCO"

Vector = Float32[Tensor, "n"]
Bytes = UInt8[Tensor, "nbytes"]
AddScaled = Callable[[Vector, float], object]  # adds Q(v), times a factor, to a vector


@runtime_checkable
class Coder(Protocol):
    """Q for one model."""

    @property
    def nbytes(self) -> int: ...

    def encode(self, v: Vector) -> tuple[Bytes, AddScaled]:
        """Returns the payload and its decoded value."""
        ...

    def decode(self, payload: Bytes, source: int) -> AddScaled:
        """Decodes a payload. Raises PayloadError, which names the rank `source`, if the payload is not valid."""
        ...


@runtime_checkable
class Quantizer(Protocol):
    """A compression operator."""

    @property
    def gamma(self) -> float: ...

    def plan(self, segments: Sequence[Segment], device: torch.device) -> Coder: ...


@checked
@dataclass(frozen=True)
class TopK:
    """Top-k by magnitude in each tensor.

    Args:
        ratio (float): fraction of elements sent, in (0, 1].
        values (str): dtype of the values, "fp32", "fp16" or "bf16".

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> TopK(0.01).gamma
        0.02
    """

    ratio: float = 0.1
    values: str = "fp32"

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be a fraction in (0, 1], not {self.ratio}")
        CastValues(self.values)

    @property
    def gamma(self) -> float:
        return min(1.0, 2 * self.ratio)

    def plan(self, segments: Sequence[Segment], device: torch.device) -> Coder:
        form = SparseFormat(CastValues(self.values), PlainIndices("int32"))
        return _Sparse(form, plan_selection(segments, self.ratio, device))


@dataclass(frozen=True, eq=False)
class _Sparse:
    form: SparseFormat
    selection: Plan

    @property
    def _numel(self) -> int:
        return sum(self.selection.numels)

    @property
    def nbytes(self) -> int:
        return self.form.nbytes(self.selection.per_tensor, self._numel)

    def encode(self, v: Vector) -> tuple[Bytes, AddScaled]:
        budget = self.selection.per_tensor
        chosen = kernels.of(v).selection.select(v, budget)
        encoded = self.form.encode(
            kernels.of(v).codec, chosen.elements, budget, self._numel, chosen.first_nonfinite
        )
        return encoded.payload, _add_sparse(encoded.sent)

    def decode(self, payload: Bytes, source: int) -> AddScaled:
        codec, planned = kernels.of(payload).codec, (self.selection.per_tensor, self._numel)
        (selection,), _ = self.form.decode(codec, (payload,), *planned, what=DIFFERENCE, ranks=(source,))
        return _add_sparse(selection)


def _add_sparse(sent: SparseVector) -> AddScaled:
    return lambda target, factor: target.index_add_(0, sent.indices, sent.values, alpha=factor)


@dataclass(frozen=True)
class Sign:
    """Signs, scaled by the mean magnitude of each tensor: 1 bit per element.

    Example:
        >>> gossip = CHOCO(quantizer=Sign())
    """

    gamma = 0.3

    def plan(self, segments: Sequence[Segment], device: torch.device) -> Coder:
        bounds = [0, *(segment.offset + segment.numel for segment in segments)]
        codes = sum(FP32 + FP32 * -(-segment.numel // 32) for segment in segments)
        return _Signs(torch.tensor(bounds, dtype=torch.int64, device=device), codes)


@dataclass(frozen=True, eq=False)
class _Signs:
    bounds: Int64[Tensor, "bounds"]
    codes: int  # bytes

    @property
    def nbytes(self) -> int:
        return sealed_bytes(self.codes)

    def encode(self, v: Vector) -> tuple[Bytes, AddScaled]:
        sums = kernels.of(v).selection.moments(v, self.bounds).magnitudes
        scales = (sums / self.bounds.diff().clamp(min=1)).float()
        codes, _ = kernels.of(v).quantize.sign_encode(v, self.bounds, torch.zeros_like(scales), -scales, scales)
        both = torch.cat([as_bytes(scales), codes])
        payload = message_of(both)
        write_header_(payload, DIFFERENCE)
        return payload, self._add_signs(both)

    def decode(self, payload: Bytes, source: int) -> AddScaled:
        received = opened(payload, self.codes, DIFFERENCE, source)
        (both,), _ = received.checked(read_scalars(received.scalars))
        return self._add_signs(both)

    def _add_signs(self, both: Bytes) -> AddScaled:
        scales = both[: FP32 * (self.bounds.numel() - 1)].clone().view(torch.float32)
        q = torch.zeros(int(self.bounds[-1]), dtype=torch.float32, device=both.device)
        codes = both[FP32 * scales.numel() :].clone()
        kernels.of(q).quantize.sign_add_(codes, self.bounds, -scales, scales, q)
        return lambda target, factor: target.add_(q, alpha=factor)
