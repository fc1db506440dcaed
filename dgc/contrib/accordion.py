"""Accordion: the rank of each tensor in PowerSGD, adapted during training (Agarwal, Wang, Lee, Venkataraman,
Papailiopoulos 2020, arXiv 2010.16248, Algorithm 1).

In a critical regime compression errors have lasting effects. With |d| the norm of a tensor's gradient in an
interval of epochs:

    high rank   while | |d_previous| - |d| | / |d_previous| >= change, and until two intervals are known
    low rank    otherwise

Payload of a bucket: as for PowerSGD with the ranks of its tensors.

Differences from the paper: |d| is the root mean square, over the interval's steps, of the norm of the applied
gradient. The paper sums all gradients, and uses the learning rate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from dgc.comm.requests import Conversation
from dgc.core.arguments import NUMBER, WHOLE, checked, require
from dgc.core.bucket import Bucket
from dgc.core.results import Reduced
from dgc.core.state import Tables, check_mapping, zeros
from dgc.lowrank.powersgd import PowerSGDCompressor, PowerSGDState

KINDS = {"epoch": WHOLE, "norm": NUMBER, "rank": WHOLE, "squares": NUMBER, "steps": WHOLE}
UNKNOWN_AT_FIRST = {"epoch", "norm"}


@dataclass(eq=False, kw_only=True)
class AccordionState(PowerSGDState):
    """The state of PowerSGD, and what chooses its ranks, the same on every rank.

    epoch: the last one that began. norms: by name, |d| of the last interval. squares: of each tensor, the sum of
    the squared norms of the gradients in this interval. counted: the number of its steps.
    """

    squares: Float64[Tensor, "tensors"]
    counted: int = 0
    epoch: int | None = None
    norms: Mapping[str, float] = field(default_factory=dict)
    partial: tuple[str, ...] = ("P", "Q", "accordion")

    def saved(self, bucket: Bucket) -> Tables:
        """accordion: by name, the numbers of KINDS."""
        table = {}
        for s, squares in zip(bucket.segments, self.squares.tolist(), strict=True):
            numbers = self.epoch, self.norms.get(s.name), self.ranks[s.name], squares, self.counted
            table[s.name] = dict(zip(KINDS, numbers, strict=True))
        return {**super().saved(bucket), "accordion": table}

    def loaded(self, bucket: Bucket, tables: Tables) -> "AccordionState":
        """What a checkpoint does not have of a tensor stays as it is."""
        own = {s.name: tables["accordion"][s.name] for s in bucket.segments if s.name in tables["accordion"]}
        for name, numbers in own.items():
            check_numbers(name, numbers)
        norms = {name: numbers["norm"] for name, numbers in own.items() if numbers["norm"] is not None}
        epochs = [numbers["epoch"] for numbers in own.values() if numbers["epoch"] is not None]
        squares = [own[s.name]["squares"] if s.name in own else 0.0 for s in bucket.segments]
        state = self.changed(
            ranks={**self.ranks, **{name: numbers["rank"] for name, numbers in own.items()}},
            norms=norms,
            epoch=max(epochs, default=None),
            squares=torch.tensor(squares, dtype=torch.float64, device=self.squares.device),
            counted=max((numbers["steps"] for numbers in own.values()), default=0),
        )
        return super(AccordionState, state).loaded(bucket, tables)


def check_numbers(name: str, numbers: Any) -> None:
    """Raise ValueError if these cannot be what a checkpoint has of a tensor."""
    check_mapping(f"accordion of {name}", numbers)
    if numbers.keys() != KINDS.keys():
        raise ValueError(f"accordion of {name} must have {', '.join(KINDS)}, not {sorted(map(str, numbers))}")
    for key, kinds in KINDS.items():
        if numbers[key] is None and key in UNKNOWN_AT_FIRST:
            continue
        expected, what = "a whole number" if kinds is WHOLE else "a number", f"{key} in accordion of {name}"
        require(f"{expected} from 0 on", kinds, least=0, **{what: numbers[key]})
        if numbers[key] >= 2**63:
            raise ValueError(f"{what} must be below 2**63, not {numbers[key]}")


@checked
class AccordionCompressor(PowerSGDCompressor):
    """PowerSGD with a higher rank for a tensor while the norm of its gradients changes fast (Agarwal et al. 2020,
    arXiv 2010.16248, Algorithm 1). It needs `begin_epoch`.

    Args:
        rank (int): the low rank.
        high_rank (int): the high rank, for tensors that it makes small enough; others have the low one.
        change (float): relative change of the norm from which on a tensor has the high rank.
        every (int): epochs between two choices.
        settings: further arguments of `PowerSGDCompressor`.

    Raises:
        ValueError: if an argument is out of range, or mode is "square", which has one matrix for all tensors.

    Example:
        >>> compression = AccordionCompressor(1, 4, every=10, num_iters_per_step=2)
    """

    def __init__(self, rank: int, high_rank: int, change: float = 0.5, every: int = 1, **settings: Any):
        super().__init__(rank, **settings)
        if high_rank < rank:
            raise ValueError(f"high_rank must be at least rank = {rank}, not {high_rank}")
        if not change > 0 or every < 1:
            raise ValueError(f"change must be positive, not {change}, and every at least 1, not {every}")
        if self.mode == "square":
            raise ValueError("a rank is chosen for each tensor, and mode='square' has one matrix for all")
        self.high_rank, self.change, self.every = high_rank, change, every

    def init(self, bucket: Bucket, size: int, rank: int) -> AccordionState:
        squares = torch.zeros(len(bucket.segments), dtype=torch.float64, device=bucket.device)
        own = {**vars(super().init(bucket, size, rank)), "partial": AccordionState.partial}
        own["ranks"] = {s.name: self.high_rank for s in bucket.segments}
        return AccordionState(**own, squares=squares).with_factors({"P": {}, "Q": {}}, zeros(bucket))

    def reduce(self, bucket: Bucket, state: AccordionState) -> Conversation[Reduced]:  # type: ignore[override]
        reduced = yield from super().reduce(bucket, state)
        new = reduced.state
        assert isinstance(new, AccordionState)
        squares = torch.stack([s.of(bucket.flat).double().square().sum() for s in bucket.segments])
        new = new.changed(squares=new.squares + squares, counted=new.counted + 1)
        return Reduced(reduced.result, new, reduced.dropped)

    def at_epoch(self, bucket: Bucket, state: AccordionState, epoch: int) -> AccordionState:
        last, state = state.epoch, state.changed(epoch=epoch)
        # after a resume the same epoch may begin again
        if last is None or epoch // self.every <= last // self.every or state.counted == 0:
            return state
        norms, ranks = dict(state.norms), {}
        for s, squares in zip(bucket.segments, state.squares.tolist(), strict=True):
            norm = sqrt(squares / state.counted)
            ranks[s.name] = self.rank_after(norms.get(s.name), norm)
            norms[s.name] = norm
        return state.changed(norms=norms, squares=torch.zeros_like(state.squares), counted=0).with_ranks(ranks)

    def rank_after(self, before: float | None, norm: float) -> int:
        """The rank of a tensor after an interval. before: |d| of the interval before it, if it is known."""
        critical = before is None or abs(before - norm) >= self.change * before
        return self.high_rank if critical else self.rank
