"""SGD for gradients whose momentum was applied before compression (Lin et al. 2018, section 3.1).

Parameters with corrected gradients: p = p - lr (c + w), where c is the exchanged gradient, momentum included,
and w is weight decay with a momentum buffer of its own, local and dense:

    b = m b + (1 - dampening) wd p;   w = wd p + m b (Nesterov) or b

which is what momentum SGD does to its weight decay, by linearity. All other parameters: torch.optim.SGD's rule.
A corrected gradient may come sparse; then only the parameters that it names are touched for it.

decoupled_weight_decay: p = p - lr wd p, without momentum, for all parameters (SGDW, Loshchilov and Hutter 2019).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.bucket import fills_a_block

SparseUpdates = Mapping[Tensor, tuple[Tensor, Tensor]]


@runtime_checkable
class TakesCorrected(Protocol):
    """An optimizer that leaves momentum to the compression's memory and applies sparse updates as they are."""

    def leave_momentum_of(self, parameters: Iterable[Tensor]) -> None: ...

    def step(self, closure: Callable[[], Any] | None = None, sparse: SparseUpdates | None = None) -> Any: ...


class DGCSGD(Optimizer):
    """torch.optim.SGD until a DistributedOptimizer says which parameters come with momentum applied."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        decoupled_weight_decay: bool = False,
    ):
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value < 0:
                raise ValueError(f"{name} must not be negative, not {value}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("nesterov needs a momentum and zero dampening")
        defaults = dict(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        super().__init__(params, defaults)
        self._corrected: frozenset[Tensor] = frozenset()

    def leave_momentum_of(self, parameters: Iterable[Tensor]) -> None:
        """The gradients of these parameters come with momentum already applied."""
        self._corrected = frozenset(parameters)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, sparse: SparseUpdates | None = None) -> Any:
        """`sparse`: by parameter, in place of its .grad, (indices int64 into its segment, values fp32)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sparse = sparse or {}
        for group in self.param_groups:
            for p in group["params"]:
                if p in sparse:
                    self._apply_dense(p, None, group)
                    indices, values = sparse[p]
                    _subtract_at_(p, indices, (group["lr"] * values).to(p.dtype))
                elif p.grad is not None:
                    self._apply_dense(p, p.grad, group)
        return loss

    def _apply_dense(self, p: Tensor, gradient: Tensor | None, group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        if decay and group["decoupled_weight_decay"]:
            p.mul_(1 - group["lr"] * decay)
            decay = 0.0
        if p in self._corrected:
            if decay:
                p.sub_(self._with_momentum(p, p * decay, group), alpha=group["lr"])
            if gradient is not None:
                p.sub_(gradient, alpha=group["lr"])
        elif gradient is not None:
            direction = gradient.add(p, alpha=decay) if decay else gradient
            p.sub_(self._with_momentum(p, direction, group), alpha=group["lr"])

    def _with_momentum(self, p: Tensor, direction: Tensor, group: dict[str, Any]) -> Tensor:
        momentum = group["momentum"]
        if not momentum:
            return direction
        buffer = self.state[p].get("momentum_buffer")
        if buffer is None:
            buffer = self.state[p]["momentum_buffer"] = direction.clone()
        else:
            buffer.mul_(momentum).add_(direction, alpha=1 - group["dampening"])
        return direction.add(buffer, alpha=momentum) if group["nesterov"] else buffer


def _subtract_at_(p: Tensor, indices: Tensor, values: Tensor) -> None:
    """p = p - values at `indices` into the parameter's segment of its bucket (see `dgc.bucket.lay_out`)."""
    if fills_a_block(p):
        p.as_strided((p.numel(),), (1,))[indices] -= values
    else:
        update = torch.zeros(p.numel(), dtype=p.dtype, device=p.device)
        update[indices] = values
        p.sub_(update.view(p.shape))
