"""Outer steps of a sharded model: the ranks of a machine train one model with FSDP2, and machines exchange.

    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)  # model: sharded with local_mesh(transport)
    optimizer = ShardedLocalOptimizer(adam, model, OuterSteps(30, outer=Nesterov()), transport=transport)

Local rank l of a machine has shard l of each parameter. It exchanges the pseudo-gradient of this shard with local
rank l of the other machines. A machine is thus one worker of the outer steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from dgc.comm.conversation import RunningConversation
from dgc.comm.requests import AllReduce, Conversation
from dgc.comm.transport import CrossMachineTransport, Transport
from dgc.fsdp.shards import check_ended, check_ranks, check_shards, machines, parameter_groups, sharded_like
from dgc.gossip.protocol import Gossip, JoinsGroups, UsesOptimizer
from dgc.optim.local import OF_ANOTHER_RANK, LocalOptimizer, check_method


class ShardedLocalOptimizer(LocalOptimizer):
    """A LocalOptimizer of a model that FSDP2 shards inside each machine. Machines take the place of ranks.

    All machines must begin with the same parameters.

    Args:
        optimizer: The optimizer of the sharded parameters.
        model: The model, on which `fully_shard` was called last, with `local_mesh(transport)`.
        method: `dgc.local.OuterSteps`, or another synchronous algorithm that takes any optimizer. A compressor
            that needs a matrix gets this rank's rows of the parameter.
        transport: Connects all ranks, with groups inside and between machines: `connect(hierarchical=True)`, and
            `point_to_point=True` for algorithms that send to single neighbours.
        nonfinite: As for LocalOptimizer. The ranks of a machine respond together.
        groups: As for LocalOptimizer: all ranks are one group, on one machine.

    Raises:
        ValueError: An argument is invalid, settings or models differ between ranks, machines have different
            numbers of ranks, or the model is sharded in another way.
    """

    _worker = "machine"
    _is_sharded = True

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        method: Gossip,
        *,
        transport: Transport,
        nonfinite: str = "skip",
        groups: JoinsGroups | None = None,
    ):
        check_method(method)
        check_ranks(transport)
        if not method.is_synchronous or method.needs_groups or isinstance(method, UsesOptimizer):
            raise ValueError(
                f"{type(method).__name__} cannot exchange shards: use dgc.local.OuterSteps or another synchronous "
                "algorithm, without HierarchicalGossip"
            )
        self._groups = parameter_groups(model)
        check_shards(self._groups, machines(transport)[transport.group_rank("cross")])
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r}")
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if others := len(set(stepped) - {p for _, p in named}):
            raise ValueError(
                f"{others} of the optimizer's {len(stepped)} parameters do not belong to the sharded model: "
                "create the optimizer after fully_shard and before a forward pass, from model.parameters()"
            )
        cross = CrossMachineTransport(transport)
        super().__init__(optimizer, named, method, transport=cross, nonfinite=nonfinite, groups=groups)
        for group in self._groups:
            group.claim(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._forget_unsharded()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        self._forget_unsharded()
        try:
            with super().consensus():
                yield
        finally:
            self._forget_unsharded()

    def _forget_unsharded(self) -> None:
        """Let the next forward pass gather parameters again, after a change of the shards.

        FSDP2 keeps the gathered parameters of the outermost module after a forward pass.
        """
        for module in self._modules:
            module.reshard()

    def _nonfinite(self) -> str | None:
        if getattr(self, "grad_scale", None) is not None:
            raise ValueError(
                "a GradScaler has a loss scale for each rank, and the ranks of a machine need one together: train "
                "in bf16, without a GradScaler"
            )
        check_ended(self._modules)
        for group in self._groups:
            group.check_not_replaced("ShardedLocalOptimizer")
        reason = super()._nonfinite()
        if RunningConversation("local.finite", _all_are(reason is None), self._ranks, self.meter).finish():
            return None
        return reason or OF_ANOTHER_RANK

    def close(self) -> None:
        super().close()
        for group in self._groups:
            group.release(self)

    def load_compression_state_dict(self, state: dict[str, Any], *, allow_other_rank: bool = False) -> None:
        super().load_compression_state_dict(state, allow_other_rank=allow_other_rank)
        self._forget_unsharded()

    def _load_optimizer(self, state: Any) -> None:
        super()._load_optimizer(state)
        for p, own in self.inner.state.items():
            for key, value in own.items():
                if isinstance(value, Tensor) and value.dim():
                    if value.shape != p.to_local().shape:
                        raise ValueError(
                            f"{key} of a parameter of shape {tuple(p.shape)} has shape {tuple(value.shape)}, and "
                            f"this rank's rows of it {tuple(p.to_local().shape)}: load what this rank has saved"
                        )
                    own[key] = sharded_like(p, value)


def _all_are(own: bool) -> Conversation[bool]:
    """Whether it holds on all ranks of the machine."""
    (least,) = yield (AllReduce(torch.tensor([float(own)], dtype=torch.float32), "min", group="local"),)
    return bool(least.item())
