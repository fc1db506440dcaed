"""1-bit Adam (Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang, He 2021, arXiv 2102.02888, Algorithm 1).

With the learning rate gamma and T_w = freeze_step, in step t = 1, 2, ..:

    t <= T_w     g = mean over the ranks of g_i
                 m = beta1 m + (1 - beta1) g
                 v = beta2 v + (1 - beta2) g**2
    t > T_w      m = DoubleSqueeze of beta1 m + (1 - beta1) g_i, from `OneBitAdamCompressor`;  v stays
    always       x = x - gamma (m / c1) / (sqrt(v / c2) + eps)
                 c1 = 1 - beta1**t,  c2 = 1 - beta2**min(t, T_w)

Adam's step is not linear in the gradient, so error feedback of gradients does not fit it. With a frozen v the step
is linear in m, and what compression leaves out of m can be added later.

Differences from the paper: the bias corrections c1 and c2 (the paper's: bias_correction=False), and decoupled
weight decay. After step T_w, v is raised to `floor` times its mean over the tensor (the paper's: floor=0), because
C[x] has one magnitude for all elements of a piece, and one with a far smaller v would move too far. A tensor that
has had no gradient in the warm-up does not move after it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.conversation import without_autocast
from dgc.core.arguments import FLAG, WHOLE, require
from dgc.engine.options import OF_SCHEDULERS, check_adam, check_optimizer_state, check_saved_groups, loss_of

MOMENTS = ("exp_avg", "exp_avg_sq")


def is_of_adam(state: Any) -> bool:
    """Whether a state has the form of a state of torch.optim.AdamW or Adam."""
    try:
        groups, states = state["param_groups"], state["state"].values()
        has_groups = all("amsgrad" in group and "freeze_step" not in group for group in groups)
        return has_groups and all({"step", *MOMENTS} <= own.keys() for own in states)
    except (AttributeError, KeyError, TypeError):
        return False


class OneBitAdam(Optimizer):
    """Adam whose momentum is exchanged in 1 bit per element after a warm-up (Tang et al. 2021, arXiv 2102.02888).

    For the first `freeze_step` steps it is torch.optim.AdamW. Then the second moment stays as it is, and
    `OneBitAdamCompressor` exchanges the first moment. Parameters of other compressors go on with AdamW.

    A row of an embedding that never gets a gradient, such as the row of `padding_idx`, moves after the warm-up,
    and back, by 0.02 to 0.06 in runs of some hundred steps, unless floor is 0 or embeddings are exchanged dense.

    To switch a run of AdamW, load its state. Its steps count, so `freeze_step` must be above their number.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Coefficients of the first and the second moment, each in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay: p = p - lr weight_decay p.
        freeze_step: Number of steps of the warm-up, at least 1. Dropped steps do not count. The second moment
            must have settled by then: take 15 to 25 % of all steps, and at least the learning rate's warm-up.
        bias_correction: Divide the moments by 1 - beta**t. The paper does not.
        floor: Smallest second moment after the warm-up, as a fraction of the mean of its tensor, from 0 to 1. With
            0 training may diverge if some elements have had very small gradients.

    Raises:
        ValueError: An argument is out of range, or parameter groups differ in freeze_step.

    Example:
        optimizer = OneBitAdam(model.parameters(), lr=1e-3, freeze_step=1000)
        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), OneBitAdamCompressor())
    """

    _receives_momentum: frozenset[Tensor] = frozenset()  # of a copy too: nothing exchanges its momentum

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int,
        bias_correction: bool = True,
        floor: float = 0.01,
    ):
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            freeze_step=freeze_step,
            bias_correction=bias_correction,
            floor=floor,
        )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        first, new = self.param_groups[0], self.param_groups[-1]
        if any(p.is_complex() for p in new["params"]):
            kind = type(self).__name__
            raise ValueError(f"{kind} takes real parameters: call torch.view_as_complex in forward()")
        if new["freeze_step"] != first["freeze_step"]:
            raise ValueError(
                f"freeze_step is {first['freeze_step']} in group 0 and {new['freeze_step']} in group "
                f"{len(self.param_groups) - 1}: all groups change to compression in the same step"
            )
        new["steps"] = 0 if new is first else first["steps"]

    @property
    def exchanges_momentum(self) -> bool:
        """Whether the next step needs the momentum of the ranks. Before, it needs their gradients."""
        group = self.param_groups[0]
        return bool(group["steps"] >= group["freeze_step"])

    @property
    def receives_momentum(self) -> bool:
        """Whether .grad is not a gradient in the next step, but what `receive_momentum_of` says."""
        return self.exchanges_momentum and bool(self._receives_momentum)

    def momentum_of(self, parameters: Sequence[Tensor]) -> list[tuple[float, Tensor]]:
        """Return beta1 and the momentum of each parameter. It is zero before a parameter's first step."""
        betas = {p: group["betas"][0] for group in self.param_groups for p in group["params"]}
        states = [self.state.get(p) or {"exp_avg": torch.zeros_like(p)} for p in parameters]
        return [(betas[p], state["exp_avg"]) for p, state in zip(parameters, states, strict=True)]

    def receive_momentum_of(self, parameters: Iterable[Tensor]) -> None:
        """Take .grad of these parameters as their momentum in every step with `exchanges_momentum`."""
        self._receives_momentum = frozenset(parameters)

    def converted(self, state: Any) -> Any:
        """Return a state of torch.optim.AdamW as one of this class, and any other as it is.

        Raises:
            ValueError: It has at least `freeze_step` steps, amsgrad, maximize, or Adam's weight decay.
        """
        if not is_of_adam(state):
            return state
        groups = state["param_groups"]
        kind, freeze_step = type(self).__name__, self.param_groups[0]["freeze_step"]
        coupled = any(g["weight_decay"] and not g.get("decoupled_weight_decay", True) for g in groups)
        if coupled or any(group["amsgrad"] or group.get("maximize") for group in groups):
            raise ValueError(
                f"{kind} goes on from AdamW without amsgrad and maximize, or from Adam without weight decay"
            )
        steps = max((int(own["step"]) for own in state["state"].values()), default=0)
        if steps >= freeze_step:
            raise ValueError(
                f"the state of AdamW has {steps} steps, which count, and freeze_step is {freeze_step}: the second "
                f"moment is frozen at the end of a dense step, so set freeze_step to {steps + 1} or more"
            )
        moments = {p: {name: own[name] for name in MOMENTS} for p, own in state["state"].items()}
        kept = [
            {**own, **{key: saved[key] for key in saved.keys() & (own.keys() | OF_SCHEDULERS)}, "steps": steps}
            for own, saved in zip(self.param_groups, groups, strict=False)
        ]
        return {"state": moments, "param_groups": kept + list(groups[len(kept) :])}

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_saved_groups(self, state, _check_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, or of torch.optim.AdamW: see `converted`."""
        state = self.converted(state_dict)
        check_optimizer_state(self, state)
        super().load_state_dict(state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        frozen = self.exchanges_momentum
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            for group in self.param_groups:
                group["steps"] += 1
        with without_autocast():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self._update(p, p.grad, group, frozen)
        return loss

    def _update(self, p: Tensor, gradient: Tensor, group: dict[str, Any], frozen: bool) -> None:
        if gradient.is_sparse:
            raise ValueError("OneBitAdam takes dense gradients: set sparse=False in the embedding")
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        m, v = state["exp_avg"], state["exp_avg_sq"]
        if frozen and p in self._receives_momentum:
            m.copy_(gradient)
        else:
            m.lerp_(gradient, 1 - beta1)
        if frozen:
            m.masked_fill_(v == 0, 0.0)
        else:
            v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            if group["steps"] == group["freeze_step"]:
                v.clamp_(min=group["floor"] * v.sum(dtype=torch.float64).div(max(1, v.numel())).to(v.dtype))
        c1, c2 = self._corrections(group)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(m, v.sqrt().div_(c2**0.5).add_(group["eps"]), value=-group["lr"] / c1)

    def _corrections(self, group: dict[str, Any]) -> tuple[float, float]:
        """Return c1 and c2 of this step."""
        if not group["bias_correction"]:
            return 1.0, 1.0
        (beta1, beta2), steps = group["betas"], group["steps"]
        return 1 - beta1**steps, 1 - beta2 ** min(steps, group["freeze_step"])


def _check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError if a setting of a group is out of range."""
    check_adam(group["betas"], group["floor"], **{key: group[key] for key in ("lr", "eps", "weight_decay")})
    require("a whole number of at least 1", WHOLE, least=1, freeze_step=group["freeze_step"])
    require("a whole number of at least 0", WHOLE, least=0, steps=group.get("steps", 0))
    require("True or False", FLAG, bias_correction=group["bias_correction"])
