"""Adam for Deep Gradient Compression of preconditioned gradients: see dgc/codes/onebit_adam.py.

With the learning rate gamma and T_w = freeze_step, in step t = 1, 2, ..:

    t <= T_w     AdamW with the mean gradient g:  m, v, x
    t > T_w      r = mean over the ranks of what DGC sends of  u_i = beta1 u_i + g_i / (sqrt(v / c2) + eps)
                 m = beta1 m                                   what is left of the warm-up's momentum
                 x = x - gamma / c1 ((1 - beta1) r + m / (sqrt(v / c2) + eps))
                 c1 = 1 - beta1**t,  c2 = 1 - beta2**T_w,  v stays

If all of u_i is sent, this is AdamW with a constant v.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dgc.optim.onebit_adam import OneBitAdam

NEGLIGIBLE = 1e-6  # share of the warm-up's momentum


class DGCAdam(OneBitAdam):
    """AdamW for `freeze_step` steps, then updates that `DGCAdamCompressor` sends with a second moment that stays.

    Args:
        params, lr, betas, eps, weight_decay, bias_correction, floor: As `OneBitAdam`.
        freeze_step: As `OneBitAdam`. Take 10 to 20 % of all steps, and at least the learning rate's warm-up.

    Example:
        optimizer = DGCAdam(model.parameters(), lr=1e-3, freeze_step=1000)
        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), DGCAdamCompressor(0.01))
    """

    def receive_momentum_of(self, parameters: Iterable[Tensor]) -> None:
        """Take .grad of these parameters as the mean of updates in every step with `exchanges_momentum`."""
        super().receive_momentum_of(parameters)
        # of each parameter its second moment, with the version, and the factor
        self._preconditioners: dict[Tensor, tuple[Tensor, int, Tensor]] = {}

    def preconditioner_of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return 1 / (sqrt(v / c2) + eps) of each parameter, and zero where v is zero, after the warm-up.

        The tensors are kept, because v stays.
        """
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        return [self._preconditioner(p, group_of[p]) for p in parameters]

    def _preconditioner(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        if not self.state.get(p):
            return torch.zeros_like(p, dtype=torch.float32)
        v = self.state[p]["exp_avg_sq"]
        kept = self._preconditioners
        if p not in kept or kept[p][0] is not v or kept[p][1] != v._version:  # a loaded state is another v
            root = v.to(torch.float32).sqrt().div_(self._corrections(group)[1] ** 0.5)
            kept[p] = v, v._version, root.add_(group["eps"]).reciprocal_().masked_fill_(v == 0, 0.0)
        return kept[p][2]

    def _update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], frozen: bool) -> None:
        if not frozen or p not in self._receives_momentum:
            return super()._update(p, gradient, group, frozen)
        (beta1, _), (c1, _), lr = group["betas"], self._corrections(group), group["lr"]
        p.mul_(1 - lr * group["weight_decay"])
        p.add_(gradient, alpha=-lr * (1 - beta1) / c1)
        if self.state.get(p) and beta1 ** (group["steps"] - group["freeze_step"]) > NEGLIGIBLE:
            m = self.state[p]["exp_avg"].mul_(beta1)
            p.addcmul_(m, self._preconditioner(p, group).to(m.dtype), value=-lr / c1)
