"""What a run tells while it trains: TensorBoard, a progress bar or plain lines, and a summary at the end.

Only rank 0 writes. The loss is added up on each rank and averaged over the ranks every `log_every` steps
only, so no step waits for it. The x axis of every curve is the number of samples seen by all ranks together.

An error state that grows without bound is told once (`dgc_training.alarm`), by the rank that has it.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from dgc.comm.trace import Trace
from dgc_training.alarm import ErrorAlarm
from dgc_training.clock import Clock
from dgc_training.curves import Curves
from dgc_training.state import State

# Seconds between two plain lines within an epoch.
LINE_EVERY = 20.0


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
        self.rows = state.rows
        self.loss_sum = torch.zeros((), device=state.device)
        self.steps = 0  # since the last point
        self.rate = 0.0
        self.megabytes = 0.0
        self.alarm = ErrorAlarm()
        self.bar: Any = None
        self.use_bar = transport.rank == 0 and sys.stderr.isatty()
        apart = state.optimizer.steps_apart
        lag = None if apart is None else -(-apart // self.log_every)
        self.curves = Curves(directory, transport, progress.samples, lag)
        self.started = self.last_time = self.last_line = time.perf_counter()
        self.seconds_before = progress.seconds
        # The meter goes on from the run's totals, so that sums of fractions round as in one go.
        meter = state.optimizer.meter
        meter.payload_bytes, meter.wire_bytes = progress.payload_bytes, progress.wire_bytes
        meter.dense_bytes = progress.dense_bytes
        meter.trace = self.trace
        self.dropped_before = progress.dropped_steps
        self.last = self._snapshot()
        self.resume_timing()

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

    def batch(self, outputs: Tensor, targets: Tensor) -> None:
        """After each forward pass."""
        if self.rows is not None:
            self.rows.batch(outputs, targets)

    def step(self, loss: Tensor, samples: int) -> None:
        """After each step of training: its loss (scalar, on the device), and all ranks' samples in it."""
        if self.rows is not None:
            self.rows.step(self.progress.epoch, self.progress.step, loss)
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
        error_norm = self.optimizer.error_norm()
        ratio = float(self.optimizer.compress_ratio)
        if alarm := self.alarm.look(error_norm, ratio, self.steps):
            warnings.warn(f"rank {self.transport.rank}: {alarm}", stacklevel=2)
        now, snapshot = time.perf_counter(), self._snapshot()
        grown = {name: value - self.last.get(name, 0.0) for name, value in snapshot.items()}
        self.rate = grown.pop("samples") / max(now - self.last_time, 1e-9)
        values = {name: value / self.steps for name, value in grown.items()}
        values |= self.optimizer.gauges()
        values |= {
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "compress_ratio": ratio,
            "error_norm": error_norm,
            "dropped_steps": float(self.progress.dropped_steps),
            "samples_per_second": self.rate,
        }
        self.curves.add(self.loss_sum / self.steps, values, self.progress.samples, self.steps)
        if not self.use_bar and now - self.last_line > LINE_EVERY:
            self._line(self.curves.loss)
        self.megabytes = values["bytes_per_step/payload"] / 1e6
        self.loss_sum.zero_()
        self.steps, self.last, self.last_time = 0, snapshot, now

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
        if self.curves.epoch_steps:
            text = f"{self.rate:.0f} samples/s, {self.megabytes:.3f} MB/step, loss {self.curves.loss:.3f}"
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
        if self.steps:
            self._point()  # ranks at paces of their own end an epoch at any step
        if self.rows is not None:
            self.rows.end_epoch(self.progress.epoch - 1, results)
        self.progress.seconds = self.seconds_before + time.perf_counter() - self.started
        self.curves.write(results, self.progress.samples)
        loss = self.curves.end_epoch()
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        self._line(loss, "".join(f"{name} {value:.2f}  " for name, value in results.items()))
        self._save_trace()

    def resume_timing(self) -> None:
        """What came before, such as evaluating and saving, is no part of the next step's time."""
        self.last_time = time.perf_counter()
        if self.rows is not None:
            self.rows.begin(self.clock)

    def _save_trace(self) -> None:
        if self.trace is not None:
            self.trace.save(self.trace_file)

    def close(self) -> None:
        self.curves.close()
        self._save_trace()
        if self.rows is not None:
            self.rows.close()
        if self.bar is not None:
            self.bar.close()
