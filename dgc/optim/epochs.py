"""Epochs counted by steps, for compressors that warm up."""

from collections.abc import Callable
from typing import Any


class EpochCount:
    """Calls `begin_epoch` before the first step of each epoch.

    The position is saved in epochs, so it stays valid if the number of steps per epoch changes on resume.

    Args:
        steps_per_epoch: Steps in an epoch. None: epochs are not counted.
        begin_epoch: Called with the epoch, counted from 0.

    Raises:
        ValueError: `steps_per_epoch` is neither None nor a positive int.
    """

    def __init__(self, steps_per_epoch: int | None, begin_epoch: Callable[[int], Any]):
        if steps_per_epoch is not None:
            whole = isinstance(steps_per_epoch, int) and not isinstance(steps_per_epoch, bool)
            if not whole or steps_per_epoch < 1:
                raise ValueError(f"steps_per_epoch must be None or a positive int, not {steps_per_epoch!r}")
        self.steps_per_epoch, self._begin_epoch = steps_per_epoch, begin_epoch
        self._steps, self._epoch = 0, -1

    def begin(self) -> None:
        """Begin the epoch of the next step, unless it has begun already."""
        if self.steps_per_epoch is not None and (epoch := self._steps // self.steps_per_epoch) != self._epoch:
            self._epoch = epoch
            self._begin_epoch(epoch)

    def begin_step(self) -> None:
        """Count a step. Call it once per step, before the step sends anything."""
        self.begin()
        self._steps += 1

    def state_dict(self) -> dict[str, float]:
        return {} if self.steps_per_epoch is None else {"epochs": self._steps / self.steps_per_epoch}

    def check(self, epochs: float | None) -> None:
        """Raise ValueError if a saved position is needed and `epochs` is None."""
        if self.steps_per_epoch is not None and epochs is None:
            raise ValueError(
                "this state was saved without steps_per_epoch, so it has no epoch: build the optimizer without "
                "steps_per_epoch and call begin_epoch(epoch) before each epoch"
            )

    def load(self, epochs: float | None) -> None:
        """Continue from a saved position, in epochs. It is ignored if epochs are not counted."""
        if self.steps_per_epoch is not None and epochs is not None:
            self._steps, self._epoch = round(epochs * self.steps_per_epoch), -1
            self.begin()
