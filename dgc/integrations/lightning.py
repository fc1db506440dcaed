"""Compression for Lightning, as a callback.

Lightning wraps the model in DistributedDataParallel and loads a checkpoint before it calls `on_train_start`. A
callback does not get the name of a checkpoint that is saved. Its strategy does, on every rank, also of one that is
deleted: the callback adds the exchange's files to these two methods.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from dgc.core.protocol import Compressor
from dgc.core.route import Route
from dgc.ddp import DDPExchange, compress
from dgc.integrations import rank_files
from dgc.warn import warn

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities import rank_zero_info
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    raise rank_files.missing("lightning") from error


def file_of(checkpoint: Any, rank: int) -> Path:
    """The file of a rank beside a checkpoint."""
    return Path(f"{os.path.realpath(checkpoint)}.exchange{rank}.pt")  # save_last="link" makes a link


class CompressionCallback(Callback):
    """Exchanges the gradients of a Lightning Trainer with compression. The strategy must be "ddp" or one like it.

    Each checkpoint gets one file for each rank beside it, `last.ckpt.exchange0.pt` and so on, with what the rank
    has not sent. A run that resumes loads it, and goes on bit for bit. If no rank finds a file, the checkpoint was
    saved without compression: it begins then, with a warning. If only some ranks find one, or one cannot read its
    own, all ranks raise ValueError.

    Without DistributedDataParallel, in a single process, nothing is compressed, with a warning.

    Args:
        compression: A compressor of `dgc.compression`, or a Route.
        bucket_mb, nonfinite, hierarchical: As for `dgc.ddp.compress`. The module's optimizer, of which there must
            be one, and the grad scaler of precision "16-mixed" are passed to it.

    Attributes:
        exchange: The exchange, from the beginning of training on. None before, and in a single process.

    Example:
        >>> compression = CompressionCallback(TwoPhaseCompressor(bits=8))
        >>> trainer = Trainer(strategy="ddp", devices=2, callbacks=[compression])
    """

    def __init__(
        self,
        compression: Compressor | Route,
        *,
        bucket_mb: float | None = None,
        nonfinite: str = "skip",
        hierarchical: str | bool = "off",
    ):
        self.exchange: DDPExchange | None = None
        self._compression = compression
        self._strategy: Any = None
        self._settings: dict[str, Any] = dict(bucket_mb=bucket_mb, nonfinite=nonfinite, hierarchical=hierarchical)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        wrapped = trainer.strategy.model
        model = getattr(wrapped, "_orig_mod", wrapped)  # of what torch.compile returns
        if trainer.world_size == 1 and not isinstance(model, DistributedDataParallel):
            warn("there is one process: nothing is exchanged, so that nothing is compressed")
            return
        if len(trainer.optimizers) != 1:
            raise ValueError(f"compression needs one optimizer, and the module has {len(trainer.optimizers)}")
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.exchange = compress(
            model, self._compression, trainer.optimizers[0], grad_scaler=scaler, **self._settings
        )
        if trainer.ckpt_path:
            resumed_from = trainer.ckpt_path
            rank_files.load(self.exchange, lambda rank: file_of(resumed_from, rank))
        if trainer.strategy is not self._strategy:  # fit() may be called again
            self._strategy = trainer.strategy
            self._follow(trainer.strategy, trainer.global_rank)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.exchange is not None:
            self.exchange.begin_epoch(trainer.current_epoch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.exchange is not None:
            rank_zero_info(f"compression: {self.exchange.meter.summary()}")

    def _follow(self, strategy: Any, rank: int) -> None:
        """Save and delete the file of this rank with each checkpoint."""
        save: Callable[..., None] = strategy.save_checkpoint
        remove: Callable[..., None] = strategy.remove_checkpoint

        def save_both(checkpoint: Any, filepath: Any, *args: Any, **others: Any) -> None:
            if self.exchange is not None:
                # returns when the files of all ranks are complete
                rank_files.save(self.exchange, lambda rank: file_of(filepath, rank))
            save(checkpoint, filepath, *args, **others)

        def remove_both(filepath: Any) -> None:
            remove(filepath)
            if not os.path.islink(filepath):  # the checkpoint that a link leads to stays
                file_of(filepath, rank).unlink(missing_ok=True)

        strategy.save_checkpoint, strategy.remove_checkpoint = save_both, remove_both
