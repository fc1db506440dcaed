"""Accordion: the rank of each tensor, adapted during training (Agarwal, Wang, Lee, Venkataraman, Papailiopoulos
2020, arXiv 2010.16248, Algorithm 1).

While a tensor's gradients change fast, training is in a critical regime, and compression errors have lasting
effects. With |d| the norm of the tensor's gradient in an interval of epochs:

    high rank   while | |d_previous| - |d| | / |d_previous| >= change, and until two intervals are known
    low rank    otherwise

Differences from the paper: |d| is the root mean square, over the interval's steps, of the norm of the applied
gradient, which the factors give at no cost. The paper sums all gradients. The learning rate is not used: the
effect of its decay on the gradients appears in the next interval.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any


@dataclass
class Accordion:
    """State of the rank selection.

    Args:
        low (int): rank outside critical regimes.
        high (int): rank in critical regimes, at least `low`.
        change (float): relative change of the norm at which a regime is critical.
        every (int): length of an interval in epochs.
        epoch (int, optional): last epoch that began.
        norms (dict): norm of each tensor in the last interval, by name.
        ranks (dict): current rank of each tensor by name, once it is known.

    Raises:
        ValueError: if high < low, change is not positive or every is less than 1.
    """

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
        """Whether an interval ends before this epoch. After a resume the same epoch may begin again."""
        last, self.epoch = self.epoch, epoch
        return last is not None and epoch // self.every > last // self.every

    def choose(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """Chooses the rank of each tensor.

        sums: by name, the sum of squared norms over an interval, and the number of its steps.
        """
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
