"""Warm-up of the ratio (Lin et al. 2018, arXiv 1712.01887, section 3.3): the first epochs send more elements.

With W = warmup_epochs and the final ratio D, epoch e < W (from 0) sends

    no coefficient      D ** ((e+1)/W)               W = 5, D = 0.001: 0.25, 0.063, 0.016, 0.004, 0.001
    a number c          max(c ** (e+1), D)
    a list              its e-th entry

Differences from the original: Its default exponent is (e+1)/(W+1), which does not give the ratios in its
documentation (0.25, 0.063, 0.015, 0.004, 0.001). The first formula above does.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from dgc.arguments import NUMBER, WHOLE, require


@dataclass(frozen=True)
class RatioWarmup:
    """Schedule of the ratio over epochs.

    Args:
        ratio (float): final ratio D, a fraction.
        warmup_epochs (int): number of warm-up epochs W; 0 or less for none.
        warmup_coeff (float or sequence of float, optional): base of the decay, or one ratio for each warm-up
            epoch.

    Raises:
        ValueError: if an argument has a wrong type or is out of range, or the list is shorter than
            warmup_epochs.
    """

    ratio: float
    warmup_epochs: int = -1
    warmup_coeff: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        require("a whole number of epochs", WHOLE, warmup_epochs=self.warmup_epochs)
        coefficients: Sequence[float] = ()
        if isinstance(self.warmup_coeff, Sequence):
            coefficients = self.warmup_coeff
            if len(coefficients) < self.warmup_epochs:
                raise ValueError(
                    f"warmup_coeff lists {len(coefficients)} ratios for {self.warmup_epochs} warmup_epochs"
                )
        elif self.warmup_coeff is not None:
            coefficients = (self.warmup_coeff,)
        for c in coefficients:
            if isinstance(c, bool) or not isinstance(c, NUMBER):
                raise ValueError(
                    f"warmup_coeff must be None, a number or a list of numbers, not {self.warmup_coeff!r}"
                )
            if not 0 < c <= 1:
                raise ValueError(f"warmup_coeff must lie in (0, 1], not {c}")

    def warn_of_no_epoch(self) -> None:
        """Warns that begin_epoch was not called before the first step."""
        warnings.warn(
            f"warmup_epochs={self.warmup_epochs}, but begin_epoch was not called before the first step: "
            f"compress_ratio stays at {self.at(0):.4g}. Call optimizer.begin_epoch(epoch) before each epoch, or "
            "pass steps_per_epoch to DistributedOptimizer",
            stacklevel=3,
        )

    def at(self, epoch: int) -> float:
        if epoch >= self.warmup_epochs:
            return self.ratio
        if self.warmup_coeff is None:
            return self.ratio ** ((epoch + 1) / self.warmup_epochs)
        if isinstance(self.warmup_coeff, Sequence):
            return self.warmup_coeff[epoch]
        return max(self.warmup_coeff ** (epoch + 1), self.ratio)
