"""The steps in which 0/1 Adam communicates (Lu et al. 2022, arXiv 2202.06009), as DeepSpeed's options choose them.

T_v     F = var_freeze_step, kappa = var_update_scaler:
        k_0 = 0,  k_(j+1) = k_j + 2**(j // kappa),  all k_j < F
T_u     every step before F; then the gap H is 1 for local_step_scaler steps, 2 for as many, 4, ..,
        and at most local_step_clipper
"""

from dataclasses import asdict, dataclass

from dgc.arguments import WHOLE, require


@dataclass(frozen=True)
class ZeroOneSchedule:
    """The steps of T_v and the gaps of T_u. Steps are counted from 0. The arguments are those of `ZeroOneSteps`.

    Raises:
        ValueError: if an argument is not a whole number of at least 1.
    """

    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def __post_init__(self) -> None:
        require("a whole number of at least 1", WHOLE, least=1, **asdict(self))

    def updates_variance(self, t: int) -> bool:
        """Whether step t is in T_v."""
        kappa = self.var_update_scaler
        doublings = (t // kappa + 1).bit_length() - 1  # kappa (2**i - 1) is the first step with gaps of 2**i
        return t < self.var_freeze_step and (t - kappa * (2**doublings - 1)) % 2**doublings == 0

    def interval(self, t: int) -> int:
        """H: the gap of T_u in step t."""
        doublings = max(0, t - self.var_freeze_step) // self.local_step_scaler
        return min(self.local_step_clipper, 2 ** min(doublings, 62))

    def exchanges_sum(self, t: int, local_steps: int) -> bool:
        """Whether step t, the `local_steps`-th since the last exchange, ends with an exchange: it is in T_u."""
        return local_steps >= self.interval(t)

    def exchanges(self, steps: int) -> int:
        """Number of exchanges in the first `steps` steps, of gradients or sums."""
        count = local_steps = 0
        for t in range(steps):
            local_steps += 1
            if self.updates_variance(t) or self.exchanges_sum(t, local_steps):
                count, local_steps = count + 1, 0
        return count
