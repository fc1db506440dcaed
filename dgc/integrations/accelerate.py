"""Compression for Hugging Face's Accelerate.

Accelerate's own `register_for_checkpointing` saves an object on the main process only. The hooks of `save_state`
and `load_state` run on every rank, with the folder.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from dgc.core.protocol import Compressor
from dgc.core.route import Route
from dgc.ddp import DDPExchange
from dgc.integrations import rank_files

if TYPE_CHECKING:
    from dgc.fsdp import FSDPQuantizer

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise rank_files.missing("accelerate") from error


@dataclass(frozen=True, eq=False)
class Kept:
    """A compressed model whose exchange an Accelerator saves and loads.

    model: A weak reference. files: Of all ranks. hooks: Handles of the Accelerator.
    """

    model: weakref.ref[Any]
    files: set[str]
    hooks: tuple[Any, Any]


_kept: WeakKeyDictionary[Accelerator, list[Kept]] = WeakKeyDictionary()


def check_files(accelerator: Accelerator, files: set[str]) -> list[Kept]:
    """Return the compressed models of an Accelerator that are in use. The hooks of others are removed.

    Raises:
        ValueError: One of them has one of these files.
    """
    kept = [other for other in _kept.get(accelerator, []) if other.model() is not None]
    if taken := sorted(file for other in kept for file in other.files & files):
        raise ValueError(
            f"another compressed model of this Accelerator is saved in {taken[0]}, which this one would replace: "
            "give each its own name, as in compress(..., name='critic')"
        )
    for other in _kept.get(accelerator, []):
        if other not in kept:
            for hook in other.hooks:
                hook.remove()
    return kept


def compress(
    accelerator: Accelerator,
    model: Any,
    compression: Compressor | Route,
    optimizer: Optimizer | AcceleratedOptimizer | None = None,
    *,
    bucket_mb: float | None = None,
    nonfinite: str = "skip",
    steps_per_epoch: int | None = None,
    hierarchical: str | bool = "off",
    name: str = "exchange",
) -> DDPExchange:
    """Exchange the gradients of a model that `accelerator.prepare` returned with compression.

    From then on `accelerator.save_state` saves one file for each rank beside the rest, `exchange0.pt` and so on,
    with what the rank has not sent, and `accelerator.load_state` loads it. If no rank finds a file, the checkpoint
    was saved without compression: it begins then, with a warning. If only some ranks find one, or one cannot
    read its own, all ranks raise ValueError.

    Args:
        accelerator: The exchange uses its grad scaler, if any.
        model: What `prepare` returned, in DistributedDataParallel: there must be several processes.
        compression: A compressor of `dgc.compression`, or a Route.
        optimizer: What `prepare` returned for the optimizer. Needed where `dgc.ddp.compress` needs it.
        bucket_mb, nonfinite, steps_per_epoch, hierarchical: As for `dgc.ddp.compress`.
        name: Beginning of the names of the files. Each compressed model of an Accelerator needs its own.

    Raises:
        ValueError: Another model has this name, the model is not in DistributedDataParallel, and as
            `dgc.ddp.compress`.

    Example:
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> exchange = compress(accelerator, model, TwoPhaseCompressor(bits=8))
    """
    files = {rank_files.file_name(name, rank) for rank in range(accelerator.num_processes)}
    others = check_files(accelerator, files)
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
        rank_files.save(exchange, lambda rank: Path(folder, rank_files.file_name(name, rank)))

    def load(models: Any, folder: str) -> None:
        rank_files.load(exchange, lambda rank: Path(folder, rank_files.file_name(name, rank)))

    keep(accelerator, others, model, files, save, load)
    return exchange


def keep(
    accelerator: Accelerator,
    others: list[Kept],
    model: Any,
    files: set[str],
    save: Callable[[Any, Any, str], None],
    load: Callable[[Any, str], None],
) -> None:
    """Call `save` and `load` when the Accelerator saves and loads. others: What `check_files` returned."""
    hooks = accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)
    _kept[accelerator] = [*others, Kept(weakref.ref(model), files, hooks)]


def quantize(
    accelerator: Accelerator,
    model: Any,
    gradients: int | None = 8,
    weights: int | None = None,
    *,
    name: str = "quantizer",
    **settings: Any,
) -> "FSDPQuantizer":
    """Quantize the collectives of a model that `accelerator.prepare` has sharded with FSDP2 over all ranks.

    From then on `accelerator.save_state` saves a folder `quantizer` beside the rest, with what each rank has not
    sent, and `accelerator.load_state` loads it: bit for bit on the same number of ranks, or as the mean.

    Args:
        accelerator: Its plugin must have `fsdp_version=2`. The quantizer uses its grad scaler, if any.
        model: What `prepare` returned.
        gradients, weights, settings: As for `dgc.fsdp.quantize`.
        name: The name of the folder. Each quantized model of an Accelerator needs its own.

    Raises:
        ValueError: Another model has this name, and as `dgc.fsdp.quantize`.

    Example:
        >>> plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        >>> accelerator = Accelerator(fsdp_plugin=plugin)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> quantizer = quantize(accelerator, model, gradients=8, weights=8)
    """
    # not above: it refuses versions of torch in which DDP's exchange works
    from dgc.fsdp import FSDPQuantizer, load_state, save_state

    others = check_files(accelerator, {name})
    sharded = getattr(model, "_orig_mod", model)  # of what torch.compile returns
    quantizer = FSDPQuantizer(sharded, gradients, weights, grad_scaler=accelerator.scaler, **settings)

    def save(models: Any, weights: Any, folder: str) -> None:
        save_state(quantizer, Path(folder, name))

    def load(models: Any, folder: str) -> None:
        load_state(quantizer, Path(folder, name))

    keep(accelerator, others, model, {name}, save, load)
    return quantizer
