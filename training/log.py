"""What a run tells while it trains: TensorBoard, a progress bar or plain lines, and a summary at the end.

Only rank 0 writes. The loss is added up on each rank and averaged over the ranks every `log_every` steps
only, so no step waits for it. The x axis of every curve is the number of samples seen by all ranks together.

An error state that grows without bound is told once (`training.alarm`), by the rank that has it.

Tags: loss/train, lr, compress_ratio, acc/... (the meters), bytes_per_step/{payload,wire,dense} of one rank,
error_norm (rank 0's), dropped_steps (of the whole run), samples_per_second, and seconds/<phase> per step:
data, forward_backward (which contains what compression does during backward), compress, launch, wait, decode,
step.
Seconds are the host's: compress, launch, wait and decode are the exchange's, step the optimizer's.

With train.trace every rank draws its exchanges and its own phases as a timeline: trace/rank<N>.json, for
ui.perfetto.dev or chrome://tracing.
"""

import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig
from torch import Tensor

from dgc.comm import all_reduce
from dgc.comm.trace import Trace
from training.alarm import ErrorAlarm
from training.state import State

T = TypeVar("T")
# Seconds between two plain lines within an epoch.
LINE_EVERY = 20.0


class Clock:
    """Seconds of the host spent in named phases."""

    def __init__(self, trace: Trace | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.trace = trace

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.seconds[name] = self.seconds.get(name, 0.0) + ended - started
            if self.trace is not None:
                self.trace.add(name, "training", started, ended)

    def each(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """`items`, with the time spent fetching them counted as phase `name`."""
        iterator = iter(items)
        while True:
            with self.phase(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


class Log:
    """One run's log. `step` and `end_epoch` are collective: every rank calls them in the same order."""

    def __init__(self, directory: Path, state: State, settings: DictConfig, steps_per_epoch: int) -> None:
        transport, progress = state.transport, state.progress
        self.optimizer = state.optimizer
        self.progress = progress
        self.transport = transport
        self.num_epochs = settings.num_epochs
        self.steps_per_epoch = steps_per_epoch
        self.log_every = max(1, settings.log_every)
        self.trace = Trace(transport.rank) if settings.trace else None
        self.trace_file = directory / "trace" / f"rank{transport.rank}.json"
        self.clock = Clock(self.trace)
        self.loss_sum = torch.zeros((), device=state.device)
        self.loss = float("nan")
        self.rate = 0.0
        self.megabytes = 0.0
        self.steps = 0
        self.epoch_loss, self.epoch_steps = 0.0, 0
        self.alarm = ErrorAlarm()
        self.writer: Any = None
        self.bar: Any = None
        self.use_bar = transport.rank == 0 and sys.stderr.isatty()
        if transport.rank == 0:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and one rank's business

            # Points that a killed run wrote after the checkpoint it resumes from disappear.
            self.writer = SummaryWriter(str(directory), purge_step=progress.samples + 1)
        self.started = self.last_time = self.last_line = time.perf_counter()
        self.seconds_before = progress.seconds
        # The meter goes on from the run's totals, so that sums of fractions round as in one go.
        meter = state.optimizer.meter
        meter.payload_bytes, meter.wire_bytes = progress.payload_bytes, progress.wire_bytes
        meter.dense_bytes = progress.dense_bytes
        meter.trace = self.trace
        self.dropped_before = progress.dropped_steps
        self.last = self._snapshot()

    def say(self, text: str) -> None:
        """One line (or more) on standard output, from rank 0 only; a progress bar stays below it."""
        if self.transport.rank == 0:
            if self.bar is not None:
                self.bar.clear()
            print(text, flush=True)

    def begin(self, what: str, resumed: str | None) -> None:
        """What runs, and where it starts."""
        self.say(what)
        if resumed is not None:
            done = self.progress.epoch >= self.num_epochs
            self.say(f"resumed from checkpoint {resumed}" + (", which is the run's end" if done else ""))

    def _snapshot(self) -> dict[str, float]:
        meter = self.optimizer.meter
        counts = {
            "bytes_per_step/payload": float(meter.payload_bytes),
            "bytes_per_step/wire": float(meter.wire_bytes),
            "bytes_per_step/dense": float(meter.dense_bytes),
        }
        seconds = {
            f"seconds/{name}": value for name, value in {**self.clock.seconds, **meter.seconds}.items()
        }
        return {**counts, **seconds, "samples": float(self.progress.samples)}

    def step(self, loss: Tensor, samples: int) -> None:
        """After each step of training: its loss (scalar, on the device), and all ranks' samples in it."""
        progress, meter = self.progress, self.optimizer.meter
        progress.step += 1
        progress.samples += samples
        progress.seconds = self.seconds_before + time.perf_counter() - self.started
        progress.payload_bytes = meter.payload_bytes
        progress.wire_bytes = meter.wire_bytes
        progress.dense_bytes = meter.dense_bytes
        progress.dropped_steps = self.dropped_before + getattr(self.optimizer, "dropped_steps", 0)
        self.loss_sum += loss
        self.steps += 1
        if self.use_bar:
            self._advance_bar()
        if self.steps == self.log_every or progress.step == self.steps_per_epoch:
            self._point()

    def _point(self) -> None:
        """Means over the steps since the last point."""
        mean = all_reduce(self.transport, self.loss_sum / self.steps, op="mean", name="loss")
        self.loss = float(mean)
        self.epoch_loss += self.loss * self.steps
        self.epoch_steps += self.steps
        error_norm = self.optimizer.error_norm()
        ratio = float(self.optimizer.compress_ratio)
        if alarm := self.alarm.look(error_norm, ratio, self.steps):
            warnings.warn(f"rank {self.transport.rank}: {alarm}", stacklevel=2)
        now, snapshot = time.perf_counter(), self._snapshot()
        grown = {name: value - self.last.get(name, 0.0) for name, value in snapshot.items()}
        self.rate = grown.pop("samples") / max(now - self.last_time, 1e-9)
        values = {name: value / self.steps for name, value in grown.items()}
        values |= {
            "loss/train": self.loss,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "compress_ratio": ratio,
            "error_norm": error_norm,
            "dropped_steps": float(self.progress.dropped_steps),
            "samples_per_second": self.rate,
        }
        self._write(values)
        if not self.use_bar and now - self.last_line > LINE_EVERY:
            self._line(self.loss)
        self.megabytes = values["bytes_per_step/payload"] / 1e6
        self.loss_sum.zero_()
        self.steps, self.last, self.last_time = 0, snapshot, now

    def _write(self, values: Mapping[str, float]) -> None:
        if self.writer is not None:
            for tag, value in values.items():
                self.writer.add_scalar(tag, value, self.progress.samples)

    def _advance_bar(self) -> None:
        if self.bar is None:
            from tqdm import tqdm  # type: ignore[import-untyped]

            self.bar = tqdm(
                desc=f"epoch {self.progress.epoch + 1}/{self.num_epochs}",
                total=self.steps_per_epoch,
                initial=self.progress.step - 1,
                leave=False,
                unit="step",
                dynamic_ncols=True,
            )
        if self.epoch_steps:
            text = f"{self.rate:.0f} samples/s, {self.megabytes:.3f} MB/step, loss {self.loss:.3f}"
            self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()

    def _line(self, loss: float, results: str = "") -> None:
        progress = self.progress
        place = f"epoch {progress.epoch + (1 if progress.step else 0)}/{self.num_epochs}"
        if progress.step:
            place += f" step {progress.step}/{self.steps_per_epoch}"
        self.last_line = time.perf_counter()
        self.say(
            f"{place}  loss {loss:.4f}  {results}lr {self.optimizer.param_groups[0]['lr']:.4g}  ratio "
            f"{self.optimizer.compress_ratio:.4g}  {self.rate:.0f} samples/s  {self.megabytes:.4f} MB/step"
        )

    def end_epoch(self, results: Mapping[str, float]) -> None:
        """After an epoch's evaluation; `progress` already counts the epoch."""
        self.progress.seconds = self.seconds_before + time.perf_counter() - self.started
        self._write(results)
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        # No step: the run was resumed after the epoch's last.
        loss = self.epoch_loss / self.epoch_steps if self.epoch_steps else float("nan")
        self._line(loss, "".join(f"{name} {value:.2f}  " for name, value in results.items()))
        self.epoch_loss, self.epoch_steps = 0.0, 0
        if self.writer is not None:
            self.writer.flush()
        self._save_trace()
        # Evaluating and saving are no part of the next point's samples per second.
        self.last_time = time.perf_counter()

    def _save_trace(self) -> None:
        if self.trace is not None:
            self.trace.save(self.trace_file)

    def close(self) -> None:
        self._save_trace()
        if self.bar is not None:
            self.bar.close()
        if self.writer is not None:
            self.writer.close()
