"""What follows a backward pass, after DDP has set the gradients."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dgc.optim.exchange.planning import PlannedBucket


def after_ddp(function: Callable[[], None]) -> None:
    """Call a function at the end of this backward pass, after DDP has set the gradients.

    DDP queues its own end when it has called the last hook. A function that is queued at the end of backward runs
    after everything that was queued before.
    """
    if torch._C._current_graph_task_id() == -1:  # a rank without further data, inside DDP's join()
        function()
        return
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(function))


def drop_gradients(parameters: Iterable[Tensor], error: Exception | None = None) -> None:
    """Set every .grad to None, and raise the error, if any."""
    for p in parameters:
        p.grad = None
    if error is not None:
        raise error


def deliver_unused(planned: Iterable[PlannedBucket]) -> None:
    """Set the gradient of parameters that no rank used: DDP does not, but their error state may be sent.

    Parameters that were frozen later remain without a gradient.
    """
    for plan in planned:
        for p, mean in zip(plan.parameters, plan.views, strict=True):
            if p.grad is None and p.requires_grad:
                p.grad = mean.clone()
            elif p.grad is not None and not torch.equal(p.grad, mean):
                p.grad.copy_(mean)
