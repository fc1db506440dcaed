"""Broadcast of parameters and optimizer state, so that all ranks start from the same values."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.collectives import broadcast_object
from dgc.comm.connect import default_transport
from dgc.comm.requests import Broadcast
from dgc.comm.transport import Transport


@torch.no_grad()
def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    root: int = 0,
    transport: Transport | None = None,
) -> None:
    """Overwrite tensors in place with the tensors of rank `root`. Collective.

    Args:
        params: `model.state_dict()` or `model.named_parameters()`.
        root: Rank that sends its tensors.
        transport: Connects the ranks. None: see `dgc.init`.
    """
    transport = transport or default_transport()
    named = params.items() if isinstance(params, Mapping) else params
    works = []
    for name, tensor in named:
        # as bytes: Horovod supports neither bool nor bf16
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).clone()
        works.append((tensor, transport.launch(f"dgc.broadcast.{name}", (Broadcast(data, root),))))
    for tensor, work in works:
        (data,) = transport.wait(work)
        tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def broadcast_optimizer_state(optimizer: Optimizer, root: int = 0, transport: Transport | None = None) -> None:
    """Load the state of rank `root`'s optimizer on every rank. Collective. Groups must be the same on every rank.

    No optimizer step is taken to create missing state. root, transport: as for `broadcast_parameters`.
    """
    transport = transport or default_transport()
    state = optimizer.state_dict() if transport.rank == root else None
    state = broadcast_object(transport, state, root, "optimizer_state")
    if transport.rank != root:
        optimizer.load_state_dict(state)


@torch.no_grad()
def create_state(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Create the state of an optimizer by a step on gradients of zero. Parameters and settings stay."""
    before = [(p, p.clone()) for p in parameters]
    settings = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # so that no optimizer waits for ranks that have a state
    optimizer.step()
    for p, value in before:  # weight decay has changed it
        p.copy_(value)
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)  # some optimizers count their steps there
