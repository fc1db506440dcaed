"""Compression operators Q for differences of models, each a payload of planned size.

TopK    the ceil(ratio d) elements of largest magnitude of each tensor of d, as `dgc.wire` packs them
Sign    (|v|_1 / d) sign(v) of each tensor; an element of 0 is sent as a negative one

Bytes: TopK 24, and for each element 4 and those of a value, rounded up to 8 in all; Sign 4 + 4 ceil(d/32) for
each tensor.

gamma is the consensus step size that suits each in `dgc.gossip.choco`: on rings of 2 to 16 ranks
twice TopK's ratio brings models together, 4 times mostly drives them apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

import dgc.kernels as kernels
from dgc.bucket import Segment
from dgc.comm.requests import as_bytes
from dgc.kernels import Selection
from dgc.selection.plan import Plan, plan_selection
from dgc.wire import CastValues, PayloadError, PlainIndices, SparseFormat

FP32 = 4  # bytes

Vector = Float32[Tensor, "n"]
Bytes = UInt8[Tensor, "nbytes"]
Addend = Callable[[Vector, float], object]  # of Q(v): add that, times a factor, to a vector


@runtime_checkable
class Coder(Protocol):
    """Q for one model."""

    @property
    def nbytes(self) -> int: ...

    def encode(self, v: Vector) -> tuple[Bytes, Addend]:
        """The payload, and what every receiver will make of it."""
        ...

    def decode(self, payload: Bytes, source: int) -> Addend:
        """PayloadError, naming the rank that it came from, where the payload cannot be what that one made."""
        ...


@runtime_checkable
class Quantizer(Protocol):
    @property
    def gamma(self) -> float: ...

    def plan(self, segments: Sequence[Segment], device: torch.device) -> Coder: ...


@dataclass(frozen=True)
class TopK:
    """ratio: the part of the elements that is sent. values: how they travel, "fp32", "fp16" or "bf16"."""

    ratio: float = 0.1
    values: str = "fp32"

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio is a fraction in (0, 1], not {self.ratio}")
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

    def encode(self, v: Vector) -> tuple[Bytes, Addend]:
        quotas = self.selection.per_tensor
        chosen = kernels.of(v).select(v, quotas)
        encoded = self.form.encode(
            kernels.codec_of(v), chosen.selection, quotas, self._numel, chosen.first_nonfinite
        )
        return encoded.payload, _adding(encoded.sent)

    def decode(self, payload: Bytes, source: int) -> Addend:
        try:
            (selection,), _ = self.form.decode(
                kernels.codec_of(payload), (payload,), self.selection.per_tensor, self._numel
            )
        except PayloadError as error:  # counts the payloads that it was given
            raise PayloadError(f"rank {source}{str(error).removeprefix('rank 0')}") from error
        return _adding(selection)


def _adding(sent: Selection) -> Addend:
    return lambda target, factor: target.index_add_(0, sent.indices, sent.values, alpha=factor)


@dataclass(frozen=True)
class Sign:
    gamma = 0.3

    def plan(self, segments: Sequence[Segment], device: torch.device) -> Coder:
        bounds = [0, *(segment.offset + segment.numel for segment in segments)]
        nbytes = sum(FP32 + FP32 * -(-segment.numel // 32) for segment in segments)
        return _Signs(torch.tensor(bounds, dtype=torch.int64, device=device), nbytes)


@dataclass(frozen=True, eq=False)
class _Signs:
    bounds: Int64[Tensor, "bounds"]
    nbytes: int

    def encode(self, v: Vector) -> tuple[Bytes, Addend]:
        scales = (kernels.of(v).moments(v, self.bounds).magnitudes / self.bounds.diff().clamp(min=1)).float()
        codes, _ = kernels.quantizers_of(v).sign_encode(v, self.bounds, torch.zeros_like(scales), -scales, scales)
        payload = torch.cat([as_bytes(scales), codes])
        return payload, self.decode(payload, 0)

    def decode(self, payload: Bytes, source: int) -> Addend:
        scales = payload[: FP32 * (self.bounds.numel() - 1)].clone().view(torch.float32)
        q = torch.zeros(int(self.bounds[-1]), dtype=torch.float32, device=payload.device)
        codes = payload[FP32 * scales.numel() :].clone()
        kernels.quantizers_of(q).sign_add_(codes, self.bounds, -scales, scales, q)
        return lambda target, factor: target.add_(q, alpha=factor)
