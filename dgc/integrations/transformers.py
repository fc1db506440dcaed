"""Compression for the Trainer of Hugging Face's transformers, as a callback.

The Trainer wraps the model in DistributedDataParallel when training begins, and loads a checkpoint before it calls
`on_train_begin`: there `compress` finds the wrapped model and the optimizer with their state. A callback gets
neither the wrapped model nor the folder that training resumes from. `attach` therefore hands it the Trainer, and
records the argument of `train`.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from dgc.core.protocol import Compressor
from dgc.core.route import Route
from dgc.ddp import DDPExchange, compress
from dgc.integrations import rank_files
from dgc.warn import warn

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise rank_files.missing("transformers") from error


class CompressionCallback(TrainerCallback):
    """Exchanges the gradients of a Trainer with compression. Call `attach` before `trainer.train()`.

    Each checkpoint gets one file for each rank, `exchange0.pt` and so on, with what the rank has not sent. A run
    that resumes loads it, and goes on bit for bit. If no rank finds a file, the checkpoint was saved without
    compression: it begins then, with a warning. If only some ranks find one, or one cannot read its own, all ranks
    raise ValueError.

    Gradients are not clipped in steps in which `.grad` is a momentum, as with OneBitAdam and DGCAdam from their
    freeze_step on, whatever max_grad_norm is. In a single process nothing is compressed, with a warning.

    Args:
        compression: A compressor of `dgc.compression`, or a Route.
        bucket_mb, nonfinite, hierarchical: As for `dgc.ddp.compress`. The Trainer's optimizer and grad scaler are
            passed to it.

    Attributes:
        exchange: The exchange, from the beginning of training on. None before, and in a single process.

    Example:
        >>> compression = CompressionCallback(TwoPhaseCompressor(bits=8))
        >>> trainer = Trainer(model, args, train_dataset=data)
        >>> compression.attach(trainer)
        >>> trainer.train()
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
        self._settings: dict[str, Any] = dict(bucket_mb=bucket_mb, nonfinite=nonfinite, hierarchical=hierarchical)
        self._trainer: Any = None
        self._model: DistributedDataParallel | None = None
        self._resumed_from: str | bool | None = None
        self._clipping: float | None = None

    def attach(self, trainer: Trainer) -> None:
        """Compress what this Trainer trains. Adds the callback to it, unless it is one of `callbacks=`."""
        if self._trainer is not None:
            raise ValueError("this CompressionCallback has a Trainer already: make one for each Trainer")
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        train: Callable[..., Any] = trainer.train

        @wraps(train)
        def recorded(resume_from_checkpoint: str | bool | None = None, *args: Any, **others: Any) -> Any:
            self._resumed_from = resume_from_checkpoint
            return train(resume_from_checkpoint, *args, **others)

        trainer.train = recorded

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        if self._trainer is None:
            raise RuntimeError(
                "the CompressionCallback does not know its Trainer: call attach(trainer) before trainer.train()"
            )
        wrapped = self._trainer.model_wrapped
        model = getattr(wrapped, "_orig_mod", wrapped)  # of what torch.compile returns
        if not isinstance(model, DistributedDataParallel):
            self._check_alone(args, model)
            return
        if model is not self._model:  # a second train() keeps the wrapped model, and its exchange
            optimizer = self._trainer.optimizer
            self.exchange = compress(
                model,
                self._compression,
                getattr(optimizer, "optimizer", optimizer),  # of Accelerate's wrapper
                grad_scaler=self._trainer.accelerator.scaler,
                **self._settings,
            )
            self._model = model
        if self._resumed_from:
            assert self.exchange is not None
            folder = get_last_checkpoint(args.output_dir) if self._resumed_from is True else self._resumed_from
            rank_files.load(self.exchange, lambda rank: Path(folder, rank_files.file_name("exchange", rank)))

    @staticmethod
    def _check_alone(args: TrainingArguments, model: Any) -> None:
        if args.world_size > 1 or args.n_gpu > 1:
            raise ValueError(
                f"the Trainer has put the model into {type(model).__name__}, and compression needs "
                "DistributedDataParallel: start one process for each GPU, with torchrun or accelerate launch, and "
                "leave out fsdp and deepspeed"
            )
        warn("there is one process: nothing is exchanged, so that nothing is compressed")

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        if self.exchange is not None:
            self.exchange.begin_epoch(int(state.epoch or 0))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        optimizer = self._trainer.optimizer
        if getattr(getattr(optimizer, "optimizer", optimizer), "receives_momentum", False):
            self._clipping, args.max_grad_norm = args.max_grad_norm, 0.0  # until the optimizer has stepped

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        if self._clipping is not None:
            args.max_grad_norm, self._clipping = self._clipping, None

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        # a search has folders of its own, and resumes nothing; nor does a checkpoint without its optimizer
        if self.exchange is not None and not args.save_only_model and not state.is_hyper_param_search:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            rank_files.save(self.exchange, lambda rank: folder / rank_files.file_name("exchange", rank))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        if self.exchange is not None and state.is_world_process_zero:
            print(f"compression: {self.exchange.meter.summary()}")  # as the Trainer prints its results
