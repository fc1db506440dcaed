"""Meters: the counts of an evaluation, and the result computed from them.

A new meter is built for every evaluation and every split. `data()` returns plain sums. The trainer adds the sums
of all ranks and passes them to `set()` before it calls `compute()`. A meter of which lower values are better, such
as perplexity, has the attribute `lower_is_better = True`.
"""

import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.nn.functional import cross_entropy


@runtime_checkable
class Meter(Protocol):
    """The interface of the entries of `train.meters`."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Counts one batch. outputs: of the model, [n, ...]. targets: [n, ...]."""

    def data(self) -> dict[str, float]:
        """The sums so far. The keys are equal on every rank, also before any update."""

    def set(self, data: Mapping[str, float]) -> None:
        """Replaces the sums by the sums over all ranks."""

    def compute(self) -> float:
        """The result; NaN if nothing was counted."""


class TopKClassMeter:
    """Percentage of samples with their class among the k largest outputs.

    Args:
        k: at least 1. A k above the number of classes means all classes.

    Raises:
        ValueError: if k is less than 1.
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
        # The sum stays on the device. Reading it here would block the host at every batch.
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


class TokenLoss:
    """Mean negative log-likelihood of the targets, in nats per token. Targets of -100 do not count."""

    lower_is_better = True

    def __init__(self) -> None:
        self.num_tokens: float | Tensor = 0
        self.total: float | Tensor = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """outputs float [n, vocabulary], targets int [n]."""
        # The sums stay on the device. Reading them here would block the host at every batch.
        self.total = self.total + cross_entropy(outputs.float(), targets, reduction="sum").double()
        self.num_tokens = self.num_tokens + (targets != -100).sum()

    def data(self) -> dict[str, float]:
        return {"num_tokens": int(self.num_tokens), "total": float(self.total)}

    def set(self, data: Mapping[str, float]) -> None:
        self.num_tokens, self.total = int(data["num_tokens"]), data["total"]

    def compute(self) -> float:
        return float(self.total) / int(self.num_tokens) if self.num_tokens else float("nan")


class Perplexity(TokenLoss):
    """exp of the mean loss per token; inf if it is too large."""

    def compute(self) -> float:
        loss = super().compute()
        return math.exp(loss) if not loss > 700 else math.inf


class BitsPerToken(TokenLoss):
    """Mean loss in bits per token: bits per character if tokens are characters."""

    def compute(self) -> float:
        return super().compute() / math.log(2)
