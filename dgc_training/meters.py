"""Meters: what an evaluation counts, and the number it makes of the counts.

A meter is built anew for every evaluation and every split. Its `data()` are plain sums, so the ranks' counts
are added and `set()` before `compute()`.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class Meter(Protocol):
    """What train.py asks of `train.meters` entries."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Counts one batch: outputs [n, ...] of the model, targets [n, ...]."""

    def data(self) -> dict[str, float]:
        """The sums so far; the same keys on every rank, also before any update."""

    def set(self, data: Mapping[str, float]) -> None:
        """Replaces the sums, by those over all ranks."""

    def compute(self) -> float:
        """The result; NaN where nothing was counted."""


class TopKClassMeter:
    """Percentage of samples whose class is among the k largest outputs; a k above the number of classes means
    all.
    """

    def __init__(self, k: int = 1) -> None:
        if k < 1:
            raise ValueError(f"k is {k}; it must be at least 1")
        self.k = k
        self.num_examples = 0
        self.num_correct: float | Tensor = 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """outputs float [n, classes], targets int [n]."""
        k = min(self.k, outputs.size(1))
        predictions = outputs.topk(k, dim=1).indices
        # Kept on the device: reading it here would make the host wait for every batch.
        self.num_correct = self.num_correct + (predictions == targets.unsqueeze(1)).sum()
        self.num_examples += targets.size(0)

    def data(self) -> dict[str, float]:
        return {"num_examples": self.num_examples, "num_correct": int(self.num_correct)}

    def set(self, data: Mapping[str, float]) -> None:
        self.num_examples = int(data["num_examples"])
        self.num_correct = int(data["num_correct"])

    def compute(self) -> float:
        if self.num_examples == 0:
            return float("nan")
        return 100.0 * int(self.num_correct) / self.num_examples
