"""The contents of a checkpoint: everything that the next step depends on.

Shared by all ranks: model, optimizer, schedule, progress. The shared running statistics of batch norm are the mean
over the ranks, and so are the weights if ranks gossip. Evaluating the checkpoint on any number of ranks therefore
gives the reported accuracy. Separate for each rank: its error state (in gossip its model and its optimizer's
state), its batch norm running statistics, and its random generators.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import inf, isnan, nan
from typing import Any

import torch
from torch import nn

from dgc.comm import Transport, all_gather_object
from dgc.optim import Wrapper
from dgc_training.checkpoint.files import Loaded
from dgc_training.checkpoint.random_state import random_state, restore_random_state
from dgc_training.checkpoint.validation import (
    check_form,
    check_hyperparameters,
    check_optimizer_state,
    check_tensors,
)
from dgc_training.evaluation import averaged_batch_norm, batch_norm_buffers
from dgc_training.faults.failure import Refused
from dgc_training.logging.rank_csv.rows import Rows
from dgc_training.schedule import Schedule

MOST = 2**62  # of any count
OLDER = (
    "To go on from an older checkpoint, put its name into checkpoints/latest.json; --no-resume starts anew and "
    "keeps this run aside."
)


@dataclass
class Progress:
    """Epochs completed, steps done in the next epoch, and totals since the run's first start.

    samples and seconds cover the whole run; training_seconds leaves out evaluation and checkpoints. Bytes are
    those of one rank.
    """

    epoch: int = 0
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    payload_bytes: int = 0
    wire_bytes: float = 0.0
    dense_wire_bytes: float = 0.0
    dropped_steps: int = 0
    best_epoch: int = 0
    best: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)

    def add_results(self, results: dict[str, float], metric: str | None) -> bool:
        """Stores the results of an evaluation after `epoch` epochs. Returns whether they are the best so far."""
        self.latest = dict(results)
        # A meter that has counted nothing gives NaN. Any later result counts as better than NaN.
        best = self.best.get(metric, nan) if metric is not None else nan
        if metric is None or (self.best and not isnan(best) and not results[metric] > best):
            return False
        self.best, self.best_epoch = dict(results), self.epoch
        return True


def check_progress(saved: Any) -> None:
    """Raises ValueError unless `saved` is `asdict` of a Progress."""
    fresh = asdict(Progress())
    check_form(saved, {**fresh, **{key: None for key in ("best", "latest")}}, "progress")
    for key, value in saved.items():
        if isinstance(fresh[key], dict):
            if not isinstance(value, dict) or not all(isinstance(v, float) for v in value.values()):
                raise ValueError(f"progress.{key} is no mapping of results")
        elif type(value) is not type(fresh[key]) or not 0 <= value < (MOST if type(value) is int else inf):
            raise ValueError(f"progress.{key} is {value!r}")


class DoesNotFit(ValueError):
    """A file of a checkpoint cannot be loaded."""


@contextmanager
def part(file: str) -> Iterator[None]:
    """Context manager that turns any error into DoesNotFit with the name of this file of the checkpoint."""
    try:
        yield
    # A foreign file can make torch raise any exception. The message contains the cause.
    except Exception as error:
        raise DoesNotFit(f"{file}: {type(error).__name__}: {error}") from error


@dataclass
class State:
    """The parts of a run that change as it trains."""

    model: nn.Module
    optimizer: Wrapper
    schedule: Schedule
    progress: Progress
    transport: Transport
    device: torch.device
    rows: Rows | None = None

    def shared(self, config: str) -> dict[str, Any]:
        """The part common to all ranks. Collective. config: the run's config as YAML, for information only."""
        with averaged_batch_norm(self.model, self.transport), self.optimizer.consensus():
            # Copies, because the averages are undone on exit.
            model = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        return {
            "model": model,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "progress": asdict(self.progress),
            "config": config,
        }

    def own(self) -> dict[str, Any]:
        """This rank's part."""
        return {
            "compression": self.optimizer.compression_state_dict(),
            "batch_norm": batch_norm_buffers(self.model),
            "random": random_state(self.device),
            "csv": None if self.rows is None else self.rows.file.state_dict(),
        }

    def load_model(self, loaded: Loaded) -> None:
        """Loads the model only, with batch norm averaged over the ranks, for evaluation."""
        cure = "Evaluate it with the version of the code that it was trained with."
        self._agree(loaded, lambda: self._load_model(loaded.shared), cure)

    def load(self, loaded: Loaded) -> None:
        """Loads all parts, so that the next step is the one that the saved run would have taken. Collective.

        If any rank cannot load its part, every rank raises `Refused`.
        """
        self._agree(loaded, lambda: self._load(loaded), OLDER)

    def _load_model(self, shared: dict[str, Any]) -> None:
        with part("shared.pt"):
            check_tensors(shared["model"], self.model.state_dict(), "model")
            self.model.load_state_dict(shared["model"])

    def _agree(self, loaded: Loaded, load: Callable[[], object], cure: str) -> None:
        problem = None
        try:
            load()
        except DoesNotFit as error:
            problem = str(error)
        problems = all_gather_object(self.transport, problem, name="state.problem")
        for rank, text in enumerate(problems):
            if text:
                raise Refused(
                    f"checkpoint {loaded.name} does not fit this run (rank {rank}): {text}\n"
                    f"It is damaged, or of another model, config or version. {cure}"
                )

    def _load(self, loaded: Loaded) -> None:
        shared, own, same_size = loaded.shared, loaded.own, loaded.size == self.transport.size
        own_file = f"rank{self.transport.rank}.pt" if same_size else f"the files of {loaded.size} ranks"
        with part("shared.pt"):
            self._check_optimizer(shared["optimizer"])
            check_form(shared["schedule"], self.schedule.state_dict(), "schedule")
            check_progress(shared["progress"])
        with part(own_file):
            if same_size:
                check_form(own["batch_norm"], batch_norm_buffers(self.model), "batch_norm")
                check_form(own["random"], random_state(self.device), "random")
            if "optimizer" in own["compression"]:  # in gossip each rank has its own optimizer state
                self._check_optimizer(own["compression"]["optimizer"])
        self._load_model(shared)
        with part("shared.pt"):
            self.optimizer.load_state_dict(shared["optimizer"])
            self.schedule.load_state_dict(shared["schedule"])
        for name, value in shared["progress"].items():
            setattr(self.progress, name, value)
        with part(own_file):
            self.optimizer.load_compression_state_dict(own["compression"])
        if not same_size:
            self._continue_on_other_size(loaded)
            return
        with part(own_file):
            buffers = batch_norm_buffers(self.model)
            for name, value in own["batch_norm"].items():
                buffers[name].copy_(value)
            restore_random_state(own["random"], self.device)
            if self.rows is not None and own["csv"] is not None:
                self.rows.file.load_state_dict(own["csv"])

    def _check_optimizer(self, saved: Any) -> None:
        check_optimizer_state(saved, self.optimizer)
        check_hyperparameters(saved, self.optimizer, self.schedule)

    def _continue_on_other_size(self, loaded: Loaded) -> None:
        """Continues at the same fraction of the epoch. Batch norm begins from the mean over the old ranks."""
        size = self.transport.size
        self.progress.step = min(self.progress.step * loaded.size // size, self.schedule.steps_per_epoch - 1)
        if self.transport.rank == 0:
            warnings.warn(
                f"checkpoint {loaded.name} was saved by {loaded.size} ranks and is resumed by {size}: "
                "the gradients held back (the error state) are dealt out anew with their mean over the ranks "
                "preserved; random generators start anew.",
                stacklevel=2,
            )
