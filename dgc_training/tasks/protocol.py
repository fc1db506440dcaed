"""The interface between the training loop and a task, which the config's `task` names."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from dgc.comm import Transport


class Batches(Protocol):
    """The training data of one rank."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch, equal on every rank."""

    def epoch(
        self, epoch: int, start: int = 0, more_steps: Callable[[], bool] | None = None
    ) -> Iterator[tuple[int, list[Any]]]:
        """Yields (step, the batch of each backward pass) from step `start` to the end of the epoch.

        A run that resumes at any step must get the batches of one that never stopped. If `more_steps` is given, it
        is called before each step and decides whether the epoch continues.
        """


class Evaluation(Protocol):
    """Evaluates a model over all ranks."""

    names: list[str]
    # texts of the last evaluation for TensorBoard, by tag, on rank 0 at least
    texts: dict[str, str]

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Returns the results by name, equal on every rank. Collective."""


class Pass(NamedTuple):
    """One forward pass. loss: a scalar. outputs and targets: for the CSV log, which knows [n, classes] and [n]."""

    loss: Tensor
    outputs: Tensor
    targets: Tensor


class Task(Protocol):
    """The interface of the config's `task`. `dataset` is what the config's `dataset` builds."""

    def batches(
        self, dataset: Mapping[str, Any], tree: DictConfig, transport: Transport, device: torch.device
    ) -> Batches:
        """The training data of this rank. tree: the complete config. Raises ValueError for bad settings."""

    def evaluation(
        self, dataset: Mapping[str, Any], tree: DictConfig, transport: Transport, device: torch.device
    ) -> Evaluation:
        """The evaluation of every split but 'train'. Collective. Raises ValueError for bad settings."""

    def forward(self, model: nn.Module, criterion: nn.Module, batch: Any) -> Pass:
        """Runs the forward pass of one batch of `batches`."""

    def counts(self, passes: list[Any], size: int) -> dict[str, int]:
        """What a step of all `size` ranks has: {'samples': n}, and 'tokens' to show the rate in tokens."""
