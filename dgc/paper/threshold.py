"""Gradient compression with 2 bits and with 1 bit, as MXNet's key-value store defines it (apache/mxnet,
src/kvstore/gradient_compression-inl.h).

On each of N workers, for each key (tensor) by itself, with the gradient g and the threshold t:

    v = residual + g
    2 bits   v >= t:  code 11, sent = t;    v <= -t:  code 10, sent = -t;    otherwise code 00, sent = 0
    1 bit    v > t:   code 1, sent = 1;     otherwise code 0, sent = -1
    residual = v - sent
    result = 1/N sum over workers of sent

Codes lie in bytes, the code of the first element in the most significant bits, and fill words of 4 bytes with
zeros.

Payload of a bucket in bytes: 4 sum over tensors of ceil(bits n / 32), and 8. dgc.compression.Threshold sends the
same codes, and on a CPU gives the same bits. But it adds whole numbers and multiplies by t after: with more than
3 workers, and a t that is no power of 2, the last bits of the result may differ.

Differences from MXNet: the workers gather all codes in place of a server, and divide by N. What is not finite: see
feedback.py.
"""

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor
from torch.nn.functional import pad

from dgc.comm.requests import AllGather, Conversation
from dgc.core.bucket import Bucket
from dgc.core.results import Reduced
from dgc.core.state import State
from dgc.paper.feedback import ErrorFeedback, gradient_of, parts_of, result_of


class Threshold(ErrorFeedback):
    """bits: 2 or 1. threshold: t, with 2 bits positive."""

    error = "residual"

    def __init__(self, bits: int = 2, threshold: float = 0.5):
        self.bits, self.t, self.compress_ratio = bits, threshold, bits / 32

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        (g, bad), residual = gradient_of(bucket), state.errors["residual"]
        v = residual + g
        codes = torch.cat([self.quantize(part) for part in parts_of(bucket, v)])
        residual = v - self.dequantize(codes, bucket)
        codes, flags = yield (AllGather(codes), AllGather(bad))
        total = torch.zeros_like(v)
        for own in codes:
            total = total + self.dequantize(own, bucket)
        result = result_of(bucket, total / len(codes), flags)
        return Reduced(result, state.next(errors={"residual": residual}), state.next(errors={"residual": v}))

    def quantize(self, v: Float32[Tensor, "n"]) -> UInt8[Tensor, "nbytes"]:
        """The codes of one key: 4 ceil(bits n / 32) bytes."""
        t = v.new_tensor(self.t)
        codes = 3 * (v >= t) + 2 * (v <= -t) if self.bits == 2 else 1 * (v > t)
        fields = pad(codes, (0, -len(v) % (32 // self.bits))).view(-1, 8 // self.bits)
        return (fields << self.shifts(v)).sum(1).to(torch.uint8)

    def dequantize(self, codes: UInt8[Tensor, "nbytes"], bucket: Bucket) -> Float32[Tensor, "n"]:
        """What the codes of all keys of a bucket stand for."""
        sent = [0.0, 0.0, -self.t, self.t] if self.bits == 2 else [-1.0, 1.0]
        fields = (codes.long()[:, None] >> self.shifts(codes)) & (2**self.bits - 1)
        values = torch.tensor(sent, dtype=torch.float32, device=codes.device)[fields.view(-1)]
        word = 32 // self.bits
        keys = values.split([-(-s.numel // word) * word for s in bucket.segments])
        return torch.cat([key[: s.numel] for key, s in zip(keys, bucket.segments, strict=True)])

    def shifts(self, like: Tensor) -> Int64[Tensor, "fields"]:
        """Of the codes in a byte: 6, 4, 2, 0 or 7, 6, .. 0."""
        return torch.arange(8 - self.bits, -1, -self.bits, dtype=torch.int64, device=like.device)
