"""Base classes of compressors with a dense result: error feedback, seeds, and codes that all ranks gather."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeAlias
from zlib import crc32

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

import dgc.kernels as kernels
from dgc.comm.requests import Conversation
from dgc.core.arguments import checked
from dgc.core.bucket import Bucket
from dgc.core.dense import DenseCompressor, place_of_mean
from dgc.core.envelope import Envelope, Flags, envelope_of
from dgc.core.protocol import Compressor, Position, Repeats, Vector
from dgc.core.results import DenseResult, Reduced, reported, reported_mean
from dgc.core.state import State, zeros

Codes = UInt8[Tensor, "nbytes"]
Mean: TypeAlias = Conversation[tuple[Tensor, Tensor, Flags]]  # see `ErrorFeedbackCompressor.exchange`


@checked
class ErrorFeedbackCompressor(Compressor):
    """Base class of compressors with a dense result.

        v = g + e                e: residual of earlier steps
        (mean, e) = exchange(v)  mean over ranks of the sent values, and this rank's new residual

    NaN and TOO_LARGE in g count as zero and are flagged. Tensors that the method does not accept go to `fallback`.

    Args:
        error_feedback (bool): keep what a step does not send and add it to the next gradient.
        seed (int): seed of all random numbers.
    """

    fallback: Compressor = DenseCompressor()
    bits: float  # of an element's code

    def __init__(self, error_feedback: bool = True, seed: int = 0):
        self.error_feedback, self._seed = error_feedback, seed

    @property
    def compress_ratio(self) -> float:
        return self.bits / 32

    @abstractmethod
    def exchange(self, bucket: Bucket, state: State, v: Vector, first_nonfinite: Position) -> Mean:
        """Returns (mean [n] fp32, residual [n] fp32, what the envelope returns of the ranks' gradients).

        v must not change, and the residual must be a separate tensor, such as `state.scratch.get("errors")`.
        Without error feedback the residual is not used. The mean may be `place_of_mean(bucket)`, which without
        error feedback is v.
        """

    def init(self, bucket: Bucket, size: int, rank: int) -> State:
        return State(size, rank, errors={"errors": zeros(bucket)} if self.error_feedback else {})

    def code(self, bucket: Bucket, state: State) -> kernels.ElementCode | None:
        """The code of the elements, if kernels for whole steps may encode it in place of `exchange`."""
        return None

    def repeats(self, bucket: Bucket, state: State) -> Repeats | None:
        coder = kernels.of(bucket.bounds).coder
        code = None if coder is None else self.code(bucket, state)
        if coder is None or code is None or not coder.takes(code):
            return None
        return Repeats((), (kernels.seed_word(self.noise(bucket, state)),) if code.random else ())

    def given(self, state: State, measured: kernels.Measured) -> Conversation[Tensor | None]:
        """The cuts or thresholds of the code, if it has them, after the first pass of kernels for whole steps."""
        yield from ()
        return None

    def reduce(self, bucket: Bucket, state: State) -> Conversation[Reduced]:
        coder = kernels.of(bucket.bounds).coder
        code = None if coder is None else self.code(bucket, state)
        if coder is not None and code is not None and coder.takes(code):
            return (yield from self._reduce_coded(coder, code, bucket, state))
        v, first_nonfinite = accumulated(bucket, state)
        mean, kept, flags = yield from self.exchange(bucket, state, v, first_nonfinite)
        bucket.flat.copy_(mean)
        return self._outcome(bucket, state, reported(bucket, flags), kept)

    def _reduce_coded(
        self, coder: kernels.ElementCoder, code: kernels.ElementCode, bucket: Bucket, state: State
    ) -> Conversation[Reduced]:
        """As `reduce`, with the same bits, in two passes before the payloads are gathered and one after it."""
        gradients = bucket.gradients
        if not self.error_feedback:
            bucket.release()  # the bucket's own memory takes v, and would copy them
        v = state.errors["errors"] if self.error_feedback else place_of_mean(bucket)
        measured = coder.measure_(code, gradients, v, self.error_feedback)
        bucket.release()
        given = yield from self.given(state, measured)
        envelope, seed = self.envelope(bucket), self.noise(bucket, state) if code.random else None
        how = (given, seed, self.error_feedback, envelope.bounds, envelope.terms, state.scratch.get("errors"))
        payload, kept = coder.encode(code, v, measured, *how)

        def decode(payloads: list[Tensor]) -> Tensor:
            return coder.mean_into_(bucket.flat, code, payloads, given)

        written = yield from envelope.gather_sealed(payload, decode)
        return self._outcome(bucket, state, reported_mean(bucket, written), kept)

    def _outcome(self, bucket: Bucket, state: State, result: DenseResult, kept: Tensor) -> Reduced:
        if not self.error_feedback:
            new = state.next()
            return Reduced(result, new, dropped=new)
        # the next step overwrites the residual of the state that is not taken
        before = state.errors["errors"]
        keeps = bucket.keeps_scratch or kept.is_cpu  # PyTorch itself keeps the memory of other devices
        new = state.next(errors={"errors": kept}, scratch={"errors": before} if keeps else {})
        return Reduced(result, new, dropped=state.next(scratch={"errors": kept} if keeps else {}))

    def envelope(self, bucket: Bucket) -> Envelope:
        """The envelope of this bucket's payloads."""
        return envelope_of(bucket, bucket.bounds, self.compress_ratio, type(self).__qualname__)

    def noise(self, bucket: Bucket, state: State, *, same_on_all_ranks: bool = False) -> int:
        """A 32-bit seed for this bucket and step: different on each rank, or `same_on_all_ranks`."""
        owner = "all" if same_on_all_ranks else state.rank
        return crc32(f"{self._seed} {owner} {bucket.segments[0].name} {state.steps}".encode())


class AllGatherCompressor(ErrorFeedbackCompressor):
    """Base class of compressors with one code per element. All ranks gather all codes, and sum them in rank order.

    Payload of a bucket in bytes: 24 + bytes of the codes, rounded up to 8. The nominal ratio is bits / 32.
    """

    @abstractmethod
    def nbytes(self, bucket: Bucket) -> int:
        """Bytes of the codes, the same on every rank and in every step."""

    @abstractmethod
    def encode(self, bucket: Bucket, state: State, v: Vector) -> tuple[Codes, Vector]:
        """Returns (codes, v minus the decoded codes, which may be empty without error feedback)."""

    @abstractmethod
    def mean_(self, bucket: Bucket, state: State, codes: Sequence[Codes], mean: Vector) -> None:
        """Overwrites `mean` with the mean of the decoded codes of all ranks: added to zero in rank order."""

    def exchange(self, bucket: Bucket, state: State, v: Vector, first_nonfinite: Position) -> Mean:
        codes, kept = self.encode(bucket, state, v)
        parts, flags = yield from self.envelope(bucket).gather(codes, first_nonfinite)
        mean = place_of_mean(bucket)
        self.mean_(bucket, state, parts, mean)
        return mean, kept, flags


def accumulated(bucket: Bucket, state: State) -> tuple[Vector, Position]:
    """Releases the gradients, and returns v = g + e with the index of the first non-finite element, or numel.

    With error feedback v is the residual, in place. Otherwise it may be `place_of_mean(bucket)`.
    """
    gradients = bucket.gradients
    if "errors" in state.errors:
        v = state.errors["errors"]
        first_nonfinite = kernels.of(v).selection.accumulate_(kernels.PassInputs(gradients, None, v))
        bucket.release()
        return v, first_nonfinite
    bucket.release()  # the bucket's own memory takes v, and would copy them
    v = place_of_mean(bucket)
    return v, kernels.of(v).selection.assign_(gradients, v)


def clone(v: Vector, state: State) -> Vector:
    """A copy of v, which becomes the residual."""
    memory = state.scratch.get("errors")
    return v.clone() if memory is None else memory.copy_(v)


def join(header: Float32[Tensor, "length"], codes: Codes) -> UInt8[Tensor, "total"]:
    """The bytes of a header, followed by codes."""
    return torch.cat([header.contiguous().view(torch.uint8), codes])


def split(joined: UInt8[Tensor, "total"], length: int) -> tuple[Float32[Tensor, "length"], Codes]:
    """Inverse of `join` for a header of `length` floats, which is copied because it may be unaligned."""
    edge = 4 * length
    return joined[:edge].clone().view(torch.float32), joined[edge:]


def split_all(
    codes: Sequence[UInt8[Tensor, "total"]], length: int
) -> tuple[Float32[Tensor, "ranks length"], list[Codes]]:
    """The headers of all ranks, and their codes."""
    edge = 4 * length
    headers = (
        torch.stack([joined[:edge] for joined in codes]).view(-1).view(torch.float32).view(len(codes), length)
    )
    return headers, [joined[edge:] for joined in codes]
