"""Checks of a DDP model and its optimizer."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dgc.comm.transport import Transport
from dgc.optim.exchange.planning import PlannedBucket
from dgc.optim.momentum import MomentumCheck


def check_model(model: Any) -> None:
    """Check that a communication hook can exchange the gradients of a model.

    Raises:
        ValueError: It cannot. The message names the setting and its cure.
    """
    if not isinstance(model, DistributedDataParallel):
        kind = type(model).__name__
        raise ValueError(f"compress needs a model in DistributedDataParallel, not {kind}: wrap it first")
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    sparse = [name for name, m in model.module.named_modules() if isinstance(m, embeddings) and m.sparse]
    stepped = [n for n, p in model.module.named_parameters() if hasattr(p, "_in_backward_optimizers")]

    def has(attribute: str) -> bool:  # some versions of torch lack some of them
        return bool(getattr(model, attribute, None))

    refused = {
        "it has a communication hook already: register only this one": has("_comm_hooks"),
        "torch.compile's python_reducer calls no hooks: set torch._dynamo.config.optimize_ddp = 'ddp_optimizer'": (
            has("_use_python_reducer")
        ),
        "delay_all_reduce_named_params bypasses the hook: leave it out": has("_delay_all_reduce_params"),
        "mixed_precision= changes the type of the buckets: use torch.autocast": has("mixed_precision"),
        "skip_all_reduce_unused_params leaves out buckets: set find_unused_parameters alone": (
            has("skip_all_reduce_unused_params")
        ),
        f"{', '.join(sparse[:3])} has sparse gradients, which DDP does not put into buckets: set sparse=False": (
            bool(sparse)
        ),
        f"an optimizer steps {', '.join(stepped[:3])} during backward, before the exchange is complete: step it "
        "after backward": bool(stepped),
    }
    for reason, is_refused in refused.items():
        if is_refused:
            raise ValueError(f"this DistributedDataParallel cannot be compressed: {reason}")


def momentum_check(
    optimizer: Optimizer | None, planned: list[PlannedBucket], transport: Transport
) -> Callable[[], None]:
    """Check that momentum is applied once. Return a check of the same for every step.

    Raises:
        ValueError: The memory applies momentum, and the optimizer is missing, lacks parameters or applies it too.
    """
    corrected = [
        (segment.name, p)
        for plan in planned
        if plan.compressor.correction is not None
        for segment, p in zip(plan.bucket.segments, plan.parameters, strict=True)
    ]
    if optimizer is None:
        if corrected:
            raise ValueError(
                "the compression's memory applies momentum, which the optimizer must not apply again: pass the "
                "optimizer to compress"
            )
        return lambda: None
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    if others := [name for name, p in corrected if p not in owned]:
        raise ValueError(
            f"the memory applies momentum to {len(others)} parameters that the optimizer lacks, such as "
            f"{others[0]}: pass one optimizer with all of them"
        )
    return partial(MomentumCheck(optimizer, planned, transport).check, optimizer)
