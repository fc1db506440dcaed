"""The compressors of what a sparse method leaves: vectors, and all else that it does not accept.

At a ratio of 0.1 % these tensors are most of the bytes, if they travel as fp32. With codes of fewer bits Q:

    v = g + e;  send Q(v);  e = v - Q(v)      error feedback: what rounding takes is sent later

    fp16, bf16   v cast to the type
    int8         the nearest of 255 levels; every block of up to 1024 elements of a tensor has a scale, its largest
                 magnitude / 127 (`BlockwiseCompressor`)

All ranks gather all codes and sum them in rank order. Bytes of an all-gather grow with the number of ranks N. With
many ranks an all-reduce costs fewer: of v as fp16 for fp16, of v as fp32 for the others. The transport rounds a
sum in fp16. This is the only rounding that no error state keeps.

Payload of a bucket in bytes: 24 + codes, rounded up to 8; codes: 2 per element, or for int8 1 per element and 4
per block. If an all-gather of the codes costs more than the all-reduce: 24 + 2 (fp16) or 4 per element. This
begins with N = 3 for fp16, N = 5 for bf16, and N = 8 for int8, or earlier if tensors have only a few elements.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from dgc.bucket import Bucket
from dgc.comm.meter import all_gather_wire_bytes, all_reduce_wire_bytes
from dgc.comm.requests import Conversation
from dgc.compression.all_gather import AllGatherCompressor, Codes
from dgc.compression.dense import ClippedCompressor, DenseCompressor, FP16Compressor
from dgc.compression.protocol import Compressor, Result
from dgc.compression.quantized.blockwise import BlockwiseCompressor
from dgc.memory.clip import Clipping
from dgc.wire import CastValues, ValueFormat

DENSE_VALUES = ("fp32", "fp16", "bf16", "int8")
BLOCK = 1024


def make_fallback(dense_values: str | None, values: ValueFormat, clipping: Clipping | None) -> Compressor:
    """Return the compressor of the tensors that a sparse method does not accept.

    Args:
        dense_values: Its values, one of DENSE_VALUES. None: those that fit `values`.
        values: Format of the method's own values.
        clipping: The limit on means.

    Raises:
        ValueError: `dense_values` is none of these.
    """
    if dense_values not in (*DENSE_VALUES, None):
        raise ValueError(f"dense_values must be None or one of {', '.join(DENSE_VALUES)}, not {dense_values!r}")
    name = dense_values or _fitting(values)
    if name == "fp32" or (name == "fp16" and dense_values is None):
        dense = DenseCompressor() if name == "fp32" else FP16Compressor()
        return dense if clipping is None else ClippedCompressor(dense, clipping)
    return DenseValuesCompressor(name, clipping)


def _fitting(values: ValueFormat) -> str:
    """Return the type of dense values that costs about as much per element as `values`, or the next larger one."""
    if isinstance(values, CastValues):
        return values.dtype
    return "int8" if values.nbytes(BLOCK, 0) < 2 * BLOCK else values.dense.dtype


class DenseValuesCompressor(AllGatherCompressor):
    """Sends every element as fp16, bf16 or int8, with error feedback. `SparseCompressor(dense_values=)` makes it.

    Args:
        values (str): "fp16", "bf16" or "int8".
        clipping (Clipping, optional): limit on the mean of each tensor.

    Raises:
        ValueError: if values is none of these.

    Example:
        >>> vectors = DGCCompressor(0.001, DGCSGDMemory(momentum=0.9), dense_values="int8").fallback
    """

    def __init__(self, values: str, clipping: Clipping | None = None):
        if values not in DENSE_VALUES[1:]:
            raise ValueError(f"values must be one of {', '.join(DENSE_VALUES[1:])}, not {values!r}")
        super().__init__()
        self.values, self.clipping = values, clipping
        self.bits = 8 if values == "int8" else 16
        self._blocks = BlockwiseCompressor(8, BLOCK, error_feedback=False)
        self._gathers: dict[str, bool] = {}

    @property
    def compress_ratio(self) -> float:
        return self.bits / 32 if self.values == "int8" and all(self._gathers.values()) else 1.0

    def plan(self, bucket: Bucket, size: int, rank: int) -> None:
        super().plan(bucket, size, rank)
        self._blocks.plan(bucket, size, rank)
        ranks = max(2, size)  # one process uses the rule for two
        gathered = all_gather_wire_bytes(self.nbytes(bucket), ranks)
        reduced = all_reduce_wire_bytes(bucket.numel * self._reduced.itemsize, ranks)
        self._gathers[bucket.name] = gathered <= reduced

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        result = yield from super().reduce(bucket)
        if self.clipping is not None and result.nonfinite is None:
            self.clipping.clip_mean(bucket)
        return result

    def exchange(
        self, bucket: Bucket, v: Float32[Tensor, "n"], first_nonfinite: Int64[Tensor, ""]
    ) -> Conversation[tuple[Tensor, Tensor, list[int]]]:
        if self._gathers[bucket.name]:
            return (yield from super().exchange(bucket, v, first_nonfinite))
        sent = self._reduced.quantize(v, self.size, bucket.dtype)
        kept = v - sent.float()
        message = sent.clone()  # the reply may overwrite it
        mean, nonfinite = yield from self.envelope(bucket).reduce(message, first_nonfinite)
        return mean.float(), kept, nonfinite

    @property
    def _reduced(self) -> CastValues:
        """Format of an all-reduce. No transport can add bf16 or int8."""
        return CastValues("fp16" if self.values == "fp16" else "fp32")

    # --- codes ------------------------------------------------------------------------------------

    def nbytes(self, bucket: Bucket) -> int:
        return self._blocks.nbytes(bucket) if self.values == "int8" else 2 * bucket.numel

    def encode(self, v: Float32[Tensor, "n"], bucket: Bucket) -> tuple[Codes, Float32[Tensor, "n"]]:
        if self.values == "int8":
            return self._blocks.encode(v, bucket)
        cast = CastValues(self.values).quantize(v, result=bucket.dtype)
        return cast.view(torch.uint8), v - cast.float()

    def mean_(self, codes: Sequence[Codes], bucket: Bucket, mean: Float32[Tensor, "n"]) -> None:
        if self.values == "int8":
            return self._blocks.mean_(codes, bucket, mean)
        mean.zero_()
        for own in codes:
            mean += own.view(CastValues(self.values).torch_dtype)
        mean.div_(self.size)
