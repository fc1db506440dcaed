"""The interface between the training loop and a task: batches, loss, evaluation, and how results are shown.

The config's `task` names a class. The trainer calls it with a `Setup`, after data set and model have been built.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from dgc.comm import Transport
from dgc_training.config import instantiate
from dgc_training.constructors import of_kind


@dataclass(frozen=True)
class Setup:
    """What a task is built from.

    Args:
        tree: the complete config.
        dataset: what the config's `dataset` has built.
        model: the model, on `device`.
        transport: connects the ranks.
        device: of this rank.
    """

    tree: DictConfig
    dataset: Any
    model: nn.Module
    transport: Transport
    device: torch.device

    def __post_init__(self) -> None:
        """Raises ValueError if the data set has no split to train on."""
        if "train" not in self.dataset:
            splits = ", ".join(map(repr, self.dataset)) or "none"
            raise ValueError(f"dataset has no split 'train', on which the model is trained. Its splits: {splits}")

    def criterion(self) -> nn.Module:
        """Builds `train.criterion`, on `device`."""
        node = self.tree.train.criterion
        return of_kind(nn.Module, node, instantiate(node)).to(self.device)


class Loss(NamedTuple):
    """The loss of one batch.

    Args:
        mean: scalar, differentiable; the mean over `items`. Passes and ranks have equal weights in a step.
        items: number of samples or tokens that it is a mean over; the rates and the x axis of the log count them.
        outputs, targets: [items, classes] and class numbers [items], for the CSV file's accuracy; None: unknown.
    """

    mean: Tensor
    items: int
    outputs: Tensor | None = None
    targets: Tensor | None = None


class Batches(Protocol):
    """This rank's training data."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch, equal on every rank."""

    def epoch(
        self, epoch: int, start: int = 0, more_steps: Callable[[], bool] | None = None
    ) -> Iterator[tuple[int, Sequence[Any]]]:
        """Yields (step, batches of its backward passes) from step `start` to the end of the epoch.

        The batches depend on (seed, epoch, step, rank) only, so that a resumed run gets the same ones. If
        `more_steps` is given, it is called before each step and decides whether the epoch continues. A rank that
        takes more steps than its share of the data has begins its share again.
        """


class Task(ABC):
    """Base class of the tasks. A subclass is constructed with a `Setup` and sets the attributes.

    Attributes:
        item: what rates and the x axis of the log count, in the singular: "sample" or "token".
        batches: the training data.
        results: names of the results of `evaluate`, equal on every rank.
        lower_is_better: whether a lower value of `train.metric` is better.
    """

    item: ClassVar[str] = "sample"
    batches: Batches
    results: Sequence[str]
    lower_is_better: bool = False

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Forward pass and loss of one batch of `batches`."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Results by name, equal on every rank. Collective. Every item of the test data counts once."""

    def texts(self) -> Mapping[str, str]:
        """Texts of the last evaluation for TensorBoard, by tag: for example some translations."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """This rank's state that the next batch depends on, as plain values and tensors; {}: none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` has returned on this rank. A run on another number of ranks begins without it.

        Raises:
            ValueError: if it does not fit.
        """
        if state:
            raise ValueError(f"the checkpoint has a state of another task: {', '.join(state)}")
