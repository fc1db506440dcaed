"""Measures each training step and writes it to the CSV file of a rank."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from dgc_training.logging.phase_timer import PhaseTimer
from dgc_training.logging.rank_csv.log import UNKNOWN, CsvLog, Increments, accuracy
from dgc_training.synchronization import Synchronization
from dgc_training.tasks.protocol import Loss


class StepRecorder:
    """Measures steps and writes them to the CSV file.

    Args:
        directory: the run directory.
        settings: the config's `train`.
        num_workers: data workers per rank, for the header of the file.
        sync: the synchronization of the ranks, for the columns of the algorithm.
    """

    def __init__(self, directory: Path, settings: DictConfig, num_workers: int, sync: Synchronization) -> None:
        self.sync, self.metric = sync, settings.metric
        self.meter, transport = sync.optimizer.meter, sync.optimizer.transport
        self.file = CsvLog(
            directory,
            rank=transport.rank,
            size=transport.size,
            batch_size=settings.batch_size * settings.num_batches_per_step,
            num_workers=num_workers,
            every=settings.log_every,
        )

    def begin(self, timer: PhaseTimer) -> None:
        """Starts timing a step. The time before this call is not counted."""
        self.timer = timer
        self.started = time.perf_counter()
        self.increments = Increments(self._totals())
        self._begin_step()

    def _begin_step(self) -> None:
        self.samples = 0
        self.top: list[Any] = [0.0, 0.0]

    def _totals(self) -> dict[str, float]:
        data = self.timer.seconds.get("data", 0.0)
        sent = {"payload_bytes": float(self.meter.payload_bytes), "wire_bytes": self.meter.wire_bytes}
        return {**sent, "wait(s)": self.meter.seconds["wait"], "data": data}

    def batch(self, loss: Loss) -> None:
        """Call after each forward pass."""
        outputs, targets = loss.outputs, loss.targets
        if (
            outputs is not None
            and targets is not None
            and outputs.dim() == 2
            and targets.shape == outputs.shape[:1]
            and not targets.is_floating_point()
        ):
            for i, share in enumerate(accuracy(outputs, targets)):
                self.top[i] = self.top[i] + share * len(targets)
        else:
            self.top = [UNKNOWN * (self.samples + loss.items)] * 2
        self.samples += loss.items

    def step(self, epoch: int, itr: int, loss: Tensor) -> None:
        """Call after each step."""
        now, samples = time.perf_counter(), max(1, self.samples)
        amounts = self.increments(self._totals())
        data_seconds = amounts.pop("data")
        top1, top5 = (top / samples for top in self.top)
        metrics = {**amounts, **self.sync.csv_values()}
        self.file.step(epoch, itr, now - self.started, data_seconds, loss, top1, top5, samples, metrics)
        self.started = now
        self._begin_step()

    def end_epoch(self, epoch: int, results: Mapping[str, float]) -> None:
        """Call after an epoch's evaluation and before its checkpoint."""
        result = results.get(self.metric) if self.metric else None
        self.file.end_epoch(epoch, result, self.sync.consensus_distance())

    def state_dict(self) -> dict[str, Any]:
        return self.file.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.file.load_state_dict(state)

    def begin_at(self, epoch: int, step: int, seconds: float) -> None:
        self.file.begin_at(epoch, step, seconds)

    def close(self) -> None:
        self.file.close()
