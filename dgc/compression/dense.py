"""No compression, and plain casts: the opponents that every other compressor has to beat.

payload bytes per element: Dense the gradient's own; FP16 2; BF16 2. A mean that is not finite costs one more
round of one byte, which names the rank.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dgc.bucket import Bucket
from dgc.comm.requests import AllGather, AllReduce, Conversation
from dgc.compression.finite import check_mean, probe
from dgc.compression.protocol import DenseResult, Result, Stateless
from dgc.memory.clip import Clipping


class Dense(Stateless):
    """All-reduce of the gradients as they are (bf16 gradients travel as fp32: no transport adds bf16)."""

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        own = probe(bucket.flat)
        wire = bucket.flat.float() if bucket.flat.dtype == torch.bfloat16 else bucket.flat
        (mean,) = yield (AllReduce(wire),)
        bucket.flat.copy_(mean)
        return DenseResult((yield from check_mean(bucket, own)))


class FP16(Stateless):
    """All-reduce in fp16. Gradients or sums beyond 65504 become inf, as in Horovod's own fp16 compression.

    The result then says so, and the optimizer drops the step.
    """

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        own = probe(bucket.flat)
        (mean,) = yield (AllReduce(bucket.flat.to(torch.float16)),)
        bucket.flat.copy_(mean)
        return DenseResult((yield from check_mean(bucket, own)))


class BF16(Stateless):
    """All-gather of bf16 as bytes, added in fp32 in the order of ranks: Horovod does not add bf16."""

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        own = probe(bucket.flat)
        (payloads,) = yield (AllGather(bucket.flat.to(torch.bfloat16).view(torch.uint8)),)
        total = torch.zeros_like(bucket.flat, dtype=torch.float32)
        for payload in payloads:
            total += payload.view(torch.bfloat16)
        bucket.flat.copy_(total.div_(len(payloads)))
        return DenseResult((yield from check_mean(bucket, own)))


class Clipped(Stateless):
    """As `base`; then a finite mean is clipped, tensor by tensor, alike on every rank."""

    def __init__(self, base: Stateless, clipping: Clipping):
        self._base, self._clipping = base, clipping

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        result = yield from self._base.reduce(bucket)
        if result.nonfinite is None:
            self._clipping.clip_mean(bucket)
        return result


@runtime_checkable
class HorovodCompression(Protocol):
    """The interface of `hvd.Compression.none` and `.fp16`."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]: ...
    def decompress(self, tensor: Tensor, ctx: Any) -> Tensor: ...


class Cast(Stateless):
    """A Horovod compression: one tensor in, one tensor out, all-reduced in between."""

    def __init__(self, compression: HorovodCompression):
        self._compression = compression

    def reduce(self, bucket: Bucket) -> Conversation[Result]:
        own = probe(bucket.flat)
        tensor, ctx = self._compression.compress(bucket.flat)
        (mean,) = yield (AllReduce(tensor),)
        bucket.flat.copy_(self._compression.decompress(mean, ctx))
        return DenseResult((yield from check_mean(bucket, own)))
