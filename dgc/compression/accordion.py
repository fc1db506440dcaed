"""Accordion: a rank for each tensor and time (Agarwal, Wang, Lee, Venkataraman, Papailiopoulos 2020,
arXiv 2010.16248, Algorithm 1).

While a tensor's gradients change fast, training is in a critical regime and errors do lasting harm: with |d| the
norm of its gradient in an interval of epochs,

    high rank   while | |d_previous| - |d| | / |d_previous| >= change, and until two intervals are known
    low rank    otherwise

Differences from the paper: |d| is the root mean square over the interval's steps of the norm of what was applied,
which the factors give for nothing, where the paper adds all gradients up; and the learning rate is not looked at:
what its decay does to the gradients shows in the next interval.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any


@dataclass
class Accordion:
    """ranks: of each tensor by name, once it is known. norms: of the last interval."""

    low: int
    high: int
    change: float = 0.5
    every: int = 1
    epoch: int | None = None
    norms: dict[str, float] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise ValueError(f"high_rank must be at least rank = {self.low}, not {self.high}")
        if not self.change > 0 or self.every < 1:
            raise ValueError(
                f"rank_change must be positive, not {self.change}, and rank_every at least 1, not {self.every}"
            )

    def ends_interval(self, epoch: int) -> bool:
        """Whether an interval ends before this epoch. The same epoch may begin again, after a resume."""
        last, self.epoch = self.epoch, epoch
        return last is not None and epoch // self.every > last // self.every

    def choose(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """sums: by name, the sum of squared norms over an interval, and the number of its steps."""
        for name, (squares, steps) in sums.items():
            if steps:
                norm, before = sqrt(squares / steps), self.norms.get(name)
                critical = before is None or abs(before - norm) >= self.change * before
                self.ranks[name] = self.high if critical else self.low
                self.norms[name] = norm

    def rank(self, name: str) -> int:
        return self.ranks.get(name, self.high)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "norms": dict(self.norms), "ranks": dict(self.ranks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.norms, self.ranks = state["epoch"], dict(state["norms"]), dict(state["ranks"])
