"""Index formats of a payload.

A format plans a section of fixed size. The size depends only on the capacity and on the size of the bucket. Plain
indices always fit. The length of packed and Rice codes depends on the indices. Their plan has room for the likely
length (`lengths`). If a selection does not fit, a few of its elements are not sent. If a code would need more
bytes than int32 indices, the section holds int32 indices instead.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int32, UInt8
from torch import Tensor

from dgc.arguments import checked
from dgc.kernels.codec.mean import IndexKind
from dgc.kernels.codec.protocol import Codec, PackedCode, RiceCode
from dgc.kernels.selection.protocol import SparseVector
from dgc.wire.lengths import plan_packed, plan_rice

INT32_MAX = torch.iinfo(torch.int32).max


@runtime_checkable
class IndexSection(Protocol):
    """The section that a format plans for one bucket."""

    @property
    def nbytes(self) -> int:
        """Size of the section in bytes, a multiple of 4."""
        ...

    def encode_(self, codec: Codec, selection: SparseVector, section: UInt8[Tensor, "nbytes"]) -> SparseVector:
        """Write the indices into a section of zeros. Returns the part of the selection that is sent."""
        ...

    def decode(
        self, codec: Codec, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""]
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        """Return (indices, whether they are ascending and within the bucket). Any bytes and any count are safe."""
        ...


@runtime_checkable
class IndexFormat(Protocol):
    """A format of indices."""

    def plan(self, capacity: int, numel: int) -> IndexSection:
        """Plan the section for `capacity` of `numel` elements.

        Raises:
            ValueError: This format cannot hold such indices.
        """
        ...


@dataclass(frozen=True)
class PlainSection:
    """Consecutive integers, followed by zeros."""

    capacity: int
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.capacity * self.dtype.itemsize

    @property
    def kind(self) -> IndexKind:
        return IndexKind.INT32 if self.dtype == torch.int32 else IndexKind.INT64

    def encode_(self, codec: Codec, selection: SparseVector, section: UInt8[Tensor, "nbytes"]) -> SparseVector:
        codec.plain_encode_(selection.indices, self.dtype, section)
        return selection

    def decode(
        self, codec: Codec, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""]
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return codec.plain_decode(section, count, self.numel, self.dtype)


@dataclass(frozen=True)
class PackedSection:
    code: PackedCode
    kind: ClassVar[IndexKind] = IndexKind.PACKED

    @property
    def nbytes(self) -> int:
        return self.code.nbytes

    def encode_(self, codec: Codec, selection: SparseVector, section: UInt8[Tensor, "nbytes"]) -> SparseVector:
        return codec.packed_encode_(selection, self.code, section)

    def decode(
        self, codec: Codec, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""]
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return codec.packed_decode(section, count, self.code)


@dataclass(frozen=True)
class RiceSection:
    code: RiceCode
    kind: ClassVar[IndexKind] = IndexKind.RICE

    @property
    def nbytes(self) -> int:
        return self.code.nbytes

    def encode_(self, codec: Codec, selection: SparseVector, section: UInt8[Tensor, "nbytes"]) -> SparseVector:
        return codec.rice_encode_(selection, self.code, section)

    def decode(
        self, codec: Codec, section: UInt8[Tensor, "nbytes"], count: Int32[Tensor, ""]
    ) -> tuple[Int32[Tensor, "capacity"], Bool[Tensor, ""]]:
        return codec.rice_decode(section, count, self.code)


@checked
@dataclass(frozen=True)
class PlainIndices:
    """Indices within the bucket, not compressed.

    Args:
        dtype: "int64" or "int32".

    Raises:
        ValueError: `dtype` is neither.
    """

    dtype: str = "int64"

    def __post_init__(self) -> None:
        if self.dtype not in ("int64", "int32"):
            raise ValueError(f"plain indices are int64 or int32, not {self.dtype!r}")

    def plan(self, capacity: int, numel: int) -> IndexSection:
        if numel > INT32_MAX:
            raise ValueError(f"a bucket of {numel} elements is too large: the maximum is {INT32_MAX}")
        return PlainSection(capacity, numel, torch.int64 if self.dtype == "int64" else torch.int32)


@dataclass(frozen=True)
class PackedIndices:
    """Gaps between indices in blocks of 128, each with the bit width of its largest gap: fast on any machine."""

    def plan(self, capacity: int, numel: int) -> IndexSection:
        plain = PlainIndices("int32").plan(capacity, numel)
        if not capacity:
            return plain
        packed = PackedSection(plan_packed(capacity, numel))
        return packed if packed.nbytes < plain.nbytes else plain


@dataclass(frozen=True)
class RiceIndices:
    """Gaps between indices in a Rice code, with one parameter per 512 gaps: about 0.1 bit above the entropy."""

    def plan(self, capacity: int, numel: int) -> IndexSection:
        plain = PlainIndices("int32").plan(capacity, numel)
        if not capacity:
            return plain
        rice = RiceSection(plan_rice(capacity, numel))
        return rice if rice.nbytes < plain.nbytes else plain
