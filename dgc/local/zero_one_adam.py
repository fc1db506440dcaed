"""The optimizer of 0/1 Adam: Adam's moments and its step. `dgc.local.zero_one_steps` has the algorithm.

With the learning rate gamma and weight decay lambda, in one step of a rank:

    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) g**2                      in the steps of T_v, where g is the mean over the ranks
    u = u + rate m                                      in all others;  rate = gamma / c1
    x = (1 - gamma lambda) x - rate m / (sqrt(v / c2) + eps)

    c1 = 1 - beta1**t in step t = 1, 2, ..;  c2 = 1 - beta2**k after k updates of v

Differences from the paper: those of `dgc.optim.OneBitAdam`: bias corrections, decoupled weight decay, and `floor`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

from dgc.arguments import checked
from dgc.engine.options import check_adam, loss_of


@checked
class ZeroOneAdam(Optimizer):
    """Adam for `ZeroOneSteps`, which says when the second moment is updated and exchanges the first one (Lu et al.
    2022, arXiv 2202.06009, Algorithm 1).

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate. After a sudden fall of it, momentum is too large for some steps.
        betas: Coefficients of the first and the second moment, each in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay: p = p - lr weight_decay p.
        bias_correction: Divide the moments by 1 - beta**t. DeepSpeed does not.
        floor: Smallest second moment, as a fraction of the mean of its tensor, from 0 to 1. With 0, training may
            diverge if some elements have had very small gradients.

    Raises:
        ValueError: An argument is out of range.

    Example:
        optimizer = ZeroOneAdam(model.parameters(), lr=1e-3)
        optimizer = LocalOptimizer(optimizer, model.named_parameters(), ZeroOneSteps(var_freeze_step=1000))
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        floor: float = 0.01,
    ):
        check_adam(betas, floor, lr=lr, eps=eps, weight_decay=weight_decay)
        self._buffers: Mapping[Tensor, Tensor] | None = None
        self._updates_variance = False
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction, floor=floor
        )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        first, new = self.param_groups[0], self.param_groups[-1]
        for count in ("steps", "variance_steps"):
            new[count] = 0 if new is first else first[count]

    # --- the view of ZeroOneSteps -----------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of steps so far, those without finite gradients included. The same on every rank."""
        return int(self.param_groups[0]["steps"])

    def use_buffers(self, buffers: Mapping[Tensor, Tensor]) -> None:
        """Add what moves a parameter to its buffer u, fp32, in each step that leaves the second moments."""
        self._buffers = buffers

    def advance(self, updates_variance: bool) -> None:
        """Begin the next step. updates_variance: whether .grad is the mean gradient, and changes v."""
        self._updates_variance = updates_variance
        for group in self.param_groups:
            group["steps"] += 1
            group["variance_steps"] += updates_variance

    def rate(self, group: Mapping[str, Any]) -> float:
        """The factor of the momentum in this step: gamma / c1."""
        c1 = 1 - group["betas"][0] ** group["steps"] if group["bias_correction"] else 1.0
        return float(group["lr"] / c1)

    def moments(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """m and v of a parameter, which are zero before its first step."""
        state = self.state[p]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        return state["exp_avg"], state["exp_avg_sq"]

    def denominator(self, v: Float[Tensor, "..."], group: Mapping[str, Any]) -> Float[Tensor, "..."]:
        """sqrt(v / c2) + eps, in a new tensor."""
        c2 = 1 - group["betas"][1] ** max(1, group["variance_steps"]) if group["bias_correction"] else 1.0
        return v.sqrt().div_(c2**0.5).add_(group["eps"])

    # --- one step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._buffers is None:
            raise ValueError(
                "ZeroOneAdam steps only within ZeroOneSteps: wrap it in LocalOptimizer(optimizer, "
                "model.named_parameters(), ZeroOneSteps(...)), or use torch.optim.AdamW"
            )
        loss = loss_of(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._update(p, p.grad, self._buffers[p], group)
        return loss

    def _update(self, p: Tensor, gradient: Tensor, u: Tensor, group: dict[str, Any]) -> None:
        (m, v), (beta1, beta2), rate = self.moments(p), group["betas"], self.rate(group)
        m.lerp_(dense(gradient), 1 - beta1)
        if self._updates_variance:
            v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            v.clamp_(min=group["floor"] * v.sum(dtype=torch.float64).div(max(1, v.numel())).to(v.dtype))
        m.masked_fill_(v == 0, 0.0)
        if not self._updates_variance:
            u.add_(m, alpha=rate)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(m, self.denominator(v, group), value=-rate)


def dense(gradient: Tensor) -> Tensor:
    """The gradient. Raises ValueError if it is sparse."""
    if gradient.is_sparse:
        raise ValueError("ZeroOneAdam takes dense gradients: set sparse=False in the embedding")
    return gradient
