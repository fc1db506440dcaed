"""Collects the values of each training step for a rank's CSV file."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from dgc.optim import Wrapper
from dgc_training.logging.clock import Clock
from dgc_training.logging.rank_csv.log import UNKNOWN, CsvLog, Since, accuracy


class Rows:
    """Measures steps and writes them to the CSV file.

    Args:
        directory: the run directory.
        settings: the config's `train`.
        num_workers: data workers per rank, for the header of the file.
        optimizer: its meter and metrics are written.
    """

    def __init__(self, directory: Path, settings: DictConfig, num_workers: int, optimizer: Wrapper) -> None:
        self.optimizer, self.metric = optimizer, settings.metric
        self.file = CsvLog(
            directory,
            rank=optimizer.transport.rank,
            size=optimizer.transport.size,
            batch_size=settings.batch_size * settings.num_batches_per_step,
            num_workers=num_workers,
            every=settings.log_every,
        )

    def begin(self, clock: Clock) -> None:
        """Starts timing a step. The time before this call is not counted."""
        self.clock = clock
        self.started = time.perf_counter()
        self.since = Since(self._totals())
        self._begin_step()

    def _begin_step(self) -> None:
        self.samples = 0
        self.top: list[Any] = [0.0, 0.0]

    def _totals(self) -> dict[str, float]:
        meter = self.optimizer.meter
        data = self.clock.seconds.get("data", 0.0)
        sent = {"payload_bytes": float(meter.payload_bytes), "wire_bytes": meter.wire_bytes}
        return {**sent, "wait(s)": meter.seconds["wait"], "data": data}

    def batch(self, outputs: Tensor, targets: Tensor) -> None:
        """Call after each forward pass."""
        if outputs.dim() == 2 and targets.shape == outputs.shape[:1] and not targets.is_floating_point():
            for i, share in enumerate(accuracy(outputs, targets)):
                self.top[i] = self.top[i] + share * len(targets)
        else:
            self.top = [UNKNOWN * (self.samples + len(targets))] * 2
        self.samples += len(targets)

    def step(self, epoch: int, itr: int, loss: Tensor) -> None:
        """Call after each step."""
        now, samples = time.perf_counter(), max(1, self.samples)
        metrics = self.since(self._totals())
        latest = self.optimizer.metrics()
        metrics |= {name: latest[name] for name in ("weight", "staleness") if name in latest}
        waited = metrics.pop("data")
        top1, top5 = (top / samples for top in self.top)
        self.file.step(epoch, itr, now - self.started, waited, loss, top1, top5, samples, metrics)
        self.started = now
        self._begin_step()

    def end_epoch(self, epoch: int, results: Mapping[str, float]) -> None:
        """Call after an epoch's evaluation and before its checkpoint."""
        distance = self.optimizer.metrics().get("consensus_distance")
        self.file.end_epoch(epoch, results.get(self.metric) if self.metric else None, distance)

    def close(self) -> None:
        self.file.close()
