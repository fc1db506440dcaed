"""What a checkpoint holds: everything that the next step depends on, gathered from and put back into its
parts.

Shared by all ranks: model, optimizer, schedule, progress. Batch norm's running statistics in it, and the weights
where ranks gossip, are the mean over the ranks, so that an evaluation of the checkpoint gives the accuracy that
was reported, on any number of ranks. Each rank's own: its error state (in gossip its model and its optimizer's
state), its batch norm's running statistics, its random generators.
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
from dgc_training.checkpoint import Loaded
from dgc_training.evaluation import averaged_batch_norm, batch_norm_buffers
from dgc_training.failure import Refused
from dgc_training.fits import check_form, check_hyperparameters, check_optimizer_state, check_tensors
from dgc_training.random_state import random_state, restore_random_state
from dgc_training.rows import Rows
from dgc_training.schedule import Schedule

MOST = 2**62  # of any count
OLDER = (
    "To go on from an older checkpoint, put its name into checkpoints/latest.json; --no-resume starts anew and "
    "keeps this run aside."
)


@dataclass
class Progress:
    """Where a run stands: epochs completed, steps done in the next one, and totals since the run's first
    start.

    samples and seconds are the whole run's, training_seconds without evaluation and checkpoints; bytes are those
    of one rank.
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
        """Notes an evaluation after `epoch` epochs; whether it is the best so far by `metric`."""
        self.latest = dict(results)
        # no number is better than NaN, which is what a meter gives that has counted nothing
        best = self.best.get(metric, nan) if metric is not None else nan
        if metric is None or (self.best and not isnan(best) and not results[metric] > best):
            return False
        self.best, self.best_epoch = dict(results), self.epoch
        return True


def check_progress(saved: Any) -> None:
    """ValueError unless `saved` is `asdict` of a Progress."""
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
    """Inside, an error is DoesNotFit and names this file of the checkpoint."""
    try:
        yield
    # whatever a foreign file can make torch raise; the cause is in its message
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
        """The part common to all ranks; collective. config: the run's config as YAML, for the reader."""
        with averaged_batch_norm(self.model, self.transport), self.optimizer.consensus():
            # Copies: the average is gone when this returns.
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
        """The model alone, with batch norm averaged over the ranks: for evaluation."""
        cure = "Evaluate it with the version of the code that it was trained with."
        self._agree(loaded, lambda: self._load_model(loaded.shared), cure)

    def load(self, loaded: Loaded) -> None:
        """Everything, so that the next step is the one the saved run would have taken. Collective; if any rank
        cannot take its part, every rank raises `Refused`.
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
            if "optimizer" in own["compression"]:  # where ranks gossip each has its own
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
        """At the same place of the epoch; batch norm begins from the mean over the old ranks."""
        size = self.transport.size
        self.progress.step = min(self.progress.step * loaded.size // size, self.schedule.steps_per_epoch - 1)
        if self.transport.rank == 0:
            warnings.warn(
                f"checkpoint {loaded.name} was saved by {loaded.size} ranks and is resumed by {size}: "
                "the gradients held back (the error state) are dealt out anew with their mean over the ranks "
                "preserved; random generators start anew.",
                stacklevel=2,
            )
