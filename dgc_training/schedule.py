"""The learning rate of every step: linear scaling, gradual warm-up, then any torch scheduler.

Goyal et al., Accurate, Large Minibatch SGD, sections 2.1 and 2.2, https://arxiv.org/abs/1706.02677.
With n ranks, b backward passes per step, a base rate lr0 and W warm-up epochs:

    lr_scaled = lr0 * b * n
    lr(e)     = lr_scaled * (e * (n - 1) / W + 1) / n     for e < W; e is the fractional epoch
    lr(W)     = lr_scaled                                 then the scheduler steps, per epoch or per step

Differences from the original DGC trainer:

- The scheduler's state is saved and loaded. The original rebuilt it from an epoch number, which made MultiStepLR
  decay twice when it was resumed right after a milestone.
- A scheduler that starts below its base rate (LinearLR) keeps its starting rate.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

from dgc_training.config import ConfigError


def warmup_factor(epoch: float, size: int, warmup_epochs: int) -> float:
    """Fraction of the scaled learning rate at fractional `epoch` of the warm-up, on `size` ranks."""
    return (epoch * (size - 1) / warmup_epochs + 1) / size


def scale_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Multiplies the learning rate of every group. Call it before building a scheduler, which stores the rate."""
    for group in optimizer.param_groups:
        group["lr"] *= factor


class InverseSquareRoot:
    """The factor of `inverse_square_root` by step, for LambdaLR, which saves the attributes of an object."""

    def __init__(self, warmup_steps: int, start: float) -> None:
        self.warmup_steps = warmup_steps
        self.start = start

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.start + (1 - self.start) * step / self.warmup_steps
        return math.sqrt(max(1, self.warmup_steps) / max(1, step))


def inverse_square_root(optimizer: Optimizer, warmup_steps: int = 4000, start: float = 2e-4) -> LambdaLR:
    """The schedule of the Transformer: a linear warm-up to the rate lr, then lr * sqrt(warmup_steps / step).

    Vaswani et al., Attention Is All You Need, section 5.3, https://arxiv.org/abs/1706.03762; as in fairseq, lr is
    the largest rate. It counts steps: set train.schedule_lr_per_epoch to False and train.warmup_lr_epochs to 0.

    Args:
        optimizer: its rates are the largest ones.
        warmup_steps: steps until the largest rate.
        start: the first rate as a share of the largest one.

    Raises:
        ValueError: if a number is out of range.
    """
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}; it must be 0 or more")
    if not 0 <= start <= 1:
        raise ValueError(f"start is {start}; it must be from 0 to 1")
    return LambdaLR(optimizer, InverseSquareRoot(warmup_steps, start))


def is_due(every: int | None, step: int) -> bool:
    """Whether a task of every `every` steps is due after `step` (0-based). None or 0: never."""
    return bool(every) and (step + 1) % cast(int, every) == 0


def warmup_cosine(optimizer: Optimizer, warmup_steps: int, total_steps: int, final: float = 0.1) -> LambdaLR:
    """Linear warm-up, then a cosine to `final` times the rate, counted in optimizer steps.

    Use it with train.schedule_lr_per_epoch=False and train.warmup_lr_epochs=0.

    Raises:
        ValueError: unless 0 <= warmup_steps < total_steps and 0 <= final <= 1.
    """
    if not 0 <= warmup_steps < total_steps:
        limits = f"it must be from 0 to total_steps - 1, {total_steps - 1}, by the epochs and their steps"
        raise ValueError(f"warmup_steps is {warmup_steps}; {limits}")
    if not 0 <= final <= 1:
        raise ValueError(f"final is {final}; it must be from 0 to 1")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)


class Schedule:
    """Sets the learning rates of `optimizer` by the formulas above.

    Call `begin_step` exactly once before every step, in order. `state_dict` may be taken between any two steps.

    Args:
        optimizer: its learning rates are already scaled.
        make_scheduler: takes the optimizer; returns a scheduler, or None for a constant rate.
        size: number of ranks.
        steps_per_epoch: optimizer steps in an epoch.
        warmup_epochs: epochs of warm-up; 0: none.
        per_epoch: True: the scheduler steps once per epoch. False: once per optimizer step.

    Raises:
        ValueError: if `warmup_epochs` is negative or the scheduler is not supported.
        ConfigError: if a learning rate is not a finite fp32 number.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make_scheduler: Callable[[Optimizer], LRScheduler | None],
        *,
        size: int,
        steps_per_epoch: int,
        warmup_epochs: int = 0,
        per_epoch: bool = True,
    ) -> None:
        if warmup_epochs < 0:
            raise ValueError(f"train.warmup_lr_epochs is {warmup_epochs}; it must be 0 or more")
        self.optimizer = optimizer
        self.size = size
        self.steps_per_epoch = steps_per_epoch
        self.warmup_epochs = warmup_epochs
        self.per_epoch = per_epoch
        self.scheduler = make_scheduler(optimizer)
        if self.scheduler is not None and not isinstance(self.scheduler, LRScheduler):
            raise ValueError(
                f"train.scheduler is a {type(self.scheduler).__name__}, not a learning-rate scheduler"
            )
        if type(self.scheduler).__name__ == "ReduceLROnPlateau":
            raise ValueError("train.scheduler: ReduceLROnPlateau needs a metric at each step and is not supported")
        # The last epoch begun. A run resumed on more ranks continues at an earlier step, which may be step 0
        # again.
        self.epoch = -1
        # Read after the scheduler's initial step, so that its starting factor is kept.
        self.start_rates: list[float] = self.rates()
        self._check_rates()

    @property
    def counts_steps(self) -> bool:
        """Whether the scheduler counts steps. The number of steps in an epoch depends on the number of ranks."""
        return self.scheduler is not None and not self.per_epoch

    def rates(self) -> list[float]:
        """The current learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def begin_step(self, epoch: int, step: int) -> None:
        """Sets the rates for `step` (0-based) of `epoch` (0-based)."""
        is_new_epoch, self.epoch = epoch != self.epoch, epoch
        if epoch < self.warmup_epochs:
            # An asynchronous rank may take more steps than an epoch has.
            fraction = min(epoch + step / self.steps_per_epoch, self.warmup_epochs)
            self._set([rate * warmup_factor(fraction, self.size, self.warmup_epochs) for rate in self.start_rates])
        elif epoch == self.warmup_epochs and step == 0:
            self._set(self.start_rates)
        elif self.scheduler is not None and (is_new_epoch or not self.per_epoch):
            self.scheduler.step()
            self._check_rates()

    def _check_rates(self) -> None:
        for rate in self.rates():
            if not abs(rate) <= torch.finfo(torch.float32).max:
                raise ConfigError(
                    f"the learning rate is {rate}, which is not a finite fp32 number: lower train.optimizer.lr "
                    "(it is multiplied by the ranks and by train.num_batches_per_step), or change train.scheduler"
                )

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def may_change(self, key: str) -> bool:
        """Whether the scheduler may set this key of the groups, apart from lr.

        A scheduler that cycles momentum sets it. A scheduler that is not from torch may set any key.
        """
        if self.scheduler is None:
            return False
        if type(self.scheduler).__module__ != "torch.optim.lr_scheduler":
            return True
        cycles = isinstance(self.scheduler, OneCycleLR | CyclicLR | SequentialLR | ChainedScheduler)
        return cycles and key in ("momentum", "betas")

    def state_dict(self) -> dict[str, Any]:
        """State of the schedule. The current rates are in the optimizer's state_dict."""
        return {
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "size": self.size,
            "steps_per_epoch": self.steps_per_epoch,
            "epoch": self.epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Call after loading the optimizer's state. Rates saved on another number of ranks are rescaled."""
        if (state["scheduler"] is None) != (self.scheduler is None):
            raise ValueError("the checkpoint was saved with another train.scheduler")
        self.epoch = state["epoch"]
        factor = self.size / state["size"]
        if self.scheduler is None:
            scale_learning_rate(self.optimizer, factor)
            return
        base_rates = self.scheduler.base_lrs
        self.scheduler.load_state_dict(state["scheduler"])
        scale_learning_rate(self.optimizer, factor)
        self.scheduler.base_lrs = base_rates
        for group, rate in zip(self.optimizer.param_groups, base_rates, strict=True):
            group["initial_lr"] = rate
        # Avoids torch's warning about a scheduler that steps before its optimizer: the optimizer stepped before
        # the state was saved.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
