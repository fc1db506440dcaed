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

Payload per exchange and rank in bytes: for each neighbour that of Q, rounded up to a multiple of 8. TopK: 24, and
for each element 4 and the bytes of a value. Sign: 24, and 4 + 4 ceil(d/32) for each tensor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from zlib import crc32

import torch
from jaxtyping import Int64
from torch import Tensor

import dgc.kernels as kernels
from dgc.arguments import checked
from dgc.bucket import Segment
from dgc.comm.requests import Conversation, Exchange, as_bytes
from dgc.gossip.graphs import two_way_ring
from dgc.gossip.messages import FP32, Bytes, Vector, exchange, message_of, opened, write_header_
from dgc.gossip.protocol import DifferenceGossip
from dgc.gossip.topology import Graph, Mixing, Peers, Shares, metropolis
from dgc.kernels import SparseVector
from dgc.selection.selector import plan_selection
from dgc.wire import CastValues, PlainIndices, SparseFormat
from dgc.wire.envelope import sealed_bytes
from dgc.wire.payload import PayloadPlan

DIFFERENCE = "a difference of CHOCO"
NOMINAL = (Segment("", 0, 1 << 20, (1 << 20,), (1,)),)  # for compress_ratio before the model is known

Bounds = Int64[Tensor, "bounds"]
AddScaled = Callable[[Vector, float], object]  # adds Q(v), times a factor, to a vector


@checked
@dataclass(frozen=True)
class TopK:
    """The ceil(ratio d) elements of largest magnitude of each tensor of d elements, in the format of `dgc.wire`.

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
        CastValues(self.values)

    @property
    def gamma(self) -> float:
        return min(1.0, 2 * self.ratio)

    def plan(self, segments: Sequence[Segment], device: torch.device) -> PayloadPlan:
        form = SparseFormat(CastValues(self.values), PlainIndices("int32"))
        selection = plan_selection(segments, self.ratio, device)
        numel = sum(segment.numel for segment in segments)
        return PayloadPlan(form, selection.per_tensor, numel, what=DIFFERENCE)

    def nbytes(self, plan: PayloadPlan) -> int:
        return plan.layout.nbytes

    def encode(self, plan: PayloadPlan, v: Vector) -> tuple[Bytes, AddScaled]:
        """Returns the payload, and what adds its decoded value."""
        chosen = kernels.of(v).selection.select(v, plan.budget)
        encoded = plan.encode(kernels.of(v).codec, chosen.elements, chosen.first_nonfinite)
        return encoded.payload, self._add(encoded.sent)

    def decode(self, plan: PayloadPlan, payload: Bytes, source: int) -> AddScaled:
        """Raises PayloadError, which names the rank `source`, if the payload is not valid."""
        (sent,), _ = plan.decode(kernels.of(payload).codec, (payload,), ranks=(source,)).wait()
        return self._add(sent)

    def _add(self, sent: SparseVector) -> AddScaled:
        return lambda target, factor: target.index_add_(0, sent.indices, sent.values, alpha=factor)


@dataclass(frozen=True)
class Sign:
    """(|v|_1 / d) sign(v) of each tensor v of d elements: 1 bit per element. 0 is sent as a negative element.

    Example:
        >>> gossip = CHOCO(quantizer=Sign())
    """

    gamma = 0.3

    def plan(self, segments: Sequence[Segment], device: torch.device) -> tuple[Bounds, int]:
        bounds = [0, *(segment.offset + segment.numel for segment in segments)]
        codes = sum(FP32 + FP32 * -(-segment.numel // 32) for segment in segments)
        return torch.tensor(bounds, dtype=torch.int64, device=device), codes

    def nbytes(self, plan: tuple[Bounds, int]) -> int:
        return sealed_bytes(plan[1])

    def encode(self, plan: tuple[Bounds, int], v: Vector) -> tuple[Bytes, AddScaled]:
        bounds, _ = plan
        sums = kernels.of(v).selection.moments(v, bounds).magnitudes
        scales = (sums / bounds.diff().clamp(min=1)).float()
        values = (torch.zeros_like(scales), -scales, scales)
        codes, _ = kernels.of(v).quantize.sign_encode(v, bounds, *values, keep=False)
        both = torch.cat([as_bytes(scales), codes])
        payload = message_of(both)
        write_header_(payload, DIFFERENCE)
        return payload, self._add(bounds, both)

    def decode(self, plan: tuple[Bounds, int], payload: Bytes, source: int) -> AddScaled:
        bounds, nbytes = plan
        (both,), _ = opened(payload, nbytes, DIFFERENCE, source).wait()
        return self._add(bounds, both)

    def _add(self, bounds: Bounds, both: Bytes) -> AddScaled:
        scales = both[: FP32 * (bounds.numel() - 1)].clone().view(torch.float32)
        q = torch.zeros(int(bounds[-1]), dtype=torch.float32, device=both.device)
        kernels.of(q).quantize.sign_add_(both[FP32 * scales.numel() :].clone(), bounds, -scales, scales, q)
        return lambda target, factor: target.add_(q, alpha=factor)


@checked
class CHOCO(DifferenceGossip):
    """CHOCO-SGD (Koloskova et al. 2019, arXiv 1902.00340, Algorithm 2; 2020, arXiv 1907.09356).

    Args:
        graph (callable): returns the topology for a number of ranks. Symmetric and the same in all rounds.
        mixing (Mixing): weights W, symmetric with rows that sum to one.
        quantizer (TopK or Sign, optional): compression operator Q; default `TopK()`.
        gamma (float, optional): consensus step size in (0, 1]; None uses the quantizer's. If it is too large,
            models diverge; if it is too small, averaging is slower than the local steps.
        average_every (int): steps between two exchanges. Above 1, ranks train alone in between.

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
        plan = cast(Any, self.quantizer.plan(NOMINAL, torch.device("cpu")))
        ratio = self.quantizer.nbytes(plan) / (4 << 20)
        self.compress_ratio = min(1.0, ratio) / average_every

    def _allocate(self) -> float:
        self._plan = cast(Any, self.quantizer.plan(self.model.segments, self.z.device))
        self.xhat, self.d = self.z.clone(), torch.zeros_like(self.z)
        self._copies_valid = True
        self._digest = 0
        if self.topology is not None:
            W = [sorted(self.mixing(self.topology, rank, 0).items()) for rank in range(self.size)]
            self._digest = crc32(repr(W).encode())
        return self.quantizer.nbytes(self._plan)

    @torch.no_grad()
    def _average(self) -> Conversation[None]:
        peers, weights = self.neighbours(0)
        if not self._copies_valid:
            yield from self._send_models(peers, weights)
        payload, q = self.quantizer.encode(self._plan, self.z - self.xhat)
        q(self.xhat, 1.0)
        q(self.d, -sum(weights[peer] for peer in peers))
        self.round += 1
        empty = {source: torch.empty_like(payload) for source in peers}
        (replies,) = yield (Exchange(dict.fromkeys(peers, payload), empty),)
        for source in peers:
            self.quantizer.decode(self._plan, replies[source], source)(self.d, weights[source])
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
