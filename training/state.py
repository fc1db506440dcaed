"""What a checkpoint holds: everything that the next step depends on, gathered from and put back into its
parts.

Shared by all ranks: model, optimizer, schedule, progress. Batch norm's running statistics in it are the mean
over the ranks, so that an evaluation of the checkpoint gives the accuracy that was reported, on any number of
ranks. Each rank's own: its error state, its batch norm's running statistics, its random generators.
"""

import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from dgc.comm import Transport
from dgc.optim import DistributedOptimizer
from training.checkpoint import Loaded
from training.evaluation import averaged_batch_norm, batch_norm_buffers
from training.random_state import random_state, restore_random_state
from training.schedule import Schedule


@dataclass
class Progress:
    """Where a run stands: epochs completed, steps done in the next one, and totals since the run's first
    start.

    samples and seconds are the whole run's; bytes are those of one rank.
    """

    epoch: int = 0
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    payload_bytes: int = 0
    wire_bytes: float = 0.0
    dense_bytes: int = 0
    best_epoch: int = 0
    best: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)

    def add_results(self, results: dict[str, float], metric: str | None) -> bool:
        """Notes an evaluation after `epoch` epochs; whether it is the best so far by `metric`."""
        self.latest = dict(results)
        if metric is None or not (not self.best or results[metric] > self.best[metric]):
            return False
        self.best, self.best_epoch = dict(results), self.epoch
        return True


@dataclass
class State:
    """The parts of a run that change as it trains."""

    model: nn.Module
    optimizer: DistributedOptimizer
    schedule: Schedule
    progress: Progress
    transport: Transport
    device: torch.device

    def shared(self, config: str) -> dict[str, Any]:
        """The part common to all ranks; collective. config: the run's config as YAML, for the reader."""
        with averaged_batch_norm(self.model, self.transport):
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
        }

    def load_model(self, loaded: Loaded) -> None:
        """The model alone, with batch norm averaged over the ranks: for evaluation."""
        self.model.load_state_dict(loaded.shared["model"])

    def load(self, loaded: Loaded) -> None:
        """Everything, so that the next step is the one the saved run would have taken."""
        self.load_model(loaded)
        self.optimizer.load_state_dict(loaded.shared["optimizer"])
        self.schedule.load_state_dict(loaded.shared["schedule"])
        for name, value in loaded.shared["progress"].items():
            setattr(self.progress, name, value)
        if loaded.own is None:
            self._load_from_other_size(loaded)
            return
        self.optimizer.load_compression_state_dict(loaded.own["compression"])
        buffers = batch_norm_buffers(self.model)
        for name, value in loaded.own["batch_norm"].items():
            buffers[name].copy_(value)
        restore_random_state(loaded.own["random"], self.device)

    def _load_from_other_size(self, loaded: Loaded) -> None:
        """Each rank's own part does not exist: start without error state, at the same place of the epoch."""
        size = self.transport.size
        self.progress.step = min(self.progress.step * loaded.size // size, self.schedule.steps_per_epoch - 1)
        if self.transport.rank == 0:
            warnings.warn(
                f"checkpoint {loaded.name} was saved by {loaded.size} ranks and is resumed by {size}: "
                "gradients held back (the error state) are dropped, and random generators start anew.",
                stacklevel=2,
            )
