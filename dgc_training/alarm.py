"""An alarm when the error state grows without bound.

With error feedback the state's norm climbs at first and then levels off: what leaves per step balances what
comes in. A ratio too small, a learning rate that diverges or a rank that no longer sends shows as growth that
does not end. The rule compares windows of points (a point is `train.log_every` steps): the highest norm of the
first WINDOW points of a settled ratio is the reference; two windows in a row above FACTOR times it, the second
above the first, raise the alarm, once.

A healthy state fills within the 1 / ratio steps after which a coordinate is sent on average, and again when
warm-up lowers the ratio: the reference waits for half of them at one ratio, and for SETTLING steps at least.
"""

from math import isfinite

SETTLING = 100  # steps
WINDOW = 5  # points
FACTOR = 10.0


class ErrorAlarm:
    """`look` at each point, in order; it answers with a warning at most once."""

    def __init__(self) -> None:
        self._ratio: float | None = None
        self._since = 0
        self._early: list[float] = []
        self._recent: list[float] = []
        self._told = False

    def look(self, norm: float, ratio: float, steps: int) -> str | None:
        """norm: of the error state; ratio: compress_ratio in force; steps: taken since the point before."""
        if self._told:
            return None
        if not isfinite(norm):
            self._told = True
            return f"the error state is not finite ({norm}): no gradient held back will reach the model any more."
        if ratio != self._ratio:
            self._ratio, self._since, self._early, self._recent = ratio, 0, [], []
        self._since += steps
        if self._since <= max(SETTLING, 0.5 / ratio) or ratio >= 1:
            return None
        if len(self._early) < WINDOW:
            self._early.append(norm)
            return None
        self._recent = [*self._recent, norm][-2 * WINDOW :]
        early = max(self._early)
        before, now = self._recent[:WINDOW], self._recent[WINDOW:]
        if len(now) < WINDOW or early == 0 or min(self._recent) <= FACTOR * early:
            return None
        if max(now) <= max(before) or min(now) <= min(before):
            return None
        self._told = True
        return (
            f"the error state's norm has grown from {early:.3g} to {norm:.3g} at compress_ratio {ratio:.3g} and "
            "grows on: more is held back than ever gets sent, and what gets sent is stale. Raise the ratio, lower "
            "the learning rate, or clip gradients (error_norm in TensorBoard shows the curve)."
        )
