"""Compressors that round every element to evenly spaced levels."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.comm.meter import all_gather_wire_bytes, all_reduce_wire_bytes
from dgc.comm.requests import Conversation
from dgc.core.arguments import checked
from dgc.core.bucket import Bucket
from dgc.core.clipping import Clipping
from dgc.core.dense import ClippedCompressor, DenseCompressor, FP16Compressor, clipped
from dgc.core.error_feedback import AllGatherCompressor, Codes, Mean, join, split_all
from dgc.core.protocol import Compressor, Position, Vector, check_choice
from dgc.core.results import Reduced
from dgc.core.state import State
from dgc.core.values import CastValues, ValueFormat

DENSE_VALUES = ("fp32", "fp16", "bf16", "int8")
BLOCK = 1024  # elements of a block of int8 dense values


class UniformCompressor(AllGatherCompressor):
    """Base class of compressors that round to evenly spaced levels.

        level = floor(L |v| / s + r),  value = sign(v) s level / L

    s is a scale of each block. r is random in [0, 1), which makes the expected value v, or 1/2, which rounds to
    nearest. Codes: 4 bytes of scale for each block of d elements, then ceil(bits d / 8) bytes.

    Args:
        bits (int): bits per element with the sign: 2, 4 or 8.
        levels (int): number of positive levels, L.
        block (int, optional): elements that share a scale; None for one scale per tensor. A tensor's last block
            may be shorter.
        random (bool): stochastic rounding; False rounds to nearest.
        error_feedback, seed: as `ErrorFeedbackCompressor`.

    Raises:
        ValueError: if bits or block is out of range.
    """

    bits = 8

    def __init__(self, bits: int, levels: int, block: int | None, random: bool, error_feedback: bool, seed: int):
        if bits not in (2, 4, 8):
            raise ValueError(f"bits must be 2, 4 or 8, not {bits}")
        if block is not None and block < 1:
            raise ValueError(f"block must be at least 1, not {block}")
        super().__init__(error_feedback, seed)
        self.bits, self.levels, self.block, self.random = bits, levels, block, random

    @property
    @abstractmethod
    def scale(self) -> kernels.Scale:
        """What `scales` returns."""

    @abstractmethod
    def scales(self, v: Vector, blocks: Int64[Tensor, "bounds"]) -> Tensor:
        """The scale of each block. Larger magnitudes are clipped to it."""

    def code(self, bucket: Bucket, state: State) -> kernels.ElementCode | None:
        what = (kernels.Form.LEVELS, self.scale, state.constants["blocks"], self.bits, self.levels)
        return kernels.ElementCode(*what, random=self.random)

    def init(self, bucket: Bucket, size: int, rank: int) -> State:
        edges: list[int] = []
        for s in bucket.segments:
            edges += range(s.offset, s.offset + s.numel, self.block or max(1, s.numel))
        blocks = torch.tensor([*edges, bucket.numel], dtype=torch.int64, device=bucket.device)
        return replace(super().init(bucket, size, rank), constants={"blocks": blocks})

    def nbytes(self, bucket: Bucket) -> int:
        total = 0
        for s in bucket.segments:
            block = self.block or max(1, s.numel)
            whole, rest = divmod(s.numel, block)
            total += whole * (4 + -(-block * self.bits // 8)) + (4 + -(-rest * self.bits // 8) if rest else 0)
        return total

    def encode(self, bucket: Bucket, state: State, v: Vector) -> tuple[Codes, Vector]:
        blocks = state.constants["blocks"]
        scales = self.scales(v, blocks).float()
        seed = self.noise(bucket, state) if self.random else None
        how = (self.levels, self.bits, seed, self.error_feedback, state.scratch.get("errors"))
        codes, kept = kernels.of(v).quantize.uniform_encode(v, blocks, scales, *how)
        return join(scales, codes), kept

    def mean_(self, bucket: Bucket, state: State, codes: Sequence[Codes], mean: Vector) -> None:
        blocks = state.constants["blocks"]
        scales, fields = split_all(codes, blocks.numel() - 1)
        quantizers = kernels.of(mean).quantize
        quantizers.uniform_mean_(fields, blocks, scales.unbind(), self.levels, self.bits, state.size, mean)


@checked
class QSGDCompressor(UniformCompressor):
    """QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic 2017, arXiv 1610.02132, section 3.1): stochastic rounding.

        Q(v_i) = |v|_2 sign(v_i) xi_i / L,  xi_i = floor(L |v_i| / |v|_2 + r_i),  r_i uniform in [0, 1)

    The result is unbiased, with a variance of at most min(d / L**2, sqrt(d) / L) |v|_2**2 for blocks of d
    elements.

    Differences from the paper: Codes have a fixed number of bits, with L = 2 ** (bits - 1) - 1 levels besides 0.
    The paper uses Elias codes, which change in length from step to step.

    Args, Raises: as `UniformCompressor`.
        norm (str): "l2" as in the paper's analysis, or "max", the largest magnitude, as in its experiments.
        error_feedback (bool): not in the paper; it may diverge with norm "l2" and few levels.

    Example:
        >>> compression = QSGDCompressor(bits=4, block=512)
    """

    def __init__(
        self,
        bits: int = 4,
        block: int | None = 512,
        norm: str = "max",
        error_feedback: bool = False,
        seed: int = 0,
    ):
        check_choice(("l2", "max"), norm=norm)
        super().__init__(bits, 2 ** (bits - 1) - 1, block, True, error_feedback, seed)
        self.norm = norm

    @property
    def scale(self) -> kernels.Scale:
        return kernels.Scale.LARGEST if self.norm == "max" else kernels.Scale.NORM

    def scales(self, v: Vector, blocks: Int64[Tensor, "bounds"]) -> Tensor:
        if self.norm == "max":
            return kernels.of(v).quantize.largest(v, blocks)
        return kernels.of(v).selection.moments(v, blocks).squares.sqrt()


@checked
class BlockwiseCompressor(UniformCompressor):
    """The nearest of 2 ** bits - 1 levels, with each block scaled by its largest magnitude, as in block-wise
    quantization of optimizer states (Dettmers, Lewis, Shleifer, Zettlemoyer 2022, arXiv 2110.02861, section 2.1).

    Differences from the paper: Levels are evenly spaced. The paper's dynamic data type has finer levels near 0.
    Error feedback compensates for the difference.

    Args, Raises: as `UniformCompressor`.
    """

    def __init__(self, bits: int = 8, block: int | None = 2048, error_feedback: bool = True):
        super().__init__(bits, 2 ** (bits - 1) - 1, block, False, error_feedback, 0)

    @property
    def scale(self) -> kernels.Scale:
        return kernels.Scale.LARGEST

    def scales(self, v: Vector, blocks: Int64[Tensor, "bounds"]) -> Tensor:
        return kernels.of(v).quantize.largest(v, blocks)


# --- tensors that a sparse method leaves -----------------------------------------------------------


class DenseValuesCompressor(BlockwiseCompressor):
    """Sends every element as fp16, bf16 or int8, with error feedback. `SparseCompressor(dense_values=)` makes it.

    It takes what a sparse method leaves: vectors, and all else that it does not accept. At a ratio of 0.1 % these
    tensors are most of the bytes, if they travel as fp32. int8 is the code of `BlockwiseCompressor`, with blocks
    of 1024 elements.

    Bytes of an all-gather grow with the number of ranks N. With many ranks an all-reduce costs fewer: of v as fp16
    for fp16, of v as fp32 for the others. The transport rounds a sum in fp16. This is the only rounding that no
    residual keeps.

    Codes: 2 bytes per element, or for int8 1 per element and 4 per block. If an all-gather of the codes costs more
    than the all-reduce, the payload has 24 + 2 (fp16) or 4 per element. This begins with N = 3 for fp16, N = 5 for
    bf16, and N = 8 for int8, or earlier if tensors have only a few elements.

    Args:
        values (str): "fp16", "bf16" or "int8".
        clipping (Clipping, optional): limit on the mean of each tensor.

    Raises:
        ValueError: if values is none of these.

    Example:
        >>> vectors = DGCCompressor(0.001, DGCSGDMemory(momentum=0.9), dense_values="int8").fallback
    """

    def __init__(self, values: str, clipping: Clipping | None = None):
        check_choice(DENSE_VALUES[1:], values=values)
        super().__init__(8, BLOCK)
        self.values, self.clipping = values, clipping
        # no transport can add bf16 or int8
        self._reduced = CastValues("fp16" if values == "fp16" else "fp32")

    @property
    def compress_ratio(self) -> float:
        return self.bits / 32 if self.values == "int8" else 1.0

    def ratio_of(self, states: Sequence[tuple[Bucket, State]]) -> float:
        return self.compress_ratio if all(self._gathers(bucket, state) for bucket, state in states) else 1.0

    def _gathers(self, bucket: Bucket, state: State) -> bool:
        ranks = max(2, state.size)  # one process uses the rule for two
        gathered = all_gather_wire_bytes(self.nbytes(bucket), ranks)
        return gathered <= all_reduce_wire_bytes(bucket.numel * self._reduced.itemsize, ranks)

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        reduced = yield from super().reduce(bucket, state)
        if self.clipping is None:
            return reduced
        return replace(reduced, result=(yield from clipped(bucket, reduced.result, self.clipping)))

    def exchange(self, bucket: Bucket, state: State, v: Vector, first_nonfinite: Position) -> Mean:
        if self._gathers(bucket, state):
            return (yield from super().exchange(bucket, state, v, first_nonfinite))
        sent = self._reduced.quantize(v, state.size, bucket.dtype)
        kept = torch.sub(v, sent.float(), out=state.scratch.get("errors"))
        message = sent.clone()  # the reply may overwrite it
        mean, flags = yield from self.envelope(bucket).reduce(message, first_nonfinite)
        return mean.float(), kept, flags

    def code(self, bucket: Bucket, state: State) -> kernels.ElementCode | None:
        return super().code(bucket, state) if self.values == "int8" and self._gathers(bucket, state) else None

    def nbytes(self, bucket: Bucket) -> int:
        return super().nbytes(bucket) if self.values == "int8" else 2 * bucket.numel

    def encode(self, bucket: Bucket, state: State, v: Vector) -> tuple[Codes, Vector]:
        if self.values == "int8":
            return super().encode(bucket, state, v)
        cast = CastValues(self.values).quantize(v, result=bucket.dtype)
        return cast.view(torch.uint8), torch.sub(v, cast.float(), out=state.scratch.get("errors"))

    def mean_(self, bucket: Bucket, state: State, codes: Sequence[Codes], mean: Vector) -> None:
        if self.values == "int8":
            return super().mean_(bucket, state, codes, mean)
        dtype = CastValues(self.values).torch_dtype
        kernels.of(mean).quantize.halves_mean_(codes, dtype, state.size, mean)


def make_fallback(dense_values: str | None, values: ValueFormat, clipping: Clipping | None) -> Compressor:
    """Return the compressor of the tensors that a sparse method does not accept.

    dense_values: one of DENSE_VALUES. None: those that cost about as much per element as the method's own
    `values`, or the next larger ones. clipping: the limit on means. Raises ValueError for other dense_values.
    """
    check_choice((None, *DENSE_VALUES), dense_values=dense_values)
    fitting = values.dtype if isinstance(values, CastValues) else values.dense.dtype
    if not isinstance(values, CastValues) and values.nbytes(BLOCK, 0) < 2 * BLOCK:
        fitting = "int8"
    name = dense_values or fitting
    if name == "fp32" or (name == "fp16" and dense_values is None):
        dense = DenseCompressor() if name == "fp32" else FP16Compressor()
        return dense if clipping is None else ClippedCompressor(dense, clipping)
    return DenseValuesCompressor(name, clipping)
