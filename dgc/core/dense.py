"""No compression, and plain casts: the baselines for every other compressor.

Payload bytes per element: Dense the size of the gradient's dtype; FP16 2; BF16 2, and 24 for a header, rounded up
to 8. If a mean is not finite, one more round of 32 bytes determines the rank.
"""

from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

import dgc.kernels as kernels
from dgc.comm.requests import AllReduce, Conversation
from dgc.core.bucket import Bucket
from dgc.core.clipping import Clipping
from dgc.core.envelope import blank, envelope_of, no_segments
from dgc.core.protocol import Compressor, StatelessCompressor, Vector
from dgc.core.results import DenseResult, Reduced, Result, check_means, reported
from dgc.core.state import State


class DenseCompressor(StatelessCompressor):
    """All-reduce of the gradients in their own dtype. bf16 is sent as fp32, because no transport can sum bf16."""

    averages_by_sums = True

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        own = bucket.probe()
        wire = bucket.flat.float() if bucket.flat.dtype == torch.bfloat16 else bucket.flat
        (mean,) = yield (AllReduce(wire),)
        if mean is not bucket.flat:
            bucket.flat.copy_(mean)
        return Reduced(DenseResult(own=own), state)


class FP16Compressor(StatelessCompressor):
    """All-reduce in fp16. Gradients or sums beyond 65504 become inf, as in Horovod's own fp16 compression.

    The result then reports inf, and the optimizer drops the step.
    """

    averages_by_sums = True

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        message = state.scratch.get("message")
        if message is None:
            message = torch.empty(bucket.numel, dtype=torch.float16, device=bucket.device)
        own = kernels.of(message).quantize.round_(bucket.gradients, message)
        bucket.release()
        (mean,) = yield (AllReduce(message),)
        bucket.flat.copy_(mean)
        return Reduced(DenseResult(own=own), state.changed(scratch=kept_on_cpu(message=message)))


class BF16Compressor(StatelessCompressor):
    """All-gather of bf16 as bytes, summed in fp32 in rank order. Horovod cannot sum bf16."""

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        quantizers, nbytes = kernels.of(bucket.bounds).quantize, 2 * bucket.numel
        none, bounds = no_segments(bucket.device)  # the mean shows what is not finite
        envelope = envelope_of(bucket, bounds, 0.5, "BF16Compressor")
        payloads, (codes,) = blank(1, nbytes, bucket.bounds, state.scratch.get("message"))
        scratch = kept_on_cpu(message=payloads)
        own = quantizers.round_(bucket.gradients, codes.view(torch.bfloat16))
        bucket.release()
        parts, flags = yield from envelope.gather_filled(payloads[0], nbytes, none)
        mean = place_of_mean(bucket)
        quantizers.halves_mean_(parts, torch.bfloat16, len(parts), mean)
        bucket.flat.copy_(mean)
        return Reduced(reported(bucket, flags, own), state.changed(scratch=scratch))


def kept_on_cpu(**memory: Tensor) -> dict[str, Tensor]:
    """Memory for `State.scratch`: what is on a CPU. PyTorch itself keeps the memory of other devices."""
    return {use: tensor for use, tensor in memory.items() if tensor.is_cpu}


def place_of_mean(bucket: Bucket) -> Vector:
    """Where to write an fp32 mean with its final bits: into the bucket, if it is of that type, without a copy."""
    if bucket.dtype is torch.float32:
        return bucket.flat
    return torch.empty(bucket.numel, dtype=torch.float32, device=bucket.device)


def for_gradients(compressor: StatelessCompressor | None) -> StatelessCompressor:
    """The compressor of gradients that keep no residual; None is a DenseCompressor.

    Raises:
        ValueError: if it is not a StatelessCompressor.
    """
    if compressor is None:
        return DenseCompressor()
    if not isinstance(compressor, StatelessCompressor):
        raise ValueError(
            f"gradients must be a compressor without state, such as FP16Compressor(), and not {compressor!r}"
        )
    return compressor


WITHOUT_SETTINGS = (DenseCompressor, FP16Compressor, BF16Compressor)


class ClippedCompressor(StatelessCompressor):
    """Runs `base`, then clips a finite mean for each tensor, identically on every rank."""

    def __init__(self, base: StatelessCompressor, clipping: Clipping):
        self.base, self.clipping = base, clipping

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        reduced = yield from self.base.reduce(bucket, state)
        return replace(reduced, result=(yield from clipped(bucket, reduced.result, self.clipping)))


def clipped(bucket: Bucket, result: Result, clipping: Clipping) -> Conversation[DenseResult]:
    """Clip a dense mean in place, unless it is not finite: a limit would hide that."""
    message = yield from check_means([(bucket, result)])
    if message is None:
        clipping.clip_mean(bucket)
    return DenseResult(message, is_finite=True)


def average_alike(one: Compressor, other: Compressor) -> bool:
    """Whether two compressors are one object, or keep no state and have equal settings.

    Their tensors can then share a message. Classes of users, and their subclasses of those above, may have any
    settings: of these only one object averages alike.
    """
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, ClippedCompressor) and isinstance(other, ClippedCompressor):
        return one.clipping == other.clipping and average_alike(one.base, other.base)
    return type(one) in WITHOUT_SETTINGS


@runtime_checkable
class HorovodCompression(Protocol):
    """The interface of `hvd.Compression.none` and `.fp16`."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]: ...
    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor: ...


class CastCompressor(StatelessCompressor):
    """Adapter for a Horovod compression: one tensor in, one tensor out, with an all-reduce in between."""

    def __init__(self, compression: HorovodCompression):
        self._compression = compression

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        own = bucket.probe()
        tensor, ctx = self._compression.compress(bucket.flat)
        (mean,) = yield (AllReduce(tensor),)
        bucket.flat.copy_(self._compression.decompress(mean, ctx))
        return Reduced(DenseResult(own=own), state)
