"""Compression for the Trainer of Hugging Face's transformers, as a callback.

The Trainer wraps the model in DistributedDataParallel when training begins, and loads a checkpoint before it calls
`on_train_begin`: there `compress` finds the wrapped model and the optimizer with their state. A callback gets
neither the wrapped model nor the folder that training resumes from. `attach` therefore hands it the Trainer, and
records the argument of `train`.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

from dgc.comm.meter import TrafficMeter
from dgc.core.protocol import Compressor
from dgc.core.route import Route
from dgc.ddp import DDPExchange, compress
from dgc.integrations import rank_files
from dgc.warn import warn

if TYPE_CHECKING:
    from dgc.fsdp import FSDPQuantizer

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise rank_files.missing("transformers") from error


SHARDED: Any = getattr(fsdp, "FSDPModule", ())  # older versions of torch have no FSDP2


class AttachedCallback(TrainerCallback):
    """Base class of callbacks that exchange the gradients of a Trainer. Call `attach` before `trainer.train()`."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._model: Any = None  # the wrapped model
        self._resumed_from: str | bool | None = None

    @abstractmethod
    def start(self, model: Any) -> None:
        """Exchange the gradients of a model that the Trainer has wrapped. Raise ValueError if that cannot be."""

    @property
    @abstractmethod
    def meter(self) -> TrafficMeter | None:
        """The bytes that this rank sent. None: nothing is exchanged."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Save in the folder of a checkpoint what the ranks have not sent."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Load what `save` has saved."""

    def attach(self, trainer: Trainer) -> None:
        """Compress what this Trainer trains. Adds the callback to it, unless it is one of `callbacks=`."""
        if self._trainer is not None:
            raise ValueError(f"this {type(self).__name__} has a Trainer already: make one for each Trainer")
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
                f"the {type(self).__name__} does not know its Trainer: call attach(trainer) before trainer.train()"
            )
        wrapped = self._trainer.model_wrapped
        model = getattr(wrapped, "_orig_mod", wrapped)  # of what torch.compile returns
        if args.world_size == 1 and args.n_gpu <= 1 and not isinstance(model, (DistributedDataParallel, SHARDED)):
            warn("there is one process: nothing is exchanged, so that nothing is compressed")
            return
        if model is not self._model:  # a second train() keeps the wrapped model, and its exchange
            self.start(model)
            self._model = model
        if self._resumed_from:
            folder = get_last_checkpoint(args.output_dir) if self._resumed_from is True else self._resumed_from
            self.load(Path(folder))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        # a search has folders of its own, and resumes nothing; nor does a checkpoint without its optimizer
        if self.meter is not None and not args.save_only_model and not state.is_hyper_param_search:
            self.save(Path(args.output_dir, f"checkpoint-{state.global_step}"))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        if self.meter is not None and state.is_world_process_zero:
            print(f"compression: {self.meter.summary()}")  # as the Trainer prints its results


class CompressionCallback(AttachedCallback):
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
        super().__init__()
        self.exchange: DDPExchange | None = None
        self._compression = compression
        self._settings: dict[str, Any] = dict(bucket_mb=bucket_mb, nonfinite=nonfinite, hierarchical=hierarchical)
        self._clipping: float | None = None

    @property
    def meter(self) -> TrafficMeter | None:
        return None if self.exchange is None else self.exchange.meter

    def start(self, model: Any) -> None:
        if isinstance(model, SHARDED):
            raise ValueError("the Trainer has sharded the model with FSDP2: use a QuantizationCallback")
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"the Trainer has put the model into {type(model).__name__}, and compression needs "
                "DistributedDataParallel: start one process for each GPU, with torchrun or accelerate launch, and "
                "leave out fsdp and deepspeed"
            )
        optimizer = self._trainer.optimizer
        self.exchange = compress(
            model,
            self._compression,
            getattr(optimizer, "optimizer", optimizer),  # of Accelerate's wrapper
            grad_scaler=self._trainer.accelerator.scaler,
            **self._settings,
        )

    def save(self, folder: Path) -> None:
        assert self.exchange is not None
        rank_files.save(self.exchange, lambda rank: folder / rank_files.file_name("exchange", rank))

    def load(self, folder: Path) -> None:
        assert self.exchange is not None
        rank_files.load(self.exchange, lambda rank: folder / rank_files.file_name("exchange", rank))

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


class QuantizationCallback(AttachedCallback):
    """Quantizes the collectives of a model that the Trainer shards with FSDP2. Call `attach` before training.

    Each checkpoint gets a folder `quantizer`, with what the ranks have not sent. A run that resumes loads it, and
    goes on bit for bit on the same number of ranks. On another number, every rank gets the mean.

    Args:
        gradients, weights, settings: As for `dgc.fsdp.quantize`. The Trainer's grad scaler is passed to it.

    Attributes:
        quantizer: From the beginning of training on. None before, and in a single process.

    Example:
        >>> args = TrainingArguments(folder, fsdp="full_shard", fsdp_config={"fsdp_version": 2})
        >>> trainer = Trainer(model, args, train_dataset=data)
        >>> quantization = QuantizationCallback(gradients=8, weights=8)
        >>> quantization.attach(trainer)
        >>> trainer.train()
    """

    def __init__(self, gradients: int | None = 8, weights: int | None = None, **settings: Any):
        super().__init__()
        self.quantizer: "FSDPQuantizer | None" = None
        self._settings: dict[str, Any] = dict(gradients=gradients, weights=weights, **settings)

    @property
    def meter(self) -> TrafficMeter | None:
        return None if self.quantizer is None else self.quantizer.meter

    def start(self, model: Any) -> None:
        if not isinstance(model, SHARDED):
            raise ValueError(
                f"the Trainer has put the model into {type(model).__name__}, and quantization needs FSDP2: give "
                'TrainingArguments fsdp="full_shard" and fsdp_config={"fsdp_version": 2}, or use a '
                "CompressionCallback"
            )
        # not above: it refuses versions of torch in which DDP's exchange works
        from dgc.fsdp import FSDPQuantizer

        self.quantizer = FSDPQuantizer(model, grad_scaler=self._trainer.accelerator.scaler, **self._settings)

    def save(self, folder: Path) -> None:
        from dgc.fsdp import save_state

        assert self.quantizer is not None
        save_state(self.quantizer, folder / "quantizer")

    def load(self, folder: Path) -> None:
        from dgc.fsdp import load_state

        assert self.quantizer is not None
        load_state(self.quantizer, folder / "quantizer")
