"""Memories: what a sparse compressor keeps of the gradients that it does not send.

In each step a memory adds the gradient to its residual v. The compressor sends some elements of v. The memory
then subtracts from v what the other ranks receive, after rounding. What a step sends is only recorded. The pass of
the next step, which reads and writes v anyway, removes it. A dropped step is then the state without the record.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

import dgc.kernels as kernels
from dgc.comm.requests import Conversation
from dgc.core.arguments import FLAG, NOTHING, NUMBER, checked, require
from dgc.core.bucket import Bucket
from dgc.core.clipping import Clipping
from dgc.core.momentum import MomentumCorrection
from dgc.core.state import State, Tables, check_mapping, check_tensor, zeros
from dgc.kernels import PassInputs, SparseVector
from dgc.kernels.selection import remove_nonfinite_
from dgc.sparse.selectors import Quota


@dataclass(eq=False, kw_only=True)
class SparseState(State):
    """The residual of a method that sends a few elements in each step.

    Attributes:
        masking: Remove the sent elements from u as well.
        sent: The elements that the other ranks have received, with their values after rounding.
        returned: Parts of the ranks' sum that no rank has received. They are added to v as they are.
        quota: Number of elements per tensor, and the history of the selector. None before the first step.
        exchange: How the ranks sum what this quota selects (`SparseExchange`).
        rows: Names and shapes of what the selector needs of its history, for each parameter.
        history: The history in a loaded state, by parameter, until `quota` is made. It belongs to one ratio.
    """

    masking: bool = False
    sent: SparseVector | None = None
    returned: SparseVector | None = None
    quota: Quota | None = None
    exchange: Any = None
    rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    history: dict[str, dict[str, Any]] = field(default_factory=dict)
    partial: tuple[str, ...] = ("history",)

    @property
    def u(self) -> Tensor | None:
        """Momentum."""
        return next(iter(self.local.values()), None)

    @property
    def v(self) -> Tensor:
        """Accumulated gradients that are not sent."""
        return next(iter(self.errors.values()))

    def moving(self) -> list[Tensor]:
        sent = [] if self.sent is None else [self.sent.indices, self.sent.values, self.sent.count]
        return [*super().moving(), *sent, *self.hidden().values()]

    def hidden(self) -> dict[str, Tensor]:
        return {} if self.quota is None else self.quota.history

    def after(self, sent: SparseVector, returned: SparseVector | None = None) -> "SparseState":
        """Return the state that records what a step has sent, and what it has returned."""
        return self.changed(sent=sent, returned=returned) if self.errors else self

    def settle_(self) -> None:
        """Remove the sent elements from u and v, and add the returned ones to v."""
        kernel = kernels.of(self.v).selection
        if self.sent is not None:
            kernel.remove_sent_(self.sent, self.u if self.masking else None, self.v)
        if self.returned is not None:
            returned = self.returned
            kernel.remove_sent_(SparseVector(returned.indices, -returned.values, returned.count), None, self.v)
        self.sent = self.returned = None

    # --- saving -----------------------------------------------------------------------------------

    def settled(self) -> "SparseState":
        """Return a copy without a record."""
        local, errors = (
            {table: vector.clone() for table, vector in vectors.items()} for vectors in (self.local, self.errors)
        )
        copy = replace(self, local=local, errors=errors)
        if self.errors:
            copy.settle_()
        return copy

    def unsent(self, bucket: Bucket) -> list[Tensor]:
        return list(self.settled().errors.values())

    def saved(self, bucket: Bucket) -> Tables:
        history = self.history
        if self.quota is not None and self.rows and self.quota.history:
            history = self.quota.rows_of_history()
        return {**State.saved(self.settled(), bucket), "history": dict(history)}

    def loaded(self, bucket: Bucket, tables: Tables) -> "SparseState":
        history = {s.name: tables["history"][s.name] for s in bucket.segments if s.name in tables["history"]}
        for name, row in history.items():
            check_mapping(f"history of {name}", row)
            require("a number", NUMBER, **{f"history of {name}: ratio": (ratio := row.get("ratio"))})
            if not 0 < ratio <= 1:
                raise ValueError(f"history of {name}: ratio must be in (0, 1], not {ratio}")
            if self.rows and row.keys() != (keys := {"ratio", *self.rows}):
                found = f"{sorted(map(str, row))}, not {sorted(keys)}"
                raise ValueError(f"history of {name} has {found}: use the selector that saved it")
            for key, shape in self.rows.items():
                check_tensor(f"history of {name}: {key}", row[key], shape, least=0)
        history = history if self.rows else {}
        fresh = replace(self, sent=None, returned=None, quota=None, history=history)
        return State.loaded(fresh, bucket, tables)


class Memory(ABC):
    """The settings of a residual. It is not changed after its construction, so that any exchange can use it.

    correction: momentum that the memory applies in place of the optimizer. gradient_clipping: the limit on
    gradients, and on the mean of tensors that a fallback sends dense.
    """

    correction: MomentumCorrection | None = None
    gradient_clipping: Clipping | None = None

    @abstractmethod
    def init(self, bucket: Bucket, size: int, rank: int) -> SparseState:
        """Return the state of a bucket before the first step."""

    @abstractmethod
    def pass_inputs(self, bucket: Bucket, state: SparseState) -> PassInputs:
        """Return the pass that removes what the previous step sent and adds the gradient, to be performed once.

        After the pass, `v` [n] fp32 holds all that is to be sent.
        """

    def with_momentum(self, momentum: float, nesterov: bool) -> "Memory":
        """Return the memory with the momentum of an optimizer, where `correction` has None."""
        if self.correction is None or self.correction.momentum is not None:
            return self
        memory = copy(self)
        memory.correction = self.correction.filled(momentum, nesterov)
        return memory

    def clip(self, bucket: Bucket) -> Conversation[Tensor]:
        """Clip the bucket's local gradient in place. NaN and TOO_LARGE (`dgc.kernels`) count as zero.

        Returns the index of the first element that was either, or n if there is none.
        """
        first_nonfinite = remove_nonfinite_(bucket.flat)
        if self.gradient_clipping is not None:
            yield from self.gradient_clipping.clip(bucket)
        return first_nonfinite


class DGCSGDMemory(Memory):
    """Error feedback with momentum correction and momentum factor masking (Lin et al. 2018, arXiv 1712.01887,
    sections 3.1 to 3.3, Algorithm 1).

    With gradient g, momentum m, local momentum u and accumulated velocity v of one rank:

        plain      u = m u + g          v = v + u
        Nesterov   u = m (u + g)        v = v + u + g
        sent       v_i = 0 where sent; u_i = 0 there too with masking
        returned   v_i = v_i + value where an exchange gives back a part of the ranks' sum; u_i stays
        dropped    v_i and u_i keep their values from before sending; the gradient stays in them

    Differences from the paper: the rounding error of the payload stays in v. If all of v is sent, no element is
    stale and u is not masked: the step is ordinary momentum.

    Args:
        momentum: Momentum coefficient in [0, 1). None: the optimizer's, which any other must equal.
        nesterov: Use Nesterov momentum. None: as the optimizer does, or False if `momentum` is given.
        gradient_clipping: One of ClipByNorm, ClipByValue, ClipByGlobalNorm, ClipValueByGlobalNorm, or None. Each
            tensor's local gradient is clipped before momentum. Tensors that the compressor's fallback sends dense
            (usually vectors) are clipped after averaging. Those that a Route assigns to another compressor are
            not.
        momentum_masking: Set the momentum of sent elements to zero.

    Raises:
        ValueError: `momentum` is outside [0, 1), or `gradient_clipping` is not a clipping object.

    Example:
        memory = DGCSGDMemory(gradient_clipping=ClipByNorm(1.0))
        compression = DGCCompressor(0.001, memory=memory)
    """

    def __init__(
        self,
        momentum: float | None = None,
        nesterov: bool | None = None,
        gradient_clipping: Clipping | None = None,
        momentum_masking: bool = True,
    ):
        require("a number or None", NUMBER + NOTHING, momentum=momentum)
        require("True, False or None", FLAG + NOTHING, nesterov=nesterov)
        require("True or False", FLAG, momentum_masking=momentum_masking)
        if momentum is not None and not 0 <= momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), not {momentum}")
        limits = "ClipByNorm(...), ClipByValue(...), ClipByGlobalNorm(...) and ClipValueByGlobalNorm()"
        expected = f"None or one of dgc.memory's {limits}"
        require(expected, (Clipping, *NOTHING), gradient_clipping=gradient_clipping)
        nesterov = nesterov if momentum is None else bool(nesterov)
        self.correction: MomentumCorrection = MomentumCorrection(momentum, nesterov)
        self.gradient_clipping, self.momentum_masking = gradient_clipping, momentum_masking

    @property
    def momentum(self) -> float | None:
        """The coefficient. None: the optimizer's."""
        return self.correction.momentum

    @property
    def nesterov(self) -> bool | None:
        return self.correction.nesterov

    def init(self, bucket: Bucket, size: int, rank: int) -> SparseState:
        if self.momentum is None:
            raise ValueError(
                "DGCSGDMemory() takes the momentum of an optimizer, and is used without one here: pass it, as in "
                "DGCSGDMemory(momentum=0.9)"
            )
        u, v = {"momentums": zeros(bucket)}, {"velocities": zeros(bucket)}
        return SparseState(size, rank, local=u, errors=v, masking=self.momentum_masking)

    def pass_inputs(self, bucket: Bucket, state: SparseState) -> PassInputs:
        if state.returned is not None:
            state.settle_()  # the pass itself removes only what was sent
        u, v = state.local["momentums"], state.errors["velocities"]
        momentum, nesterov = float(self.correction.momentum or 0), bool(self.correction.nesterov)
        return PassInputs(bucket.gradients, u, v, momentum, nesterov, state.sent, self.momentum_masking)


@checked
class ResidualMemory(Memory):
    """Error feedback without momentum: the unsent rest is added to the next gradient.

        v = decay v + g;  what is sent is subtracted from v

    With decay = 1 this is Mem-SGD (Stich et al. 2018, arXiv 1809.07599), below 1 the memory of SparseLoCo (Sarfi
    et al. 2025, arXiv 2508.15706), which forgets after about 1 / (1 - decay) steps.

    Args:
        decay: Factor of the unsent rest in each step, in (0, 1]. SparseLoCo has 0.95.

    Raises:
        ValueError: `decay` is out of range.

    Example:
        compression = DGCCompressor(0.01, memory=ResidualMemory())
    """

    def __init__(self, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise ValueError(f"decay must be in (0, 1], not {decay}: NoMemory() keeps nothing of the rest")
        self.decay = decay

    def init(self, bucket: Bucket, size: int, rank: int) -> SparseState:
        return SparseState(size, rank, errors={"residuals": zeros(bucket)})

    def pass_inputs(self, bucket: Bucket, state: SparseState) -> PassInputs:
        if state.returned is not None:
            state.settle_()  # the pass itself removes only what was sent
        return PassInputs(bucket.gradients, None, state.v, sent=state.sent, decay=self.decay)


class NoMemory(Memory):
    """No error feedback: unsent elements are discarded."""

    def init(self, bucket: Bucket, size: int, rank: int) -> SparseState:
        return SparseState(size, rank)

    def pass_inputs(self, bucket: Bucket, state: SparseState) -> PassInputs:
        return PassInputs(bucket.gradients, None, zeros(bucket))
