"""PowerGossip: low-rank gossip with differences of models (Vogels, Karimireddy, Jaggi: NeurIPS 2020,
arXiv 2008.01425).

For each matrix X [n, m] of the model, D = X_j - X_i on the edge of ranks i and j. Both ends have the same factor.
Half steps alternate:

    even    X_i V and X_j V [n, r] are exchanged;      Y = D V;      X_i = X_i + W_ij Y V^T;      U = orth(Y)
    odd     X_i^T U and X_j^T U [m, r] are exchanged;  Y = D^T U;    X_i = X_i + W_ij U Y^T;      V = orth(Y)

X_j moves by the opposite amount. Each half step acts on the part of D in r directions, which come from a power
iteration on D that continues from step to step. There is no residual: the unsent part of D is still in D in the
next step. Vectors, and matrices smaller than their factors, are sent uncompressed.

Differences from the paper: There are 2 half steps per step by default, after the optimizer's step. Each edge
alternates by itself, so graphs may change from round to round. Small noise, the same at both ends, keeps `orth`
from losing directions if D is or was zero. All edges begin with the same V.

Payload per step and neighbour in bytes: 4 for each uncompressed element, and in each half step 24, and for each
other matrix 4 r n or 4 r m, r = min(rank, n, m), rounded up to a multiple of 8.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from dgc.comm.requests import Conversation
from dgc.core.arguments import WHOLE, checked, require
from dgc.core.bucket import Segment
from dgc.core.envelope import sealed_bytes
from dgc.gossip.graphs import two_way_ring
from dgc.gossip.messages import exchange, message_of
from dgc.gossip.model import ModelSlice
from dgc.gossip.protocol import DifferenceGossip
from dgc.gossip.topology import Graph, Mixing, metropolis, peer_schedule

NOISE = 1e-6  # of a factor's norm

Factor = Float32[Tensor, "n r"]


@dataclass(frozen=True)
class Matrix:
    """A tensor as n x m in memory order: its outermost dimension, and the others."""

    offset: int
    n: int
    m: int
    r: int

    def of(self, z: Tensor) -> Float32[Tensor, "n m"]:
        return z[self.offset : self.offset + self.n * self.m].view(self.n, self.m)

    def sizes(self, even: bool) -> tuple[int, int]:
        """Number of rows of the common factor, and of the product."""
        return (self.m, self.n) if even else (self.n, self.m)


def as_matrix(segment: Segment, rank: int, half_steps: int) -> Matrix | None:
    """The matrix of a tensor, or None if the tensor is sent uncompressed."""
    dimensions = [(stride, size) for stride, size in zip(segment.stride, segment.shape, strict=True) if size > 1]
    if len(dimensions) < 2:
        return None
    n = max(dimensions)[1]
    m = segment.numel // n
    r = min(rank, n, m)
    return Matrix(segment.offset, n, m, r) if half_steps * r * (n + m) < 2 * n * m else None


@dataclass(eq=False)
class Edge:
    """factors: V of each matrix before an even half step, U before an odd one."""

    factors: list[Factor]
    even: bool = True


def orthonormal(Y: Factor, noise: Factor) -> Factor:
    """An orthonormal basis of Y's columns, or of the noise's columns if Y is zero."""
    largest = Y.abs().max().clamp(min=1e-30)  # squares of tiny numbers would underflow in a norm
    Y = Y / largest
    return torch.linalg.qr(Y / Y.norm().clamp(min=NOISE) + NOISE * noise).Q.contiguous()


@checked
class PowerGossip(DifferenceGossip):
    """Low-rank gossip with differences of models (Vogels et al. 2020, arXiv 2008.01425).

    Args:
        graph, mixing, average_every: as `DifferenceGossip`. The graph may change from round to round.
        rank (int): rank r of the factors. A larger rank sends more bytes and averages faster.
        num_iters_per_step (int): half steps per step. Each is one exchange that a rank waits for.
        seed (int): seed of the initial factors, the same on every rank.

    Raises:
        ValueError: if a number is less than 1, or by `start` if no tensor is a large enough matrix.
        TopologyError: as by `DifferenceGossip`.

    Example:
        >>> optimizer = LocalOptimizer(optimizer, model.named_parameters(), PowerGossip(rank=2))
    """

    _resizable = ("edges",)

    def __init__(
        self,
        graph: Graph = two_way_ring,
        mixing: Mixing = metropolis,
        rank: int = 1,
        num_iters_per_step: int = 2,
        seed: int = 0,
        average_every: int = 1,
    ):
        require("at least 1", WHOLE, least=1, rank=rank, num_iters_per_step=num_iters_per_step)
        super().__init__(graph, mixing, average_every)
        self.factor_rank, self.num_iters_per_step, self.seed = rank, num_iters_per_step, seed

    def _allocate(self) -> float:
        if isinstance(self.model, ModelSlice):
            raise ValueError(
                "HierarchicalGossip averages slices of a model, which have no matrices for PowerGossip: use CHOCO"
            )
        tensors = [(s, as_matrix(s, self.factor_rank, self.num_iters_per_step)) for s in self.model.segments]
        self.matrices = [matrix for _, matrix in tensors if matrix is not None]
        if not self.matrices:
            raise ValueError(
                f"PowerGossip of rank {self.factor_rank} would send all {len(tensors)} tensors uncompressed: none "
                "of them is a matrix that is large enough. Use DPSGD, or CHOCO, which also compresses vectors"
            )
        bounds = [(s.offset, s.offset + s.numel) for s, matrix in tensors if matrix is None]
        self._uncompressed = [self.z[start:end] for start, end in bounds]
        generator = torch.Generator().manual_seed(self.seed)

        def random(rows: int, columns: int) -> Factor:
            numbers = torch.randn(rows, columns, generator=generator, dtype=torch.float32)
            return torch.linalg.qr(numbers).Q.to(self.z)

        self._random_factors = {
            even: [random(matrix.sizes(even)[0], matrix.r) for matrix in self.matrices] for even in (True, False)
        }
        self._edges: dict[int, Edge] = {}
        topology, ranks = self.topology, range(self.size)
        peers_of_all = [set(() if topology is None else peer_schedule(topology, rank)) for rank in ranks]
        self._peers, self._max_edges = peers_of_all[self.rank], max(map(len, peers_of_all))
        # in the state: the peer, from 1; whether an even half step is next; the larger factor of each matrix
        self._row_length = 2 + sum(max(matrix.n, matrix.m) * matrix.r for matrix in self.matrices)
        first = sum(part.numel() for part in self._uncompressed)
        factors = [sum(matrix.r * matrix.sizes(even)[1] for matrix in self.matrices) for even in (True, False)]

        def nbytes(begin: int) -> int:
            sent = [factors[(begin + h) % 2] for h in range(self.num_iters_per_step)]
            return sum(sealed_bytes(4 * (n + (first if h == 0 else 0))) for h, n in enumerate(sent))

        # an odd number of half steps begins with the other side in every second step
        return nbytes(0) if self.num_iters_per_step % 2 == 0 else (nbytes(0) + nbytes(1)) / 2

    @torch.no_grad()
    def _average(self) -> Conversation[None]:
        peers, weights = self.neighbours(self.round)
        self.round += 1
        edges = {peer: self._edges.setdefault(peer, Edge(list(self._random_factors[True]))) for peer in peers}
        for h in range(self.num_iters_per_step):
            uncompressed = self._uncompressed if h == 0 else []
            own = {peer: self._products(edge, uncompressed) for peer, edge in edges.items()}
            sends = {peer: message_of(message) for peer, message in own.items()}
            sizes = {peer: 4 * message.numel() for peer, message in own.items()}
            replies = yield from exchange(sends, sizes, "a message of PowerGossip", self.z)
            for peer, edge in edges.items():
                sign = 1.0 if self.rank < peer else -1.0
                difference = replies[peer].view(torch.float32) - own[peer]
                self._apply_difference(edge, difference, weights[peer], uncompressed, sign)

    def _products(self, edge: Edge, uncompressed: Sequence[Tensor]) -> Float32[Tensor, "length"]:
        pairs = zip((matrix.of(self.z) for matrix in self.matrices), edge.factors, strict=True)
        return torch.cat([*uncompressed, *(((X if edge.even else X.T) @ factor).view(-1) for X, factor in pairs)])

    def _apply_difference(
        self, edge: Edge, difference: Tensor, weight: float, uncompressed: Sequence[Tensor], sign: float
    ) -> None:
        """difference: the neighbour's message minus this rank's. sign: makes Y the same at both ends."""
        lengths = [matrix.sizes(edge.even)[1] * matrix.r for matrix in self.matrices]
        parts = difference.split([*(part.numel() for part in uncompressed), *lengths])
        for part, d in zip(uncompressed, parts, strict=False):
            part.add_(d, alpha=weight)
        products = parts[len(uncompressed) :]
        for i, (matrix, Y, factor) in enumerate(zip(self.matrices, products, edge.factors, strict=True)):
            Y = Y.view(-1, matrix.r)
            left, right = (Y, factor) if edge.even else (factor, Y)
            matrix.of(self.z).addmm_(left, right.T, alpha=weight)
            edge.factors[i] = orthonormal(Y * sign, self._random_factors[not edge.even][i])
        edge.even = not edge.even

    def _state(self) -> dict[str, Any]:
        # one row per edge, of equal length on all ranks, so that another number of ranks can sum such states
        rows = self.z.new_zeros(self._max_edges, self._row_length)
        for row, (peer, edge) in zip(rows, self._edges.items(), strict=False):
            factors = torch.cat([factor.reshape(-1) for factor in edge.factors])
            row[0], row[1] = peer + 1, edge.even
            row[2 : 2 + factors.numel()] = factors
        return {**super()._state(), "edges": rows}

    def _check_content(self, state: Mapping[str, Any]) -> None:
        rows = state["edges"]
        if state["size"] == self.size and (rows.dim() != 2 or rows.shape[1] != self._row_length):
            raise ValueError("state of another model, or of PowerGossip with another rank")

    def _load(self, state: Mapping[str, Any]) -> None:
        rows, is_of_these_ranks = state["edges"].to(self.z), state["size"] == self.size
        super()._load(state)
        self._edges = {}
        for row in rows if is_of_these_ranks else ():
            peer = int(row[0]) - 1
            if peer not in self._peers:
                continue
            even = bool(row[1])
            heights = [matrix.sizes(even)[0] for matrix in self.matrices]
            lengths = [height * matrix.r for height, matrix in zip(heights, self.matrices, strict=True)]
            factors = row[2 : 2 + sum(lengths)].split(lengths)
            shaped = [f.view(height, -1).clone() for f, height in zip(factors, heights, strict=True)]
            self._edges[peer] = Edge(shaped, even)
