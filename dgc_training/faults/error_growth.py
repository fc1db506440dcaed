"""Warning when the residual grows without bound.

With error feedback the norm of the residual rises at first and then levels off, once the amount sent per step
balances the amount added. If the ratio is too small, the learning rate diverges or a rank no longer sends, the
norm keeps growing. The rule compares windows of points (a point is `train.log_every` steps). The reference is the
highest norm of the first WINDOW points at a settled ratio. The warning is issued, once, when two consecutive
windows are above FACTOR times the reference and the second is above the first.

A coordinate is sent every 1 / ratio steps on average, and a healthy residual fills within that many steps. It
fills again when warm-up lowers the ratio. The reference is therefore taken only after half of these steps at one
ratio, and after at least SETTLING steps.
"""

from math import isfinite

SETTLING = 100  # steps
WINDOW = 5  # points
FACTOR = 10.0


class ErrorGrowthMonitor:
    """Call `update` at each point, in order. It returns a warning at most once."""

    def __init__(self) -> None:
        self._ratio: float | None = None
        self._steps = 0  # at this ratio
        self._early: list[float] = []
        self._recent: list[float] = []
        self._has_warned = False

    def update(self, norm: float, ratio: float, steps: int) -> str | None:
        """Returns the warning, or None.

        Args:
            norm: norm of the residual.
            ratio: current compress_ratio.
            steps: steps since the previous point.
        """
        if self._has_warned:
            return None
        if not isfinite(norm):
            self._has_warned = True
            return f"the residual is not finite ({norm}): the unsent gradients in it are lost."
        if ratio != self._ratio:
            self._ratio, self._steps, self._early, self._recent = ratio, 0, [], []
        self._steps += steps
        if self._steps <= max(SETTLING, 0.5 / ratio) or ratio >= 1:
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
        self._has_warned = True
        return (
            f"the residual's norm has grown from {early:.3g} to {norm:.3g} at compress_ratio {ratio:.3g} and "
            "keeps growing: less is sent than is added, and what is sent is out of date. Raise the ratio, lower "
            "the learning rate, or clip gradients (compression/error_norm in TensorBoard shows the norm)."
        )
