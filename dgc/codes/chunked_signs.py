"""Scaled signs in two rounds, with error compensation in both directions: what 1-bit Adam and DoubleSqueeze share.

The elements of a bucket are divided into N chunks. Rank r of N is a worker and also the server of chunk r:

    worker i     v = what is exchanged + e_i          send C[v] to the servers       e_i = v - C[v]
    server r     s = sum over i of C[v_i] + d_r       send C[s] to all workers       d_r = s - C[s]
    result       C[s] / N

C[x] = |x|_2 / sqrt(d) sign(x) for each piece of x, with d elements. A piece is the part of one tensor that lies in
one chunk. It is sent as 4 bytes of scale and 4 ceil(d/32) bytes of signs. An element of 0 is sent as a negative
one.

Payload of a bucket in bytes: (N + 1) (24 + B), where B is the size of the largest chunk's C[x], rounded up to 8: a
rank sends about 1 bit per element to the servers and 1/N bit per element from its own.

If a checkpoint is loaded on another number of ranks or with other buckets, elements of d that do not belong to the
rank's new chunk become part of e.
"""

from abc import abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

import dgc.kernels as kernels
from dgc.codes.server_errors import ServerState
from dgc.comm.requests import Conversation
from dgc.core.bucket import Bucket
from dgc.core.dense import DenseCompressor
from dgc.core.envelope import envelope_of
from dgc.core.error_feedback import Codes, join, split
from dgc.core.protocol import Compressor, Position, Vector
from dgc.core.results import Reduced, reported
from dgc.core.state import zeros

WORD = 32  # elements; the signs of a piece fill whole words


@dataclass(frozen=True, eq=False)
class _Chunks:
    """The chunks of a bucket.

    edges: first element of each chunk, and n. bounds: first element of each piece, and n. own: the bounds in this
    rank's chunk, from its beginning. pieces: first piece of each chunk, and their number. bytes: first byte of
    each chunk's signs, and their total. nbytes: size of a chunk's codes.
    """

    edges: list[int]
    bounds: Int64[Tensor, "bounds"]
    own: Int64[Tensor, "own"]
    pieces: list[int]
    bytes: list[int]
    nbytes: int

    def split(self, codes: UInt8[Tensor, "padded"], chunk: int) -> tuple[Float32[Tensor, "pieces"], Codes]:
        """The scales and signs of a chunk, without padding."""
        scales = self.pieces[chunk + 1] - self.pieces[chunk]
        return split(codes[: 4 * scales + self.bytes[chunk + 1] - self.bytes[chunk]], scales)

    def join(self, scales: Float32[Tensor, "pieces"], signs: Codes) -> UInt8[Tensor, "padded"]:
        """The codes of a chunk, padded to the size of the largest."""
        codes = torch.zeros(self.nbytes, dtype=torch.uint8, device=signs.device)
        codes[: 4 * scales.numel() + signs.numel()] = join(scales, signs)
        return codes


def divide_into_chunks(bucket: Bucket, size: int, rank: int) -> _Chunks:
    """Divide a bucket into `size` chunks of equal length, but for the last ones, in whole words."""
    n = bucket.numel
    length = WORD * -(-n // (WORD * size))
    edges = [min(chunk * length, n) for chunk in range(size + 1)]
    bounds = sorted({*(s.offset for s in bucket.segments), *edges})
    pieces = [bounds.index(edge) for edge in edges]
    words = [0]
    for start, end in pairwise(bounds):
        words.append(words[-1] + -(-(end - start) // WORD))
    signs = [4 * words[piece] for piece in pieces]
    own = bounds[pieces[rank] : pieces[rank + 1] + 1]
    sizes = [4 * (b - a) + d - c for (a, b), (c, d) in zip(pairwise(pieces), pairwise(signs), strict=True)]
    return _Chunks(
        edges,
        torch.tensor(bounds, dtype=torch.int64, device=bucket.device),
        torch.tensor([bound - own[0] for bound in own], dtype=torch.int64, device=bucket.device),
        pieces,
        signs,
        max(sizes),
    )


@dataclass(eq=False, kw_only=True)
class ChunkState(ServerState):
    """chunks: The division of the bucket."""

    chunks: _Chunks

    @property
    def _own(self) -> slice:
        return slice(self.chunks.edges[self.rank], self.chunks.edges[self.rank + 1])

    def server_errors(self, bucket: Bucket) -> Vector:
        whole = zeros(bucket)
        whole[self._own] = self.chunk_errors
        return whole

    def own(self, bucket: Bucket, whole: Vector) -> Float32[Tensor, "chunk"]:
        return whole[self._own].clone()


class ChunkedSignsCompressor(Compressor):
    """Base class: scaled signs to the servers and back, with error feedback in both directions."""

    fallback: Compressor = DenseCompressor()
    keeps_server_errors = True

    @property
    def compress_ratio(self) -> float:
        return 1 / 32

    def init(self, bucket: Bucket, size: int, rank: int) -> ChunkState:
        chunks = divide_into_chunks(bucket, size, rank)
        length = chunks.edges[rank + 1] - chunks.edges[rank]
        chunk_errors = torch.zeros(length, dtype=torch.float32, device=bucket.device)
        return ChunkState(size, rank, errors={"errors": zeros(bucket)}, chunks=chunks, chunk_errors=chunk_errors)

    # --- one step ---------------------------------------------------------------------------------

    @abstractmethod
    def accumulate(self, bucket: Bucket, state: Any) -> tuple[Vector, Position]:
        """Returns v, and the index of the first non-finite element of the gradient, or numel."""

    def reduce(self, bucket: Bucket, state: Any) -> Conversation[Reduced]:
        v, first = self.accumulate(bucket, state)
        chunks, mean = state.chunks, torch.zeros_like(v)
        envelope = envelope_of(bucket, bucket.bounds, self.compress_ratio, type(self).__qualname__)
        scales, signs, kept = squeeze(v, chunks.bounds)
        by_piece, by_byte = pairwise(chunks.pieces), pairwise(chunks.bytes)
        rows = [chunks.join(scales[a:b], signs[c:d]) for (a, b), (c, d) in zip(by_piece, by_byte, strict=True)]
        parts, flags = yield from envelope.scatter(torch.stack(rows), first)

        total = state.chunk_errors.clone()  # as the server of a chunk, in rank order
        for part in parts:
            scales, signs = chunks.split(part, state.rank)
            kernels.of(total).quantize.sign_add_(signs, chunks.own, scales, total)
        scales, signs, chunk_errors = squeeze(total, chunks.own)
        gathered, second_flags = yield from envelope.gather(chunks.join(scales, signs), bucket.bounds[-1])

        sections = (chunks.split(codes, r) for r, codes in enumerate(gathered))
        scales, signs = (torch.cat(parts) for parts in zip(*sections, strict=True))
        scales = scales / state.size
        kernels.of(mean).quantize.sign_add_(signs, chunks.bounds, scales, mean)
        bucket.flat.copy_(mean)
        result = reported(bucket, flags.with_checks_of(second_flags))
        new = state.next(errors={"errors": kept}, chunk_errors=chunk_errors)
        return Reduced(result, new, dropped=state.next())


def squeeze(x: Vector, bounds: Int64[Tensor, "bounds"]) -> tuple[Float32[Tensor, "pieces"], Codes, Vector]:
    """Return (scales, signs, x - C[x]). No piece is empty."""
    squares = kernels.of(x).selection.moments(x, bounds).squares
    scales = (squares / bounds.diff()).sqrt().float()
    signs, rest = kernels.of(x).quantize.sign_encode(x, bounds, torch.zeros_like(scales), scales)
    return scales, signs, rest
