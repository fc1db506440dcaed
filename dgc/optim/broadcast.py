"""The same start on every rank."""

from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import Tensor
from torch.optim import Optimizer

from dgc.comm.collectives import broadcast_object
from dgc.comm.requests import Broadcast
from dgc.comm.transport import Transport


@torch.no_grad()
def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    root: int = 0,
    transport: Transport | None = None,
) -> None:
    """Overwrite tensors (`model.state_dict()` or `model.named_parameters()`) in place with `root`'s."""
    transport = transport or default_transport()
    named = params.items() if isinstance(params, Mapping) else params
    flights = []
    for name, tensor in named:
        # Horovod carries neither bool nor bf16; bytes are always carried
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).clone()
        flights.append((tensor, transport.launch(f"dgc.broadcast.{name}", (Broadcast(data, root),))))
    for tensor, flight in flights:
        (data,) = transport.wait(flight)
        tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def broadcast_optimizer_state(optimizer: Optimizer, root: int = 0, transport: Transport | None = None) -> None:
    """Load `root`'s optimizer state on every rank. Takes no optimizer step to make state that is not there yet."""
    transport = transport or default_transport()
    state = optimizer.state_dict() if transport.rank == root else None
    state = broadcast_object(transport, state, root, "optimizer_state")
    if transport.rank != root:
        optimizer.load_state_dict(state)


@cache
def default_transport(point_to_point: bool = False) -> Transport:
    """The process's Horovod transport; with messages between two ranks, if asked, over the MPI that it runs on.

    Imported here, so that the package works where Horovod is not installed.
    """
    try:
        from dgc.comm.horovod import connect
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "horovod":
            raise ModuleNotFoundError(
                "Horovod is not installed: docs/install.md says how to, or pass another carrier of messages as "
                "transport=",
                name=error.name,
            ) from error
        raise
    return connect(point_to_point=point_to_point)
