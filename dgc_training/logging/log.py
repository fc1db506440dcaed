"""The log of a run: scalars in TensorBoard (`tags`), and on standard output a table with a row per epoch and a
progress bar (`console`).

Only rank 0 writes. Each rank adds up the loss, which is averaged over the ranks only every `log_every` steps, so
no step waits for it. The x axis of every scalar is the number of samples (or tokens: what the task
counts) seen by all ranks together.

A rank warns once if its residual grows without bound (`dgc_training.faults.error_growth`).

With train.trace every rank writes its exchanges and its own phases as a timeline, trace/rank<N>.json, for
ui.perfetto.dev or chrome://tracing.
"""

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from dgc.comm.meter import Trace
from dgc_training.checkpoint.progress import BYTES
from dgc_training.checkpoint.state import Recorder, RunState
from dgc_training.config import to_yaml
from dgc_training.faults.error_growth import ErrorGrowthMonitor
from dgc_training.logging.console import Console
from dgc_training.logging.formatting import changed_settings, human_bytes, plural
from dgc_training.logging.scalars import ScalarLog
from dgc_training.synchronization import Synchronization
from dgc_training.tasks.protocol import Loss


class Log:
    """The log of one run. `step` and `end_epoch` are collective: every rank calls them in the same order.

    Args:
        directory: the run directory.
        state: the parts of the run.
        sync: the synchronization of the ranks.
        recorder: records the steps of this rank, where train.recorder names one.
        tree: the complete config of the run.
        steps_per_epoch: optimizer steps in an epoch.
        item: what rates count: "sample" or "token".
    """

    def __init__(
        self,
        directory: Path,
        state: RunState,
        sync: Synchronization,
        recorder: Recorder | None,
        tree: DictConfig,
        steps_per_epoch: int,
        item: str = "sample",
    ) -> None:
        transport, progress, settings = state.transport, state.progress, tree.train
        self.directory, self.tree = directory, tree
        self.meets_groups = settings.groups is not None
        self.optimizer, self.sync, self.recorder = state.optimizer, sync, recorder
        self.progress = progress
        self.transport = transport
        self.steps_per_epoch = steps_per_epoch
        self.item = item
        self.console = Console(transport.rank, settings.num_epochs, steps_per_epoch, settings.metric, item)
        self.log_every = max(1, settings.log_every)
        self.trace = Trace(transport.rank) if settings.trace else None
        self.trace_file = directory / "trace" / f"rank{transport.rank}.json"
        self.timer = PhaseTimer(self.trace)
        self.device = state.device
        self.dense_explained = False
        self.loss_sum = torch.zeros((), device=state.device)
        self.steps = 0  # since the last point
        self.error_growth = ErrorGrowthMonitor()
        lag = None if sync.max_step_lag is None else -(-sync.max_step_lag // self.log_every)
        self.scalars = ScalarLog(directory, transport, progress.samples, lag)
        self.started = self.last_time = time.perf_counter()
        self.seconds_before = progress.seconds
        # The meter continues from the run's totals, so that a resumed run rounds them like an uninterrupted one.
        meter = state.optimizer.meter
        for name in BYTES:
            setattr(meter, name, getattr(progress, name))
        meter.trace = self.trace
        self.dropped_before = progress.dropped_steps
        self.last = self.epoch_began = self._snapshot()
        self.epoch_steps = 0
        self.resume_timing()

    def print(self, text: str) -> None:
        """Prints one or more lines to standard output, on rank 0 only."""
        self.console.print(text)

    def begin(
        self,
        kernels: str,
        transport: str,
        results: Sequence[str],
        resumed: str | None,
        choices: Sequence[str] = (),
    ) -> None:
        """Prints the settings of the run and its starting point.

        Args:
            kernels: description of the kernels in use.
            transport: description of the transport, with the reason for it.
            results: names of the evaluation's results.
            resumed: name of the checkpoint that the run resumes from; None for a new run.
            choices: what parts of the run have chosen, such as the parameters that go to Muon.
        """
        if self.transport.rank:
            return
        size, steps = self.transport.size, plural(self.steps_per_epoch, "step")
        plain: Any = OmegaConf.to_container(self.tree, resolve=True)
        self.scalars.write_config({"ranks": size, **plain}, to_yaml(self.tree, resolve=True), results)
        self.print(
            f"{self.directory}\n"
            f"{plural(size, 'rank')} on {self.device.type} ({kernels} kernels), {steps} per epoch\n"
            f"transport: {transport}\n"
            f"settings that differ from the defaults (config.yaml has all):\n{changed_settings(self.tree)}"
        )
        given = OmegaConf.select(self.tree, "train.compression.compress_ratio")
        if given is not None and given > 1:
            self.print(f"compress_ratio {given:g} is the factor saved: a share of {1 / given:.4g} is sent")
        for choice in choices:
            self.print(choice)
        if (part := self.optimizer.part) is not None:
            self.print(f"gradients are compressed between {part['machines']} machines, and dense inside them")
        if resumed is not None:
            done = self.progress.epoch >= self.tree.train.num_epochs
            self.print(f"resumed from checkpoint {resumed}" + (". The run is finished" if done else ""))
        if self.meets_groups:
            self.print("this group meets others in outer steps: bytes are those of its rounds")
        elif size == 1:
            self.print("1 process: nothing is sent")

    def _snapshot(self) -> dict[str, float]:
        """The totals that a point shows per step."""
        meter = self.optimizer.meter
        counts = {
            "bytes/payload_per_step": float(meter.payload_bytes),
            "bytes/wire_per_step": meter.wire_bytes,
            "bytes/cross_wire_per_step": meter.cross_wire_bytes,
            "bytes/dense_wire_per_step": meter.dense_wire_bytes,
        }
        seconds = {f"time/{name}": value for name, value in {**self.timer.seconds, **meter.seconds}.items()}
        return {**counts, **seconds, "samples": float(self.progress.samples)}

    def batch(self, loss: Loss) -> None:
        """Call after each forward pass."""
        if self.recorder is not None:
            self.recorder.batch(loss)

    def step(self, loss: Tensor, samples: int) -> None:
        """Call after each training step. loss: scalar on the device. samples: items of all ranks in this step."""
        if self.recorder is not None:
            self.recorder.step(self.progress.epoch, self.progress.step, loss)
        progress, meter = self.progress, self.optimizer.meter
        progress.step += 1
        progress.samples += samples
        progress.seconds = self.seconds_before + time.perf_counter() - self.started
        for name in BYTES:
            setattr(progress, name, getattr(meter, name))
        progress.dropped_steps = self.dropped_before + getattr(self.optimizer, "dropped_steps", 0)
        self.loss_sum += loss
        self.steps += 1
        self.epoch_steps += 1
        if self.steps == self.log_every or progress.step == self.steps_per_epoch:
            self._point()
        self.console.step(progress.epoch, progress.step, self._status())

    def _point(self) -> None:
        """Adds a point with the means over the steps since the last point."""
        progress, meter = self.progress, self.optimizer.meter
        error_norm = self.optimizer.error_norm()
        ratio = float(self.optimizer.compress_ratio)
        if warning := self.error_growth.update(error_norm, ratio, self.steps):
            warnings.warn(f"rank {self.transport.rank}: {warning}", stacklevel=2)
        now, snapshot = time.perf_counter(), self._snapshot()
        progress.training_seconds += now - self.last_time
        increments = {name: value - self.last.get(name, 0.0) for name, value in snapshot.items()}
        rate = increments.pop("samples") / max(now - self.last_time, 1e-9)
        values = {name: value / self.steps for name, value in increments.items()}
        if dense := values["bytes/dense_wire_per_step"]:
            values["bytes/wire_over_dense"] = values["bytes/wire_per_step"] / dense
        values |= self.sync.metrics()
        values |= {
            "train/lr": float(self.optimizer.param_groups[0]["lr"]),
            "train/steps": float(progress.epoch * self.steps_per_epoch + progress.step),
            "train/dropped_steps": float(progress.dropped_steps),
            "compression/compress_ratio": ratio,
            "compression/error_norm": error_norm,
            "bytes/wire": meter.wire_bytes,
            "bytes/dense_wire": meter.dense_wire_bytes,
            f"time/{self.item}s_per_second": rate,
            "time/elapsed": progress.training_seconds,
        }
        self.scalars.add(self.loss_sum / self.steps, values, progress.samples, self.steps)
        self.loss_sum.zero_()
        self.steps, self.last, self.last_time = 0, snapshot, now

    def _status(self) -> str:
        """The text of the progress bar, from the last point; empty before the first one."""
        last = self.scalars.last
        if "train/loss" not in last:
            return ""
        items = f"{self.item}s"
        status = f"loss {last['train/loss']:.3f}, {last[f'time/{items}_per_second']:.0f} {items}/s"
        if self.transport.size > 1 or self.meets_groups:
            status += f", wire {human_bytes(last['bytes/wire_per_step'])}/step"
        return status

    def end_epoch(self, results: Mapping[str, float], texts: Mapping[str, str]) -> None:
        """Call after an epoch's evaluation, when `progress` already counts the epoch. texts: by tag."""
        progress = self.progress
        if self.steps:
            self._point()  # asynchronous ranks may end an epoch at any step
        if self.recorder is not None:
            self.recorder.end_epoch(progress.epoch - 1, results)
        progress.seconds = self.seconds_before + time.perf_counter() - self.started
        self.scalars.write(results, progress.samples)
        self.scalars.write_texts(texts, progress.samples)
        loss = self.scalars.end_epoch()
        best = progress.best_epoch == progress.epoch
        values = {**self.scalars.last, **self._epoch_bytes(), "train/loss": loss}
        self.console.end_epoch(progress.epoch, values, best)
        self._explain_dense()
        self._save_trace()

    def _epoch_bytes(self) -> dict[str, float]:
        """Bytes per step, from the first step of this epoch or of a resumed run. Points have fewer steps."""
        began, steps, self.epoch_began, self.epoch_steps = self.epoch_began, self.epoch_steps, self.last, 0
        names = ("bytes/wire_per_step", "bytes/dense_wire_per_step")
        wire, dense = ((self.last[name] - began[name]) / max(steps, 1) for name in names)
        if not steps or not dense:
            return {}
        return {names[0]: wire, names[1]: dense, "bytes/wire_over_dense": wire / dense}

    def _explain_dense(self) -> None:
        """Explains, once, why there are more bytes than compress_ratio suggests."""
        ratio, share = self.optimizer.compress_ratio, self.scalars.last.get("compression/dense_share", 0.0)
        if ratio < 1 and share > 0 and self.transport.size > 1 and not self.dense_explained:
            self.dense_explained = True
            self.print(
                f"  at compress_ratio {ratio:.4g} sparse messages cost more than a dense all-reduce, so\n"
                f"  {100 * share:.3g}% of the gradient went dense in this epoch (docs/bytes.md)"
            )

    def resume_timing(self) -> None:
        """Excludes the time until now, such as evaluation and saving, from the time of the next step."""
        self.last_time = time.perf_counter()
        if self.recorder is not None:
            self.recorder.begin(self.timer.seconds)

    def _save_trace(self) -> None:
        if self.trace is not None:
            self.trace.save(self.trace_file)

    def close(self) -> None:
        self.scalars.close()
        self._save_trace()
        if self.recorder is not None:
            self.recorder.close()
        self.console.close()


T = TypeVar("T")


class PhaseTimer:
    """Adds up the host's seconds spent in named phases. With a `trace`, each phase is also drawn there."""

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

    def iterate(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Yields `items`, and counts the time spent fetching them as phase `name`."""
        iterator = iter(items)
        while True:
            with self.phase(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item
