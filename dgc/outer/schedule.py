"""Schedules of the outer learning rate: factors by the number of inner steps, as SparseLoCo's alpha from 0.4 to 1
(Sarfi et al. 2025, arXiv 2508.15706).

    z0 = outer(z0, D),   with the learning rate of `outer` times f(t)      t: step in which the exchange began

f depends on t alone, so a run that resumes has the same rates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from dgc.arguments import NUMBER, WHOLE, require

OuterSchedule: TypeAlias = Callable[[int], float]


@dataclass(frozen=True)
class Ramp:
    """A factor of the outer learning rate that goes linearly from one value to another, and then stays.

    Args:
        first (float): factor at step 0, positive.
        last (float): factor from step `steps` on, positive.
        steps (int): inner steps until `last`, at least 1.

    Raises:
        ValueError: if an argument is out of range.

    Example:
        >>> sparseloco = OuterSteps(30, outer_schedule=Ramp(0.4, 1.0, steps=3000))
    """

    first: float = 0.4
    last: float = 1.0
    steps: int = 1000

    def __post_init__(self) -> None:
        require("a whole number of at least 1", WHOLE, least=1, steps=self.steps)
        require("a number", NUMBER, first=self.first, last=self.last)
        if not 0 < self.first < inf or not 0 < self.last < inf:
            raise ValueError(f"Ramp needs first and last above 0 and finite, not {self.first} and {self.last}")

    def __call__(self, step: int) -> float:
        return self.first + (self.last - self.first) * min(1.0, step / self.steps)
