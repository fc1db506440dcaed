"""The optimizer step of the training loop, with gradient clipping."""

from typing import Any

from omegaconf import DictConfig
from torch import nn


class Stepping:
    """Takes the optimizer steps of a run.

    With train.clip_norm, gradients are limited before the step: their average over the ranks or, with gossip,
    those of each rank.

    Args:
        optimizer: the distributed optimizer.
        model: its gradients are clipped.
        settings: the config's `train`.

    Raises:
        ValueError: if train.clip_norm is not positive.
    """

    def __init__(self, optimizer: Any, model: nn.Module, settings: DictConfig) -> None:
        if settings.clip_norm is not None and not settings.clip_norm > 0:
            raise ValueError(f"train.clip_norm is {settings.clip_norm}; it must be positive, or null for no limit")
        self.optimizer, self.model, self.clip_norm = optimizer, model, settings.clip_norm
        self.averages_gradients = settings.gossip is None

    def step(self) -> None:
        """Call after the backward passes of a step. Collective."""
        if self.clip_norm is None:
            self.optimizer.step()
        elif self.averages_gradients:
            self.optimizer.synchronize()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self.optimizer.step()
