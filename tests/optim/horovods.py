"""What hvd.broadcast_optimizer_state does, over any transport. DistributedOptimizer knows it by its name."""

from typing import Any

from torch import Tensor

from dgc.comm import broadcast_object
from dgc.optim import broadcast_parameters


def broadcast_optimizer_state(optimizer: Any, transport: Any) -> None:
    """Ranks without state create it by step(), then rank 0's is broadcast."""
    if not optimizer.state_dict()["state"]:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = p.data.new(p.size()).zero_()
        optimizer.step()
    state = optimizer.state_dict()
    values = {f"{i}.{name}": value for i, own in state["state"].items() for name, value in own.items()}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    broadcast_parameters(tensors, transport=transport)
    options = [{key: v for key, v in group.items() if key != "params"} for group in state["param_groups"]]
    for group, values in zip(optimizer.param_groups, broadcast_object(transport, options), strict=True):
        group.update(values)
