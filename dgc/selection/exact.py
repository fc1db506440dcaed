"""Exact top-k by magnitude, in the passes that each engine needs over the n elements of a bucket.

exact        u, v updated; then v searched: a sample of it suggests a floor for one more read, and only where that
             proves wrong all of it is counted
histogram    no history. The bits of |v| of a float, which order as the numbers do, are counted: first the upper
             ones, then the lower ones of those equal in these, until the k-th largest is known. On a CPU a sample
             of cache lines is counted first; its k-th largest, less five deviations, is a floor for the pass that
             updates u, v, and only where that proves wrong all of v is counted.
predicted    the floor is known before the pass, which takes the elements above it at once, so that traffic is that
             of updating u and v alone: 20 bytes per element. With t1, t2 the last two exact thresholds:
                 floor = 0.98 * t1 * min(max(t1 / t2, 0.97), 1.2)
             Where that was too high, or nothing is known yet, the tensor is searched as by `histogram`.

All three choose the same elements; history changes the time alone, so a resumed run needs none of it.
"""

from dataclasses import dataclass

from jaxtyping import Float32
from torch import Tensor

import dgc.kernels as kernels
from dgc.kernels import Accumulation, Quotas, Selection
from dgc.selection.plan import Plan
from dgc.selection.selector import Selected, Selector


@dataclass(frozen=True)
class Exact(Selector):
    """per_bucket: one threshold for all of a bucket in place of one per tensor, which is the paper's."""

    per_bucket: bool = False

    def quotas(self, plan: Plan) -> Quotas:
        return plan.per_bucket if self.per_bucket else plan.per_tensor

    def choose(self, v: Float32[Tensor, "n"], plan: Plan, seed: int) -> Selection:
        return kernels.of(v).select(v, self.quotas(plan)).selection


@dataclass(frozen=True)
class Histogram(Exact):
    def select(self, due: Accumulation, plan: Plan, seed: int) -> Selected:
        chosen = kernels.of(due.v).accumulate_and_select_(due, self.quotas(plan), None)
        return Selected(chosen.selection, chosen.first_nonfinite)


@dataclass(frozen=True)
class Predicted(Exact):
    """margin: how far below the predicted threshold the floor lies. Error feedback without momentum is noisier
    from step to step, and 0.95 misses less there.
    """

    margin: float = 0.98

    def __post_init__(self) -> None:
        if not 0 < self.margin <= 1:
            raise ValueError(f"margin is a fraction in (0, 1], not {self.margin}")

    def select(self, due: Accumulation, plan: Plan, seed: int) -> Selected:
        kernel, quotas, history = kernels.of(due.v), self.quotas(plan), plan.history
        floors = kernel.predicted_floors(history["t1"], history["t2"], self.margin) if history else None
        chosen = kernel.accumulate_and_select_(due, quotas, floors)
        plan.history.update(t1=chosen.thresholds, t2=history.get("t1", chosen.thresholds))
        return Selected(chosen.selection, chosen.first_nonfinite)
