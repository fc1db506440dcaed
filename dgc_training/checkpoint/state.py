"""The contents of a checkpoint: everything that the next step depends on.

Shared by all ranks: model, optimizer, schedule, progress, and in fp16 the loss scale. The shared running
statistics of batch norm are the mean over the ranks, and so are the weights if ranks gossip. Evaluating the
checkpoint on any number of ranks therefore gives the reported accuracy. Separate for each rank: its residual
(in gossip its model and its optimizer's state), its batch norm running statistics, its random generators, and the
task's state, if it has one.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from dgc.comm import Transport, all_gather_object
from dgc.optim import Wrapper
from dgc_training.checkpoint.files import Loaded
from dgc_training.checkpoint.progress import TrainingProgress, check_progress
from dgc_training.checkpoint.validation import (
    check_hyperparameters,
    check_optimizer_state,
    check_structure,
    check_tensors,
)
from dgc_training.evaluation import averaged_batch_norm, batch_norm_buffers
from dgc_training.faults.failure import UsageError
from dgc_training.random_state import random_state, restore_random_state
from dgc_training.schedule import Schedule
from dgc_training.tasks.protocol import Loss

USE_OLDER_CHECKPOINT = (
    "To resume from an older checkpoint, put its name into checkpoints/latest.json. --no-resume moves this "
    "run aside and starts from the beginning."
)


class CheckpointMismatch(ValueError):
    """A file of a checkpoint cannot be loaded."""


@contextmanager
def loading(file: str) -> Iterator[None]:
    """Context manager that turns any error into CheckpointMismatch, with the name of the file."""
    try:
        yield
    # A foreign file can make torch raise any exception. The message contains the cause.
    except Exception as error:
        raise CheckpointMismatch(f"{file}: {type(error).__name__}: {error}") from error


@runtime_checkable
class Recorder(Protocol):
    """Records the steps of this rank. `train.recorder` is called with run directory, config and optimizer.

    `begin` starts the time of a step. It gets the seconds of each phase so far, which grow. `batch` follows each
    forward pass, `step` each step, and `end_epoch` the evaluation of an epoch, before its checkpoint.
    `begin_at` takes the place of `load_state_dict` where a run resumes on another number of ranks.
    """

    def begin(self, seconds: Mapping[str, float]) -> None: ...
    def batch(self, loss: Loss) -> None: ...
    def step(self, epoch: int, itr: int, loss: Tensor) -> None: ...
    def end_epoch(self, epoch: int, results: Mapping[str, float]) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def begin_at(self, epoch: int, step: int, seconds: float) -> None: ...
    def close(self) -> None: ...


class TaskState(Protocol):
    """The state of the task on this rank. An empty one is not saved."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class RunState:
    """The parts of a run that change as it trains."""

    model: nn.Module
    optimizer: Wrapper
    schedule: Schedule
    progress: TrainingProgress
    transport: Transport
    device: torch.device
    task: TaskState
    recorder: Recorder | None = None
    scaler: GradScaler | None = None  # of the loss, in fp16

    def shared_part(self, config: str) -> dict[str, Any]:
        """The part common to all ranks. Collective. config: the run's config as YAML, for information only."""
        with averaged_batch_norm(self.model, self.transport), self.optimizer.consensus():
            # Copies, because the averages are undone on exit.
            model = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        return {
            "model": model,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "progress": asdict(self.progress),
            **({} if self.scaler is None else {"scaler": self.scaler.state_dict()}),
            "config": config,
        }

    def own_part(self) -> dict[str, Any]:
        """This rank's part."""
        task = self.task.state_dict()
        return {
            **({"task": task} if task else {}),
            "compression": self.optimizer.compression_state_dict(),
            "batch_norm": batch_norm_buffers(self.model),
            "random": random_state(self.device),
            "csv": None if self.recorder is None else self.recorder.state_dict(),
        }

    def load_model(self, loaded: Loaded) -> None:
        """Loads the model only, with batch norm averaged over the ranks, for evaluation."""
        cure = "Evaluate it with the version of the code that it was trained with."
        self._agree(loaded, lambda: self._load_model(loaded.shared), cure)

    def load(self, loaded: Loaded) -> None:
        """Loads all parts, so that the next step is the one that the saved run would have taken. Collective.

        If any rank cannot load its part, every rank raises `UsageError`.
        """
        self._agree(loaded, lambda: self._load(loaded), USE_OLDER_CHECKPOINT)

    def _load_model(self, shared: dict[str, Any]) -> None:
        with loading("shared.pt"):
            check_tensors(shared["model"], self.model.state_dict(), "model")
            self.model.load_state_dict(shared["model"])

    def _agree(self, loaded: Loaded, load: Callable[[], object], cure: str) -> None:
        problem = None
        try:
            load()
        except CheckpointMismatch as error:
            problem = str(error)
        problems = all_gather_object(self.transport, problem, name="state.problem")
        for rank, text in enumerate(problems):
            if text:
                raise UsageError(
                    f"checkpoint {loaded.name} does not fit this run (rank {rank}): {text}\n"
                    f"It is damaged, or it was saved by another model, config or version. {cure}"
                )

    def _load(self, loaded: Loaded) -> None:
        shared, own, replica_groups = loaded.shared, loaded.own, loaded.replica_groups
        # this rank continues itself: its file has more than the compression
        is_whole = loaded.size == self.transport.size and (
            replica_groups is None or replica_groups.continues[self.transport.rank] == self.transport.rank
        )
        own_file = f"rank{self.transport.rank}.pt" if is_whole else f"the files of {loaded.size} ranks"
        with loading("shared.pt"):
            self._check_optimizer(shared["optimizer"])
            check_structure(shared["schedule"], self.schedule.state_dict(), "schedule")
            check_progress(shared["progress"])
            check_structure(shared.get("scaler"), self.scaler and self.scaler.state_dict(), "scaler")
        with loading(own_file):
            if is_whole:
                check_structure(own["batch_norm"], batch_norm_buffers(self.model), "batch_norm")
                check_structure(own["random"], random_state(self.device), "random")
            if "optimizer" in own["compression"]:  # in gossip each rank has its own optimizer state
                self._check_optimizer(own["compression"]["optimizer"])
        self._load_model(shared)
        with loading("shared.pt"):
            self.optimizer.load_state_dict(shared["optimizer"])
        with loading(own_file):
            # replica groups take over states of other numbers
            moved = replica_groups is not None
            self.optimizer.load_compression_state_dict(own["compression"], allow_other_rank=moved)
            if replica_groups is not None and self.transport.rank in replica_groups.joined:
                self.optimizer.join()
        with loading("shared.pt"):
            # after a rank's own optimizer state, whose rates are for the old number of ranks as well
            self.schedule.load_state_dict(shared["schedule"])
            if self.scaler is not None:
                self.scaler.load_state_dict(shared["scaler"])
        for name, value in shared["progress"].items():
            setattr(self.progress, name, value)
        if (
            replica_groups is not None
            and (replica_groups.joined or replica_groups.lost)
            and self.transport.rank == 0
        ):
            warnings.warn(f"checkpoint {loaded.name} of {loaded.size} ranks: {replica_groups}.", stacklevel=2)
        if loaded.redistributed and self.transport.rank == 0:
            how = f"by {loaded.size} ranks and is resumed by {self.transport.size}"
            if is_whole:
                how = "with another division of the residual (train.hierarchical, machines, train.bucket_mb)"
            seeds = "" if is_whole else "; random generators are seeded again"
            warnings.warn(
                f"checkpoint {loaded.name} was saved {how}: unsent gradients (the residual) are redistributed "
                f"so that their mean over the ranks is unchanged{seeds}.",
                stacklevel=2,
            )
        if not is_whole:
            self._continue_without_own_file(loaded)
            return
        with loading(own_file):
            buffers = batch_norm_buffers(self.model)
            for name, value in own["batch_norm"].items():
                buffers[name].copy_(value)
            restore_random_state(own["random"], self.device)
            self.task.load_state_dict(own.get("task", {}))
            if self.recorder is not None and own["csv"] is not None:
                self.recorder.load_state_dict(own["csv"])

    def _check_optimizer(self, saved: Any) -> None:
        check_optimizer_state(saved, self.optimizer)
        check_hyperparameters(saved, self.optimizer, self.schedule)

    def _continue_without_own_file(self, loaded: Loaded) -> None:
        """Continues at the same fraction of the epoch. Batch norm begins from the mean over the old ranks."""
        progress, steps = self.progress, self.schedule.steps_per_epoch
        is_other = steps != loaded.shared["schedule"]["steps_per_epoch"]
        if is_other:  # task.steps_per_epoch fixes the number for any number of ranks
            progress.step = min(progress.step * loaded.size // self.transport.size, steps - 1)
        if self.recorder is not None:
            self.recorder.begin_at(progress.epoch, progress.step, progress.training_seconds)
        if self.schedule.counts_steps and is_other and self.transport.rank == 0:
            warnings.warn(
                "train.schedule_lr_per_epoch is False: the scheduler counts steps, and an epoch has another "
                f"number of them now, {steps}. It continues at the same step.",
                stacklevel=2,
            )
