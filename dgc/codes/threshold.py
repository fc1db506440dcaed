"""Threshold quantization of MXNet's key-value store, with 2 bits or 1 bit, and with thresholds from the data.

    2 bits   v = g + e;   v >= t: send t,   v <= -t: send -t,   else 0;    e = v - what was sent
    1 bit    v = g + e;   v > t: send 1,    else -1;                       e = v - what was sent

The codes of each tensor equal MXNet's, byte for byte: `dgc.paper.threshold`. If `threshold` is None (2 bits), t is
the mean over the ranks of `factor` times the root mean square of v in each tensor. A gradient c g then sends c
times what g sends. For a Laplace distribution, factor = 1 gives the least error. Heavier tails raise t. A multiple
of mean |v| would not follow them, and large elements would wait long.

Exchanges (size: number of ranks N; C: bytes of the codes of a bucket):

    gather   all ranks gather all codes                                               C to each rank
    scatter  rank r adds up its share of all codes as integers. Then all ranks gather the sums, packed into
             b = ceil(log2(2 N + 1)) bits (1 bit: ceil(log2(N + 1))): the volume does not grow with N
    server   like scatter, but sums are gathered in fp32, as between a worker and a parameter server
    auto     gather with two ranks, scatter with more

All exchanges give the same bits. Payload of a bucket in bytes, each part rounded up to 8 and with 24 for a header:
gather C; scatter N parts of C / N, and the share in b bits; server N parts of C / N, and 4 per element of the
share; thresholds from the data 4 per tensor more, without a header.

Differences from MXNet: The result is the mean, where MXNet's servers return the sum; a learning rate N times as
large is equivalent. Tensors of any size and dtype are accepted.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.comm.requests import AllReduce, Conversation
from dgc.core.arguments import checked
from dgc.core.bucket import Bucket
from dgc.core.dense import place_of_mean
from dgc.core.envelope import Flags
from dgc.core.error_feedback import ErrorFeedbackCompressor, Mean
from dgc.core.protocol import Position, Use, Vector, check_choice
from dgc.core.state import State

WORD = 4


@checked
class ThresholdCompressor(ErrorFeedbackCompressor):
    """Threshold quantization with error feedback, as defined by MXNet's key-value store.

    Args:
        bits (int): bits per element, 2 or 1.
        threshold (float, optional): t, in the unit of the gradients; 0.5 in MXNet. With 2 bits it is positive, or
            None to take it from the data. With 1 bit it is a finite number, usually 0.
        factor (float): t as a multiple of the root mean square of v, if threshold is None.
        wire (str): "gather", "scatter", "server" or "auto"; see the module's description.
        error_feedback (bool): as `ErrorFeedbackCompressor`.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> compression = ThresholdCompressor(bits=2, threshold=None)
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression)
    """

    unsuited: Mapping[Use, str] = {
        Use.ADAM: "is for SGD: its updates differ in size from step to step, and Adam divides by that, "
        "see docs/language.md#methods-on-these-tasks"
    }

    bits: int

    def __init__(
        self,
        bits: int = 2,
        threshold: float | None = 0.5,
        factor: float = 1.0,
        wire: str = "auto",
        error_feedback: bool = True,
    ):
        if bits not in (1, 2):
            raise ValueError(f"bits must be 1 or 2, not {bits}")
        if bits == 2 and threshold is not None and not (0 < threshold < math.inf):
            raise ValueError(f"threshold must be positive, or None to take it from the data, not {threshold}")
        if bits == 1 and (threshold is None or not math.isfinite(threshold)):
            raise ValueError(f"with 1 bit threshold must be a number, not {threshold}; 0 is usual")
        if not 0 < factor < math.inf:
            raise ValueError(f"factor must be positive, not {factor}")
        check_choice(("auto", "gather", "scatter", "server"), wire=wire)
        super().__init__(error_feedback)
        self.bits, self.threshold, self.factor, self.wire = bits, threshold, factor, wire

    def nbytes(self, bucket: Bucket) -> int:
        """Bytes of the codes of a bucket, C."""
        return sum(WORD * -(-s.numel * self.bits // 32) for s in bucket.segments)

    def init(self, bucket: Bucket, size: int, rank: int) -> State:
        state = super().init(bucket, size, rank)
        if self.threshold is None:
            return state
        each = torch.full((len(bucket.segments),), self.threshold, dtype=torch.float32, device=bucket.device)
        return replace(state, constants={"thresholds": each})

    def code(self, bucket: Bucket, state: State) -> kernels.ElementCode | None:
        if not self._gathers(state):
            return None
        form = kernels.Form.TERNARY if self.bits == 2 else kernels.Form.CUTS
        scale = kernels.Scale.NONE if self.threshold is not None else kernels.Scale.SPREAD
        return kernels.ElementCode(form, scale, bucket.bounds, self.bits, factor=self.factor)

    def given(self, state: State, measured: kernels.Measured) -> Conversation[Tensor | None]:
        if self.threshold is not None:
            return state.constants["thresholds"]
        (t,) = yield (AllReduce(measured.values[0]),)
        return t

    def _gathers(self, state: State) -> bool:
        return self.wire == "gather" or (self.wire == "auto" and state.size <= 2)

    def exchange(self, bucket: Bucket, state: State, v: Vector, first_nonfinite: Position) -> Mean:
        bounds = bucket.bounds
        if self.threshold is not None:
            t = state.constants["thresholds"]
        else:
            squares = kernels.of(v).selection.moments(v, bounds).squares / bounds.diff().clamp(min=1)
            (t,) = yield (AllReduce((self.factor * squares.sqrt()).float()),)
            # t = 0 means that the tensor is zero on every rank. If the mean overflows fp32, nothing is sent.
            t = t.nan_to_num(torch.inf)
        quantizers, how = kernels.of(v).quantize, (self.error_feedback, state.scratch.get("errors"))
        if self.bits == 2:
            codes, kept = quantizers.tern_encode(v, bounds, t, *how)
            unit = t.nan_to_num(0.0, posinf=0.0)
        else:
            unit = torch.ones_like(t)
            codes, kept = quantizers.sign_encode(v, bounds, t, unit, *how)
        if self._gathers(state):
            parts, flags = yield from self.envelope(bucket).gather(codes, first_nonfinite)
            mean = place_of_mean(bucket)
            quantizers.units_mean_(parts, bounds, self.bits, unit, state.size, mean)
        else:
            mean, flags = yield from self._scatter(bucket, state.size, codes, first_nonfinite, unit)
        return mean, kept, flags

    def _scatter(
        self, bucket: Bucket, size: int, codes: Tensor, first_nonfinite: Tensor, unit: Float32[Tensor, "S"]
    ) -> Conversation[tuple[Vector, Flags]]:
        share = WORD * -(-codes.numel() // (WORD * size))  # bytes per rank, padded at the end
        padded = torch.zeros(size, share, dtype=torch.uint8, device=codes.device)
        padded.view(-1)[: codes.numel()] = codes
        envelope, finite = self.envelope(bucket), bucket.bounds[-1]
        parts, flags = yield from envelope.scatter(padded, first_nonfinite)
        # the range of a sum is -N .. N; with 1 bit only every second value occurs
        bits = math.ceil(math.log2(2 * size + 1 if self.bits == 2 else size + 1))
        fields, quantizers = share * 8 // self.bits, kernels.of(codes).quantize
        whole = _whole(fields, codes.device)
        if self.wire != "server" and bits <= 8:
            sums = quantizers.pack_sums(parts, whole, self.bits, bits)
            packed, later = yield from envelope.gather(sums, finite)
            mean = place_of_mean(bucket)
            quantizers.sums_mean_(packed, fields, self.bits, bits, bucket.bounds, unit, mean)
        else:
            own = torch.empty(fields, dtype=torch.float32, device=codes.device)
            quantizers.units_mean_(parts, whole, self.bits, None, 1, own)
            kind = torch.float32 if self.wire == "server" else torch.int16  # more than 8 bits
            shares, later = yield from envelope.gather(own.to(kind).view(torch.uint8), finite)
            total = torch.cat([part.clone().view(kind) for part in shares]).float()
            mean = place_of_mean(bucket)
            word, at = 32 // self.bits, 0
            for segment, factor in zip(bucket.segments, unit, strict=True):
                place = mean[segment.offset : segment.offset + segment.numel]
                torch.mul(total[at : at + segment.numel], factor, out=place)
                at += -(-segment.numel // word) * word  # fields that only fill words are left out
            mean.div_(size)
        return mean, flags.with_checks_of(later)


@cache
def _whole(fields: int, device: torch.device) -> Int64[Tensor, "2"]:
    """One segment of this many fields, cached: a new tensor would cost a copy that the host waits for."""
    return torch.tensor([0, fields], dtype=torch.int64, device=device)
