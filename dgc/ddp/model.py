"""DDP models that a communication hook cannot serve."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel


def check_model(model: Any) -> None:
    """Check that a communication hook can exchange the gradients of a model.

    Raises:
        ValueError: It cannot. The message names the setting and its cure.
    """
    if not isinstance(model, DistributedDataParallel):
        kind = type(model).__name__
        raise ValueError(f"compress needs a model in DistributedDataParallel, not {kind}: wrap it first")
    sparse = [name for name, module in model.module.named_modules() if getattr(module, "sparse", False) is True]
    in_backward = [n for n, p in model.module.named_parameters() if hasattr(p, "_in_backward_optimizers")]
    refused = {
        "it has a communication hook already: register only this one": bool(model._comm_hooks),
        "torch.compile's python_reducer calls no hooks: set torch._dynamo.config.optimize_ddp = 'ddp_optimizer'": (
            getattr(model, "_use_python_reducer", False)
        ),
        "delay_all_reduce_named_params bypasses the hook: leave it out": bool(
            getattr(model, "_delay_all_reduce_params", [])
        ),
        "mixed_precision= changes the type of the buckets: use torch.autocast": (
            getattr(model, "mixed_precision", None) is not None
        ),
        "skip_all_reduce_unused_params leaves out buckets on timing of its own: leave it out": getattr(
            model, "skip_all_reduce_unused_params", False
        ),
        f"{', '.join(sparse[:3])} has sparse gradients, which DDP hands over in another form: set sparse=False": (
            bool(sparse)
        ),
        f"an optimizer steps {', '.join(in_backward[:3])} during backward, before the exchange is complete: step "
        "it after backward": bool(in_backward),
    }
    for reason, is_refused in refused.items():
        if is_refused:
            raise ValueError(f"this DistributedDataParallel cannot be compressed: {reason}")
