"""CHOCO-SGD: gossip with compressed differences (Koloskova, Stich, Jaggi: ICML 2019, arXiv 1902.00340,
Algorithm 2; for deep learning Koloskova, Lin, Stich, Jaggi: ICLR 2020, arXiv 1907.09356).

Each neighbour of rank i has a public copy xhat_i of the model x_i, which the messages of rank i update. With W
symmetric, rows summing to one, and a compression operator Q:

    x_i = x_i - lr O(g(x_i))                           for the direction O of any optimizer
    q_i = Q(x_i - xhat_i), to all neighbours;          xhat_i = xhat_i + q_i
    d_i = d_i + sum over j of W_ij (q_j - q_i)         so that d_i = sum over j of W_ij (xhat_j - xhat_i)
    x_i = x_i + gamma d_i

The part that Q drops stays in x_i - xhat_i and is sent later. The d_i of all ranks sum to zero.

Differences from the papers: d replaces s = d + xhat, the weighted sum of public copies (the memory-efficient
form), in which the rounding errors of x would accumulate. Public copies begin as the initial model, not as zeros.

Payload per exchange and rank in bytes: for each neighbour 24 and the payload of Q, rounded up to a multiple of 8.
TopK: for each element 4 and the bytes of a value, and 4 in 16 bits. Sign: 4 for each tensor, and a bit for each
element.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from dgc.comm.requests import Conversation, as_bytes, read
from dgc.core.arguments import checked
from dgc.core.bucket import Segment
from dgc.core.envelope import PayloadError, sealed_bytes
from dgc.gossip import DifferenceGossip, FP32Message, GossipMessage, HalfPrecisionMessage, metropolis, two_way_ring
from dgc.gossip.messages import Bytes, Vector, exchange, message_of
from dgc.gossip.topology import Graph, Mixing, Peers, Shares
from dgc.sparse.selectors.selector import share

NOMINAL = (Segment("", 0, 1 << 20, (1 << 20,), (1,)),)  # for compress_ratio before the model is known


@checked
@dataclass(frozen=True)
class TopK:
    """The ceil(ratio d) elements of largest magnitude of each tensor of d elements.

    gamma is twice the ratio: with 4 times the ratio, models mostly diverge.

    Args:
        ratio (float): fraction of elements sent, in (0, 1].
        values (str): dtype of the values, "fp32", "fp16" or "bf16".

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> TopK(0.01).gamma
        0.02
    """

    ratio: float = 0.1
    values: str = "fp32"

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be a fraction in (0, 1], not {self.ratio}")
        if self.values != "fp32":
            HalfPrecisionMessage(self.values)

    @property
    def gamma(self) -> float:
        return min(1.0, 2 * self.ratio)

    @property
    def message(self) -> GossipMessage:
        return FP32Message() if self.values == "fp32" else HalfPrecisionMessage(self.values)

    def count(self, segments: Sequence[Segment]) -> int:
        return sum(share(segment.numel, self.ratio) for segment in segments)

    def nbytes(self, segments: Sequence[Segment]) -> int:
        k = self.count(segments)
        return 4 * k + self.message.nbytes(k)

    def encode(self, segments: Sequence[Segment], v: Vector) -> Bytes:
        chosen = [torch.empty(0, dtype=torch.int64, device=v.device)]
        for s in segments:
            part = v[s.offset : s.offset + s.numel].abs()
            chosen.append(part.topk(share(s.numel, self.ratio)).indices + s.offset)
        indices = torch.cat(chosen)
        content = torch.zeros(self.nbytes(segments), dtype=torch.uint8, device=v.device)
        content[: 4 * indices.numel()] = as_bytes(indices.to(torch.int32))
        self.message.encode_(v[indices], 1.0, content[4 * indices.numel() :])
        return content

    def decode(self, segments: Sequence[Segment], content: Bytes) -> Vector:
        k = self.count(segments)
        indices, values = content[: 4 * k].clone().view(torch.int32), content[4 * k :].clone()
        q = torch.zeros(sum(s.numel for s in segments), dtype=torch.float32, device=content.device)
        q[indices.long()] = self.message.decode(values, k)
        return q


@dataclass(frozen=True)
class Sign:
    """(|v|_1 / d) sign(v) of each tensor v of d elements: 1 bit per element. 0 is sent as a negative element.

    Example:
        >>> gossip = CHOCO(quantizer=Sign())
    """

    gamma = 0.3

    def nbytes(self, segments: Sequence[Segment]) -> int:
        return 4 * len(segments) + -(-sum(s.numel for s in segments) // 8)

    def encode(self, segments: Sequence[Segment], v: Vector) -> Bytes:
        parts = v.split([s.numel for s in segments])
        scales = torch.stack([part.abs().sum(dtype=torch.float64) / max(1, part.numel()) for part in parts])
        signs = torch.nn.functional.pad((v > 0).to(torch.uint8), (0, -v.numel() % 8)).view(-1, 8)
        codes = (signs << torch.arange(8, dtype=torch.uint8, device=v.device)).sum(1, dtype=torch.uint8)
        return torch.cat([as_bytes(scales.float()), codes])

    def decode(self, segments: Sequence[Segment], content: Bytes) -> Vector:
        numels = torch.tensor([s.numel for s in segments], dtype=torch.int64, device=content.device)
        scales = content[: 4 * len(segments)].clone().view(torch.float32).repeat_interleave(numels)
        places = torch.arange(8, dtype=torch.uint8, device=content.device)
        signs = (content[4 * len(segments) :].unsqueeze(1) >> places & 1).view(-1)[: scales.numel()]
        return torch.where(signs > 0, scales, -scales)


@checked
class CHOCO(DifferenceGossip):
    """CHOCO-SGD (Koloskova et al. 2019, arXiv 1902.00340, Algorithm 2; 2020, arXiv 1907.09356).

    Args:
        graph, mixing, average_every: as `DifferenceGossip`. The graph is the same in all rounds.
        quantizer (TopK or Sign, optional): compression operator Q; default `TopK()`.
        gamma (float, optional): consensus step size in (0, 1]; None uses the quantizer's. If it is too large,
            models diverge; if it is too small, averaging is slower than the local steps.

    Raises:
        ValueError: if gamma or average_every is out of range.
        TopologyError: by `start`, if the graph or the weights are not valid.

    Example:
        >>> optimizer = LocalOptimizer(optimizer, model.named_parameters(), CHOCO(quantizer=TopK(0.01)))
    """

    static = keeps_start = True

    def __init__(
        self,
        graph: Graph = two_way_ring,
        mixing: Mixing = metropolis,
        quantizer: TopK | Sign | None = None,
        gamma: float | None = None,
        average_every: int = 1,
    ):
        if gamma is not None and not 0 < gamma <= 1:
            raise ValueError(f"gamma must be a step size in (0, 1], or None, not {gamma}")
        super().__init__(graph, mixing, average_every)
        self.quantizer = quantizer or TopK()
        self.gamma = self.quantizer.gamma if gamma is None else gamma
        self.compress_ratio = min(1.0, self.quantizer.nbytes(NOMINAL) / (4 << 20)) / average_every

    def _allocate(self) -> float:
        self.xhat, self.d = self.z.clone(), torch.zeros_like(self.z)
        self._copies_valid = True
        self._digest = 0
        if self.topology is not None:
            W = [sorted(self.mixing(self.topology, rank, 0).items()) for rank in range(self.size)]
            self._digest = crc32(repr(W).encode())
        return sealed_bytes(self.quantizer.nbytes(self.model.segments))

    @torch.no_grad()
    def _average(self) -> Conversation[None]:
        peers, weights = self.neighbours(0)
        if not self._copies_valid:
            yield from self._send_models(peers, weights)
        self.round += 1
        segments = self.model.segments
        content = self.quantizer.encode(segments, self.z - self.xhat)
        own = self.quantizer.decode(segments, content)
        self.xhat.add_(own)
        self.d.sub_(own, alpha=sum(weights[peer] for peer in peers))
        what, sizes = f"a difference of CHOCO by {self.quantizer}", dict.fromkeys(peers, content.numel())
        replies = yield from exchange(dict.fromkeys(peers, message_of(content)), sizes, what, self.z)
        received = {source: self.quantizer.decode(segments, replies[source]) for source in peers}
        finite = yield from read([q.isfinite().all() for q in received.values()])
        for (source, q), is_finite in zip(received.items(), finite, strict=True):
            if not is_finite:
                raise PayloadError(f"rank {source} sent values that are not finite in {what}")
            self.d.add_(q, alpha=weights[source])
        self.z.add_(self.d, alpha=self.gamma)

    def _send_models(self, peers: Peers, weights: Shares) -> Conversation[None]:
        """Makes the public copies valid."""
        self.xhat.copy_(self.z)
        self.d.zero_()
        sizes = dict.fromkeys(peers, self.z.numel() * self.z.element_size())
        replies = yield from exchange(dict.fromkeys(peers, message_of(self.z)), sizes, "a model of CHOCO", self.z)
        for source in peers:
            self.d.add_(replies[source].view(self.z.dtype) - self.xhat, alpha=weights[source])
        self._copies_valid = True

    @torch.no_grad()
    def begin_from(self, z: Tensor) -> None:
        self.xhat.copy_(z)

    @torch.no_grad()
    def restart(self) -> None:
        super().restart()
        self.xhat.copy_(self.z)
        self.d.zero_()
        self._copies_valid = True

    def errors(self) -> Iterable[Tensor]:
        yield self.z - self.xhat

    def _state(self) -> dict[str, Any]:
        copies = {"xhat": self.xhat, "d": self.d}
        return {**super()._state(), **copies, "copies_valid": self._copies_valid, "graph": self._digest}

    def _check_content(self, state: Mapping[str, Any]) -> None:
        if state["size"] == self.size and state["graph"] != self._digest:
            raise ValueError("state of another graph or mixing, in which d is a sum over other neighbours")

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        self.xhat.copy_(state["xhat"])
        self.d.copy_(state["d"])
        self._copies_valid = state["size"] == self.size and state["copies_valid"]
