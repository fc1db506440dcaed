"""Base class of gossip with differences of models (`choco`, `powergossip`).

After every `average_every` steps, a rank exchanges with its neighbours, in both directions of every edge. The
exchange completes before the next forward pass. With more than one step between exchanges these are local steps
(Koloskova et al.: ICML 2020, arXiv 2003.10422): what is compressed is then the progress of all of them.

Weights W are symmetric, and rows sum to one. If x_i moves by the sum over neighbours j of W_ij e_ij, and e_ij is
-e_ji, the mean over ranks is preserved for any compression of e.

Compression operators Q for differences of models. Each has a payload of fixed size.

TopK    the ceil(ratio d) elements of largest magnitude of each tensor of d, in the format of `dgc.wire`
Sign    (|v|_1 / d) sign(v) of each tensor of d elements; 0 is sent as a negative element

Bytes, rounded up to a multiple of 8: TopK 24, and for each element 4 and the bytes of a value; Sign 24, and
4 + 4 ceil(d/32) for each tensor.

gamma is the default consensus step size of `choco` for an operator. On rings of 2 to 16 ranks, models converge to
each other with twice the ratio of TopK, and mostly diverge with 4 times the ratio.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

import dgc.kernels as kernels
from dgc.arguments import checked
from dgc.bucket import Segment
from dgc.comm.conversation import RunningConversation
from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import Conversation, as_bytes
from dgc.comm.transport import Transport
from dgc.gossip.messages import message_of, opened, write_header_
from dgc.gossip.model import FlatModel
from dgc.gossip.protocol import MISSING_ZERO_GRAD
from dgc.gossip.topology import ROUNDING, Graph, Mixing, Peers, Shares, Topology, build_topology, check_mixing
from dgc.kernels import SparseVector
from dgc.selection.selector import Plan, plan_selection
from dgc.state import check_count, check_tensor
from dgc.wire import CastValues, PlainIndices, SparseFormat
from dgc.wire.payload import read_scalars, sealed_bytes


class DifferenceGossip(ABC):
    """Base class of gossip with differences of models.

    Args:
        graph (callable): returns the topology for a number of ranks.
        mixing (Mixing): weights W, symmetric with rows that sum to one.
        average_every (int): steps between two exchanges.

    Raises:
        ValueError: if average_every is less than 1.
        TopologyError: by `start`, if the graph or the weights are not valid.
    """

    needs_groups = False
    is_synchronous = True
    static = False  # whether neighbours must be the same in all rounds

    def __init__(self, graph: Graph, mixing: Mixing, average_every: int):
        if average_every < 1:
            raise ValueError(f"average_every must be at least 1 step, not {average_every}")
        self.graph, self.mixing, self.average_every = graph, mixing, average_every
        self.compress_ratio = 1.0
        self.steps = self.round = 0
        self._conversation: RunningConversation[None] | None = None

    def start(self, model: FlatModel, transport: Transport, meter: TrafficMeter, name: str = "gossip") -> None:
        self.name, self.model, self.z = name, model, model.z
        self.rank, self.size = transport.rank, transport.size
        self._transport, self._meter = transport, meter
        self.topology = None if self.size == 1 else build_topology(self.graph, self.size)
        if self.topology is not None:
            self._check(self.topology)
        self._prepare()
        self.compress_ratio = min(1.0, self._nbytes() / (4 * self.z.numel())) / self.average_every

    def _check(self, topology: Topology) -> None:
        needs = f"{type(self).__name__} needs"
        cure = "use ring with peers=2, grid, star or full"
        if self.static and topology.period != 1:
            raise topology.error(f"{needs} the same neighbours in every round, but they change: {cure}")
        if not topology.is_symmetric:
            cure += "" if self.static else ", or a graph of pairs"
            raise topology.error(f"{needs} edges in both directions, but some have only one: {cure}")
        check_mixing(topology, self.mixing, doubly_stochastic=True)
        for t in range(topology.period):
            shares = [self.mixing(topology, rank, t) for rank in range(self.size)]
            if any(abs(shares[j][i] - w) > ROUNDING for i, row in enumerate(shares) for j, w in row.items()):
                raise topology.error(f"{needs} the same weight at both ends of an edge: use the mixing metropolis")

    def neighbours(self, round: int) -> tuple[Peers, Shares]:
        """This rank's neighbours, ascending, and its weights."""
        assert self.topology is not None
        return self.topology.in_peers(self.rank, round), self.mixing(self.topology, self.rank, round)

    @abstractmethod
    def _prepare(self) -> None:
        """Allocates state when the model is known."""

    @abstractmethod
    def _nbytes(self) -> float:
        """Bytes sent to a neighbour in a step."""

    @abstractmethod
    def _average(self) -> Conversation[None]:
        """Exchanges with the neighbours in one step and moves z."""

    # --- one step ---------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        return None

    def begin_step(self) -> None:
        self.synchronize_messages()

    def update(self, step: Callable[[], object], lr: float) -> None:
        if self._conversation is not None:
            raise RuntimeError(MISSING_ZERO_GRAD)
        step()
        self.model.gather()
        self.steps += 1
        if self.size > 1 and self.steps % self.average_every == 0:
            self._conversation = RunningConversation(self.name, self._average(), self._transport, self._meter)

    def synchronize_messages(self) -> None:
        if self._conversation is not None:
            self._conversation.finish()
            self._conversation = None
            self.model.scatter()

    def flush(self) -> None:
        """Same as `synchronize_messages`: messages of a step are always added before the next step."""
        self.synchronize_messages()

    def restart(self) -> None:
        assert self._conversation is None, "synchronize_messages() must be called first"

    # --- state ------------------------------------------------------------------------------------

    def biased_parameters(self) -> Tensor:
        assert self._conversation is None, "flush() must be called first"
        return self.z.clone()

    def bias(self) -> float:
        return 1.0

    def metrics(self) -> dict[str, float]:
        return {"weight": 1.0, "staleness": 0.0}

    def errors(self) -> Iterable[Tensor]:
        return ()

    def close(self) -> None:
        self.synchronize_messages()

    def state_dict(self) -> dict[str, Any]:
        assert self._conversation is None, "flush() must be called first"
        return {"z": self.z.clone(), "steps": self.steps, "round": self.round, "size": self.size, **self._state()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != {"z", "steps", "round", "size", *self._state()}:
            raise ValueError(f"state of another algorithm: it has {sorted(state)}")
        check_tensor("z", state["z"], self.z.shape)
        for name in ("steps", "round", "size"):
            check_count(name, state[name])
        if state["size"] == self.size:
            self._load(state)
        else:
            self._reset_neighbours()
        self.z.copy_(state["z"])
        self.model.scatter()
        self.steps, self.round, self._conversation = state["steps"], state["round"], None

    @abstractmethod
    def _state(self) -> dict[str, Any]: ...

    @abstractmethod
    def _reset_neighbours(self) -> None:
        """Resets what is stored about neighbours, after a state of another number of ranks was loaded."""

    @abstractmethod
    def _load(self, state: dict[str, Any]) -> None:
        """Loads the state. Raises ValueError, before any change, if it is of another model or graph."""


FP32 = 4  # bytes
DIFFERENCE = "a difference of CHOCO"

Vector = Float32[Tensor, "n"]
Bytes = UInt8[Tensor, "nbytes"]
AddScaled = Callable[[Vector, float], object]  # adds Q(v), times a factor, to a vector


@runtime_checkable
class Coder(Protocol):
    """Q for one model."""

    @property
    def nbytes(self) -> int: ...

    def encode(self, v: Vector) -> tuple[Bytes, AddScaled]:
        """Returns the payload and its decoded value."""
        ...

    def decode(self, payload: Bytes, source: int) -> AddScaled:
        """Decodes a payload. Raises PayloadError, which names the rank `source`, if the payload is not valid."""
        ...


@runtime_checkable
class Quantizer(Protocol):
    """A compression operator."""

    @property
    def gamma(self) -> float: ...

    def plan(self, segments: Sequence[Segment], device: torch.device) -> Coder: ...


@checked
@dataclass(frozen=True)
class TopK:
    """Top-k by magnitude in each tensor.

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

    def plan(self, segments: Sequence[Segment], device: torch.device) -> Coder:
        form = SparseFormat(CastValues(self.values), PlainIndices("int32"))
        return _Sparse(form, plan_selection(segments, self.ratio, device))


@dataclass(frozen=True, eq=False)
class _Sparse:
    form: SparseFormat
    selection: Plan

    @property
    def _numel(self) -> int:
        return sum(self.selection.numels)

    @property
    def nbytes(self) -> int:
        return self.form.nbytes(self.selection.per_tensor, self._numel)

    def encode(self, v: Vector) -> tuple[Bytes, AddScaled]:
        budget = self.selection.per_tensor
        chosen = kernels.of(v).selection.select(v, budget)
        encoded = self.form.encode(
            kernels.of(v).codec, chosen.elements, budget, self._numel, chosen.first_nonfinite
        )
        return encoded.payload, _add_sparse(encoded.sent)

    def decode(self, payload: Bytes, source: int) -> AddScaled:
        codec, planned = kernels.of(payload).codec, (self.selection.per_tensor, self._numel)
        (selection,), _ = self.form.decode(codec, (payload,), *planned, what=DIFFERENCE, ranks=(source,))
        return _add_sparse(selection)


def _add_sparse(sent: SparseVector) -> AddScaled:
    return lambda target, factor: target.index_add_(0, sent.indices, sent.values, alpha=factor)


@dataclass(frozen=True)
class Sign:
    """Signs, scaled by the mean magnitude of each tensor: 1 bit per element.

    Example:
        >>> gossip = CHOCO(quantizer=Sign())
    """

    gamma = 0.3

    def plan(self, segments: Sequence[Segment], device: torch.device) -> Coder:
        bounds = [0, *(segment.offset + segment.numel for segment in segments)]
        codes = sum(FP32 + FP32 * -(-segment.numel // 32) for segment in segments)
        return _Signs(torch.tensor(bounds, dtype=torch.int64, device=device), codes)


@dataclass(frozen=True, eq=False)
class _Signs:
    bounds: Int64[Tensor, "bounds"]
    codes: int  # bytes

    @property
    def nbytes(self) -> int:
        return sealed_bytes(self.codes)

    def encode(self, v: Vector) -> tuple[Bytes, AddScaled]:
        sums = kernels.of(v).selection.moments(v, self.bounds).magnitudes
        scales = (sums / self.bounds.diff().clamp(min=1)).float()
        codes, _ = kernels.of(v).quantize.sign_encode(v, self.bounds, torch.zeros_like(scales), -scales, scales)
        both = torch.cat([as_bytes(scales), codes])
        payload = message_of(both)
        write_header_(payload, DIFFERENCE)
        return payload, self._add_signs(both)

    def decode(self, payload: Bytes, source: int) -> AddScaled:
        received = opened(payload, self.codes, DIFFERENCE, source)
        (both,), _ = received.checked(read_scalars(received.scalars))
        return self._add_signs(both)

    def _add_signs(self, both: Bytes) -> AddScaled:
        scales = both[: FP32 * (self.bounds.numel() - 1)].clone().view(torch.float32)
        q = torch.zeros(int(self.bounds[-1]), dtype=torch.float32, device=both.device)
        codes = both[FP32 * scales.numel() :].clone()
        kernels.of(q).quantize.sign_add_(codes, self.bounds, -scales, scales, q)
        return lambda target, factor: target.add_(q, alpha=factor)
