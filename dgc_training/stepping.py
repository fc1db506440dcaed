"""The forward precision and the optimizer step of the training loop, with gradient clipping and loss scaling."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# A CPU is slower in fp16 than in fp32.
FP16_DEVICES = ("cuda",)


def make_scaler(settings: DictConfig, device: torch.device) -> GradScaler | None:
    """The loss scale of a run with train.precision fp16; None for any other precision.

    Args:
        settings: the config's `train`.
        device: of the model.

    Raises:
        ValueError: if train.precision is unknown, or fp16 where ranks have models of their own, or on a CPU.
    """
    if settings.precision not in AUTOCAST:
        raise ValueError(f"train.precision is {settings.precision!r}; it must be one of {', '.join(AUTOCAST)}")
    if settings.precision != "fp16":
        return None
    if device.type not in FP16_DEVICES:
        raise ValueError(
            f"train.precision is fp16, which needs a GPU, and the device is {device.type}: use bf16, or a GPU"
        )
    if models := "local" if settings.local else "gossip" if settings.gossip else None:
        raise ValueError(
            f"train.precision is fp16, but with train.{models} every rank would have a loss scale of its own: "
            "use bf16"
        )
    return GradScaler(device.type)


class Stepping:
    """Takes the optimizer steps of a run.

    With train.clip_norm, gradients are limited before the step: their average over the ranks or, with gossip,
    the gradients of each rank. Momentum is not: 1-bit Adam and DGC for Adam put it, or a mean of updates, in place
    of the gradients after their warm-up.

    With train.precision bf16 or fp16, the forward pass of training runs under torch.autocast. Parameters,
    gradients and the exchange remain fp32, and so does evaluation. With fp16 the loss is scaled: a step in which a
    gradient of any rank is not finite is dropped on every rank, and lowers the scale of all.

    Args:
        optimizer: the distributed optimizer.
        model: its gradients are clipped.
        settings: the config's `train`.
        device: of the model.
        scaler: of `make_scaler`, and the `grad_scaler` of `optimizer`.

    Raises:
        ValueError: if train.clip_norm is not positive.
    """

    def __init__(
        self,
        optimizer: Any,
        model: nn.Module,
        settings: DictConfig,
        device: torch.device,
        scaler: GradScaler | None = None,
    ) -> None:
        if settings.clip_norm is not None and not settings.clip_norm > 0:
            raise ValueError(f"train.clip_norm is {settings.clip_norm}; it must be positive, or null for no limit")
        self.optimizer, self.model, self.clip_norm = optimizer, model, settings.clip_norm
        self.device_type, self.dtype, self.scaler = device.type, AUTOCAST[settings.precision], scaler
        self.averages_gradients = not (settings.local or settings.gossip)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context manager for the forward pass and the loss."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device_type, self.dtype)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a loss, which is scaled first in fp16."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self) -> None:
        """Call after the backward passes of a step. Collective."""
        if self.clip_norm is None or getattr(self.optimizer, "receives_momentum", False):
            self._step()
        elif self.averages_gradients:
            self.optimizer.synchronize()
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            with self.optimizer.skip_synchronize():
                self._step()
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self._step()

    def _step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            # Avoids torch's warning about a scheduler that steps first, if the first step is dropped.
            self.optimizer._opt_called = True
