"""The forward precision and the optimizer step of the training loop, with gradient clipping."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn


class Stepping:
    """Takes the optimizer steps of a run.

    With train.clip_norm, gradients are limited before the step: their average over the ranks or, with gossip,
    those of each rank. With train.precision bf16, the forward pass of training runs under torch.autocast.
    Parameters, gradients and the exchange remain fp32, and so does evaluation.

    Args:
        optimizer: the distributed optimizer.
        model: its gradients are clipped.
        settings: the config's `train`.
        device: of the model.

    Raises:
        ValueError: if train.clip_norm is not positive, or train.precision is neither fp32 nor bf16.
    """

    def __init__(self, optimizer: Any, model: nn.Module, settings: DictConfig, device: torch.device) -> None:
        if settings.precision not in ("fp32", "bf16"):
            raise ValueError(
                f"train.precision is {settings.precision!r}; it must be fp32 or bf16 (which needs no loss scaling)"
            )
        if settings.clip_norm is not None and not settings.clip_norm > 0:
            raise ValueError(f"train.clip_norm is {settings.clip_norm}; it must be positive, or null for no limit")
        self.optimizer, self.model, self.clip_norm = optimizer, model, settings.clip_norm
        self.device_type, self.is_bf16 = device.type, settings.precision == "bf16"
        self.averages_gradients = settings.gossip is None

    def autocast(self) -> AbstractContextManager[Any]:
        """Context manager for the forward pass and the loss."""
        return torch.autocast(self.device_type, torch.bfloat16) if self.is_bf16 else nullcontext()

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
