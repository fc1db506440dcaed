"""EF21 with momentum, of EF21-Muon (Gruntkowska et al. 2025, arXiv 2510.00643), around any compressor C.

A rank with the gradient g_i has a momentum m_i and its estimate h_i. All ranks have the mean h of the estimates,
on which the optimizer steps:

    m_i = (1 - beta) m_i + beta g_i
    c_i = C[m_i - h_i];   h_i = h_i + c_i
    h   = h + mean over i of c_i

With d_i the change of m_i, and e_i = m_i - h_i, this is error feedback of d_i: v = e_i + d_i, c_i = C[v] and
e_i = v - C[v]. So C is a compressor with its own residual, which is e_i, and h is the sum of its means.

Differences from the paper: C of the model that a server sends to the workers is left out, because all ranks have
h. C need not be a contraction of all of v: it may have a residual on the way back, as two-phase compressors have.

Payload of a bucket in bytes: the payload of C with fp32 gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dgc.comm.requests import Conversation
from dgc.core.arguments import NUMBER, checked, require
from dgc.core.bucket import Bucket, Segment
from dgc.core.dense import DenseCompressor
from dgc.core.protocol import Compressor, Run, Vector
from dgc.core.results import DenseResult, Reduced
from dgc.core.state import State, Tables, zeros
from dgc.kernels.selection import usable


@dataclass(eq=False)
class EF21State(State):
    """local: "momentum", m_i, and "estimate", h.

    inner: The state of C. Its number of steps is the saved one, because C's random numbers depend on it.
    changes: The bucket of C, which holds d_i and then the mean of c_i, in fp32.
    """

    inner: Any = None
    changes: Any = None

    def unsent(self, bucket: Bucket) -> list[Vector]:
        return list(self.inner.unsent(self.changes))

    def saved(self, bucket: Bucket) -> Tables:
        return {**super().saved(bucket), **self.inner.saved(self.changes)}

    def loaded(self, bucket: Bucket, tables: Tables) -> "EF21State":
        return replace(super().loaded(bucket, tables), inner=self.inner.loaded(self.changes, tables))


@checked
class EF21Compressor(Compressor):
    """Sends the changes of each rank's momentum through a compressor, and returns the sum of their means.

    Unless beta is 1, the optimizer must have no momentum for its parameters: with Muon take
    `MuonWithAdamW(..., momentum=0.0)`.

    Args:
        compressor (Compressor): exchanges the changes: one with a residual, or DenseCompressor.
        beta (float): share of the new gradient in the momentum, in (0, 1].

    Raises:
        ValueError: if beta is out of range, or the compressor has momentum or no residual, or is EF21 itself.

    Example:
        >>> compression = EF21Compressor(SparseCompressor(0.05, "residual", values="fp16"))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression)
    """

    def __init__(self, compressor: Compressor, beta: float = 0.05):
        require("a number", NUMBER, beta=beta)
        if not 0 < beta <= 1:
            raise ValueError(f"beta must be in (0, 1], not {beta}")
        if compressor.correction is not None:
            raise ValueError(
                f"EF21 has momentum, and the memory of {type(compressor).__name__} too: give it "
                "memory=ResidualMemory()"
            )
        if isinstance(compressor, EF21Compressor):
            raise ValueError("EF21 exchanges changes already: give it the compressor of the inner EF21Compressor")
        self.compressor, self.beta = compressor, beta
        self.point_to_point, self.keeps_server_errors = compressor.point_to_point, compressor.keeps_server_errors

    @property
    def class_name(self) -> str:
        return f"EF21Compressor.{self.compressor.class_name}"

    @property
    def has_momentum(self) -> bool:  # type: ignore[override]
        return self.beta < 1

    @property
    def compress_ratio(self) -> float:
        return self.compressor.compress_ratio

    @property
    def fallback(self) -> Compressor:
        return self if self.compressor.fallback is self.compressor else self.compressor.fallback

    def accepts(self, segment: Segment) -> bool:
        return self.compressor.accepts(segment)

    def init(self, bucket: Bucket, size: int, rank: int) -> EF21State:
        changes = Bucket(bucket.name, bucket.segments, torch.float32, bucket.device)
        inner = self.compressor.init(changes, size, rank)
        if not inner.unsent(changes) and not isinstance(self.compressor, DenseCompressor):
            raise ValueError(
                f"EF21 adds up what is sent, and {type(self.compressor).__name__} has no residual to send the "
                "rest later: use one with error feedback"
            )
        local = {"momentum": zeros(bucket), "estimate": zeros(bucket)}
        return EF21State(size, rank, local=local, dense=inner.dense, inner=inner, changes=changes)

    def reduce(self, bucket: Bucket, state: EF21State) -> Conversation[Reduced]:
        m, h, changes = state.local["momentum"], state.local["estimate"], state.changes
        torch.sub(bucket.flat, m, out=changes.flat).mul_(self.beta)
        unusable = ~usable(changes.flat)
        m = m + changes.flat.masked_fill(unusable, 0.0)
        # every C then reports what m does not have, also one that would send large finite values
        changes.flat.masked_fill_(unusable, torch.nan)
        # a dropped step leaves the change in the residual, so it stays in the momentum too
        keeps = bool(state.inner.unsent(changes))
        reduced = yield from self.compressor.reduce(changes, state.inner)
        reduced.result.write_to(changes)
        h = h + changes.flat
        bucket.release()
        bucket.flat.copy_(h)
        inner = state.inner if reduced.dropped is None else reduced.dropped
        dropped = state.changed(inner=inner, local={"momentum": m, "estimate": state.local["estimate"]})
        after = state.next(inner=reduced.state, local={"momentum": m, "estimate": h}, dense=reduced.state.dense)
        found = reduced.result
        result = found if isinstance(found, DenseResult) else DenseResult(found.nonfinite)
        return Reduced(result, after, dropped=dropped if keeps else state)

    def in_epoch(self, epoch: int) -> "EF21Compressor":
        compressor = self.compressor.in_epoch(epoch)
        return self if compressor is self.compressor else self.changed(compressor=compressor)

    def at_epoch(self, bucket: Bucket, state: EF21State, epoch: int) -> EF21State:
        return state.changed(inner=self.compressor.at_epoch(state.changes, state.inner, epoch))

    def too_small(self, bucket: Bucket) -> list[Segment]:
        return self.compressor.too_small(bucket)

    def used_by(self, run: Run) -> None:
        self.compressor.used_by(run)

    def ratio_of(self, states: Sequence[tuple[Bucket, Any]]) -> float:
        return self.compressor.ratio_of([(state.changes, state.inner) for _, state in states])
