"""Compression for Hugging Face's Accelerate.

Accelerate's own `register_for_checkpointing` saves an object on the main process only. The hooks of `save_state`
and `load_state` run on every rank, with the folder.
"""

from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from dgc.compression.protocol import Compressor
from dgc.compression.route import Route
from dgc.ddp import DDPExchange
from dgc.integrations import rank_files

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise rank_files.missing("accelerate") from error


def compress(
    accelerator: Accelerator,
    model: Any,
    compression: Compressor | Route,
    optimizer: Optimizer | AcceleratedOptimizer | None = None,
    *,
    bucket_mb: float = 25.0,
    nonfinite: str = "skip",
    steps_per_epoch: int | None = None,
    hierarchical: str | bool = "off",
    name: str = "exchange",
) -> DDPExchange:
    """Exchange the gradients of a model that `accelerator.prepare` returned with compression.

    From then on `accelerator.save_state` saves one file for each rank beside the rest, `exchange0.pt` and so on,
    with what the rank has not sent, and `accelerator.load_state` loads it. If no rank finds a file, the checkpoint
    was saved without compression: it begins then, with a warning. If only some ranks find one, ValueError is
    raised.

    Args:
        accelerator: Its grad scaler, if any, is that of the exchange.
        model: What `prepare` returned, in DistributedDataParallel: there must be several processes.
        compression: A compressor of `dgc.compression`, or a Route.
        optimizer: What `prepare` returned for the optimizer. Needed where `dgc.ddp.compress` needs it.
        bucket_mb, nonfinite, steps_per_epoch, hierarchical: As for `dgc.ddp.compress`.
        name: Beginning of the names of the files. Each compressed model of an Accelerator needs its own.

    Raises:
        ValueError: The model is not in DistributedDataParallel, and as `dgc.ddp.compress`.

    Example:
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> exchange = compress(accelerator, model, PowerSGDCompressor(rank=4, num_iters_per_step=2))
    """
    exchange = DDPExchange(
        model,
        compression,
        optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer,
        bucket_mb=bucket_mb,
        nonfinite=nonfinite,
        grad_scaler=accelerator.scaler,
        steps_per_epoch=steps_per_epoch,
        hierarchical=hierarchical,
    )

    def save(models: Any, weights: Any, folder: str) -> None:
        rank_files.save(exchange, Path(folder, f"{name}{exchange.transport.rank}.pt"))

    def load(models: Any, folder: str) -> None:
        rank_files.load(exchange, lambda rank: Path(folder, f"{name}{rank}.pt"))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return exchange
