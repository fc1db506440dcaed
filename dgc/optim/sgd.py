"""SGD for gradients with momentum applied before compression (Lin et al. 2018, section 3.1).

Parameters with corrected gradients follow p = p - lr (c + w). Here c is the exchanged gradient, momentum included,
and w is weight decay with its own momentum buffer, which is local and dense:

    b = m b + (1 - dampening) wd p;   w = wd p + m b (Nesterov) or b

By linearity this equals the treatment of weight decay in momentum SGD. Other parameters follow torch.optim.SGD.
A corrected gradient may be sparse, and then changes only the elements in its indices. With decoupled_weight_decay,
p = p - lr wd p for all parameters, without momentum (SGDW, Loshchilov and Hutter 2019, arXiv 1711.05101).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import dgc.kernels as kernels
from dgc.comm.conversation import without_autocast
from dgc.core.arguments import FLAG, require
from dgc.core.bucket import fills_a_block
from dgc.engine.buckets import SparseUpdate
from dgc.engine.options import as_number, check_rates, check_saved_groups, loss_of


class DGCSGD(Optimizer):
    """SGD that does not apply momentum again to gradients that already contain it (Lin et al. 2018, section 3.1).

    It follows torch.optim.SGD until a DistributedOptimizer calls `skip_momentum_of`.

    Args:
        params, lr, weight_decay: As torch.optim.SGD.
        momentum, nesterov: As torch.optim.SGD. They must equal the memory's for compressed parameters.
        dampening: As torch.optim.SGD. It must be 0 for compressed parameters.
        decoupled_weight_decay: Apply weight decay without momentum (SGDW).

    Raises:
        ValueError: A number is negative, or `nesterov` is set without momentum or with dampening.

    Example:
        optimizer = DGCSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        compression = DGCCompressor(0.001, memory=DGCSGDMemory(momentum=0.9))
        optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression)
    """

    _corrected: frozenset[Tensor] = frozenset()  # of a copy too: nothing exchanges its gradients

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
        defaults = dict(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_saved_groups(self, state, _check_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.check_state(state_dict)
        super().load_state_dict(state_dict)

    def skip_momentum_of(self, parameters: Iterable[Tensor]) -> None:
        """Treat the gradients of these parameters as containing momentum already."""
        self._corrected = frozenset(parameters)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, sparse: Sequence[SparseUpdate] = ()) -> Any:
        """Update the parameters. `sparse` replaces the .grad of its parameters; frozen ones stay unchanged."""
        loss = None if closure is None else loss_of(closure)
        updated: set[Tensor] = set()
        for update in sparse:
            updated.update(update.parameters)
        lrs: dict[Tensor, float] = {}
        with without_autocast():
            for group in self.param_groups:
                for p in group["params"]:
                    lrs[p] = group["lr"]
                    if p in updated and p.requires_grad:
                        self._apply_dense(p, None, group)
                    elif p.grad is not None:
                        self._apply_dense(p, p.grad, group)
            for update in sparse:
                _subtract(update, lrs)
        return loss

    def _apply_dense(self, p: Tensor, gradient: Tensor | None, group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        if decay and group["decoupled_weight_decay"]:
            p.mul_(1 - group["lr"] * decay)
            decay = 0.0
        if p in self._corrected:
            if decay:
                self._decay(p, group)
            if gradient is not None:
                p.sub_(gradient, alpha=group["lr"])
        elif gradient is not None:
            direction = gradient.add(p, alpha=decay) if decay else gradient
            p.sub_(self._with_momentum(p, direction, group), alpha=group["lr"])

    def _decay(self, p: Tensor, group: dict[str, Any]) -> None:
        """Apply weight decay with its own momentum buffer, in one pass over p."""
        # a DTensor has no memory of its own
        is_plain = type(p) in (Tensor, torch.nn.Parameter) and not p.is_complex()
        if not group["momentum"] or not is_plain or not fills_a_block(p):
            p.sub_(self._with_momentum(p, p * group["weight_decay"], group), alpha=group["lr"])
            return
        buffer = self.state[p].get("momentum_buffer")
        if buffer is None:
            buffer = self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        elif buffer.stride() != p.stride():  # loaded from a checkpoint of another memory format
            buffer = self.state[p]["momentum_buffer"] = torch.empty_like(p).copy_(buffer)
        settings = (group["lr"], group["weight_decay"], group["momentum"], group["nesterov"])
        flat, momentum = p.as_strided((p.numel(),), (1,)), buffer.as_strided((p.numel(),), (1,))
        kernels.of(p).selection.decay_(flat, momentum, *settings)

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


def _check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError if a setting of a group is out of range."""
    check_rates(**{key: group[key] for key in ("lr", "momentum", "weight_decay")})
    if not math.isfinite(as_number(group["dampening"])):
        raise ValueError(f"dampening must be a finite number, not {group['dampening']!r}")
    flags = ("nesterov", "decoupled_weight_decay")
    require("True or False", FLAG, **{key: group[key] for key in flags})
    if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError("nesterov=True needs momentum above 0 and dampening=0")


def _subtract(update: SparseUpdate, lrs: Mapping[Tensor, float]) -> None:
    """p = p - lr * gradient, at the elements of the update. lrs: by parameter."""
    targets, aside = [], []  # aside: differences of parameters that do not fill a block
    for p in update.parameters:
        if p.requires_grad and (p.is_contiguous() or fills_a_block(p)):
            targets.append(p.as_strided((p.numel(),), (1,)))
        else:
            targets.append(torch.zeros(p.numel(), dtype=p.dtype, device=p.device))
            aside.append((p, targets[-1]))
    rates = list(map(lrs.__getitem__, update.parameters))
    kernels.of(update.values).selection.subtract_at_(targets, update.bounds, update.indices, update.values, rates)
    for p, difference in aside:
        if p.requires_grad:
            p.add_(difference.view(p.shape))
