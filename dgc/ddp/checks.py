"""Checks of a DDP model and its optimizer."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dgc.comm.transport import Transport
from dgc.optim.exchange.planning import PlannedBucket
from dgc.optim.momentum import MomentumCheck

Named = list[tuple[str, Tensor]]


def check_model(model: Any) -> DistributedDataParallel:
    """Check that a communication hook can exchange the gradients of a model. Return it, without torch.compile.

    Raises:
        ValueError: It cannot. The message names the setting and its cure.
    """
    model = getattr(model, "_orig_mod", model)  # of what torch.compile returns
    if not isinstance(model, DistributedDataParallel):
        kind = type(model).__name__
        raise ValueError(f"compress needs a model in DistributedDataParallel, not {kind}: wrap it first")
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    sparse = [name for name, m in model.module.named_modules() if isinstance(m, embeddings) and m.sparse]
    stepped = [n for n, p in model.module.named_parameters() if hasattr(p, "_in_backward_optimizers")]

    def has(attribute: str) -> bool:  # some versions of torch lack some of them
        return bool(getattr(model, attribute, None))

    refused = {
        "mixed_precision= changes the type of the buckets: use torch.autocast": has("mixed_precision"),
        "it has a communication hook already: register only this one": has("_comm_hooks"),
        "torch.compile's python_reducer calls no hooks: set torch._dynamo.config.optimize_ddp = 'ddp_optimizer'": (
            has("_use_python_reducer")
        ),
        "delay_all_reduce_named_params bypasses the hook: leave it out": has("_delay_all_reduce_params"),
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
    return model


def trained_and_frozen(model: DistributedDataParallel) -> tuple[Named, Named]:
    """Return the parameters that DDP averages, and those that it leaves out because they need no gradient."""
    # not by parameters_to_ignore, whose names differ from those of named_parameters()
    reduced = set(model._build_params_for_reducer()[0])
    ignored = {name.removeprefix(".") for name in model.parameters_to_ignore}
    named = list(model.module.named_parameters())
    frozen = [(name, p) for name, p in named if not p.requires_grad and name not in ignored]
    return [(name, p) for name, p in named if p in reduced], frozen


def check_pass(model: DistributedDataParallel | None, frozen: Named) -> None:
    """Check what may change after construction, at the beginning of a backward pass.

    Args:
        model: The DDP model.
        frozen: The parameters that it does not average.

    Raises:
        RuntimeError: Such a parameter needs a gradient: each rank would train it alone. Or join() asks for a mean
            over the ranks that still have data.
    """
    if not getattr(model, "_divide_by_initial_world_size", True):
        raise RuntimeError(
            "join(divide_by_initial_world_size=False) cannot be served: ranks without further data send their "
            "error state, so that the mean is over all ranks. Leave the argument out"
        )
    if unfrozen := [name for name, p in frozen if p.requires_grad]:
        raise RuntimeError(
            f"{', '.join(unfrozen[:3])} required no gradient when DistributedDataParallel was built, which "
            "therefore does not average it: build DistributedDataParallel and compress after you unfreeze it"
        )


class NoCopies(list[Any]):
    """The list of hooks of a DDP model. That of a copy or of a saved model is empty: its reducer has no hook."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ()


def momentum_check(
    optimizer: Optimizer | None, planned: list[PlannedBucket], transport: Transport
) -> Callable[[], None]:
    """Check that momentum is applied once. Return a check of the same for every step.

    Raises:
        ValueError: The memory applies momentum, and the optimizer is missing, lacks parameters or applies it too.
    """
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer or None, not {optimizer!r}")
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
