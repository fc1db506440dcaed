"""One CSV file per rank, csv/out_r{rank}_n{size}.csv: the columns of stochastic gradient push, and more.

The first four lines describe the run (BEGIN-TRAINING; World-Size, Num-DLWorkers, Batch-Size). The fifth has the
column names:

    Epoch, itr                 counted from 0; itr is -1 in the row after an epoch's validation
    BT NT DT (s)               the whole step; the step without waiting for data (forward, backward, optimizer,
                               transfer); waiting for data. avg and std cover all steps since the job's first start
                               except the first `ignore` steps of each epoch; -1 while no step is counted
    Loss, Prec@1, Prec@5       of this rank's batch, in %; avg covers the epoch so far, weighted by samples
    val                        top-1 % of the validation; -1 in the rows of training
    consensus                  distance of this rank's model to the mean of all models; -1 if not measured
    weight, staleness          push-sum weight, and rounds by which the newest message is late: last known values
    payload_bytes, wire_bytes  bytes that this rank contributed and sent (docs/bytes.md) since the previous row
    wait(s)                    seconds waited for other ranks since the previous row
    elapsed(s)                 BT summed over every step since the job's first start: the time axis of plots

A row is written for an epoch's first step, then for each `every`-th step, for its last step, and after its
validation. An unknown value is -1.

A resumed job appends. Rows that a killed job wrote after the checkpoint are removed first: a row is identified by
its (Epoch, itr), and the checkpoint contains the last one. On another number of ranks it appends to the files that
this number of ranks has begun before, if any.

`StepRecorder` is the recorder that the trainer builds where `train.recorder` names it, as configs/gossip does.

Differences from the reference: the last seven columns; elapsed time is measured instead of estimated afterwards.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from omegaconf import DictConfig
from torch import Tensor

from dgc_training.atomic_write import write_atomically
from dgc_training.checkpoint.validation import check_structure
from dgc_training.tasks.protocol import Loss

TIMES = ("BT(s)", "NT(s)", "DT(s)")
SCORES = ("Loss", "Prec@1", "Prec@5")
LATEST = ("consensus", "weight", "staleness")
SUMMED = ("payload_bytes", "wire_bytes", "wait(s)")
COLUMNS = (
    *("Epoch", "itr"),
    *(f"{kind}{name}" for name in TIMES for kind in ("", "avg:", "std:")),
    *(f"{kind}{name}" for name in SCORES for kind in ("", "avg:")),
    *("val", "consensus", "weight", "payload_bytes", "wire_bytes", "staleness", "wait(s)", "elapsed(s)"),
)
PREAMBLE = 5  # lines before the first row
# The itr of a row after validation. It sorts after every step of its epoch.
END = -1
UNKNOWN = -1.0
NO_METRICS: Mapping[str, float] = MappingProxyType({})


@dataclass
class Running:
    """Mean and sample standard deviation in one pass (Welford 1962); both are -1 while nothing is counted."""

    count: int = 0
    mean: float = UNKNOWN
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        before = self.mean if self.count > 1 else value
        self.mean = before + (value - before) / self.count
        self.squares += (value - before) * (value - self.mean)

    @property
    def deviation(self) -> float:
        if self.count == 0:
            return UNKNOWN
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


class CsvLog:
    """The CSV file of one rank. No method communicates. The file is opened when the first row is written.

    Args:
        directory: the run directory.
        batch_size: samples of one rank in one step.
        every: steps between two rows.
        ignore: steps at the beginning of each epoch that are left out of the time statistics.
        state: `state_dict()` from the checkpoint that the job resumes from; None begins a new file.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        size: int,
        batch_size: int,
        num_workers: int = 0,
        every: int = 10,
        ignore: int = 10,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if every < 1 or ignore < 0:
            raise ValueError(f"every is {every} and ignore is {ignore}; they must be at least 1 and 0")
        self.path = directory / "csv" / f"out_r{rank}_n{size}.csv"
        self.every, self.ignore = every, ignore
        self.preamble = ["BEGIN-TRAINING", f"World-Size,{size}", f"Num-DLWorkers,{num_workers}"]
        self.preamble += [f"Batch-Size,{batch_size}", ",".join(COLUMNS)]
        self.times = {name: Running() for name in TIMES}
        self.elapsed = 0.0
        self.position = [-1, END]  # Epoch and itr of the last call
        self.written = [-1, END]  # Epoch and itr of the last row
        self.steps, self.samples = 0, 0  # of the epoch so far
        self.now: dict[str, float | Tensor] = dict.fromkeys((*TIMES, *SCORES), UNKNOWN)
        self.sums: dict[str, float | Tensor] = dict.fromkeys(SCORES, 0.0)
        self.metrics = dict.fromkeys((*LATEST, *SUMMED), 0.0) | {"consensus": UNKNOWN, "weight": 1.0}
        self.file: TextIO | None = None
        self.resumed = False
        if state is not None:
            self.load_state_dict(state)

    def step(
        self,
        epoch: int,
        itr: int,
        batch_s: float,
        data_s: float,
        loss: float | Tensor,
        top1: float | Tensor,
        top5: float | Tensor,
        samples: int,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> None:
        """Call after each step.

        Args:
            epoch, itr: position of the step.
            batch_s, data_s: seconds of the step, and the part of them spent waiting for data.
            loss, top1, top5: scores of the step's `samples`; -1: unknown. A 0-d tensor on any device is read only
                when a row is written.
            metrics: any of consensus, weight, staleness (current values) and payload_bytes, wire_bytes, wait(s)
                (amounts of this step). ValueError for another name.
        """
        if unknown := metrics.keys() - self.metrics.keys():
            raise ValueError(f"there are no metrics {sorted(unknown)}; possible are {sorted(self.metrics)}")
        if epoch != self.position[0] or self.position[1] == END:
            self.steps, self.samples, self.sums = 0, 0, dict.fromkeys(SCORES, 0.0)
        self.position = [epoch, itr]
        self.steps += 1
        self.samples += samples
        self.elapsed += batch_s
        seconds = dict(zip(TIMES, (batch_s, batch_s - data_s, data_s), strict=True))
        # float64, so that the sum over an epoch does not lose the last batches to rounding.
        scores = {
            name: value.detach().double() if isinstance(value, Tensor) else value
            for name, value in zip(SCORES, (loss, top1, top5), strict=True)
        }
        self.now = {**seconds, **scores}
        for name, value in scores.items():
            self.sums[name] = self.sums[name] + value * samples
        if self.steps > self.ignore:
            for name, running in self.times.items():
                running.add(seconds[name])
        for name, amount in metrics.items():
            self.metrics[name] = self.metrics[name] + amount if name in SUMMED else amount
        if (self.steps - 1) % self.every == 0:
            self._training_row()
        # The distance was measured at this step and is unknown at the next ones.
        self.metrics["consensus"] = UNKNOWN

    def end_epoch(self, epoch: int, val: float | None = None, consensus: float | None = None) -> None:
        """Writes the rows that end an epoch. Call it after validation and before the checkpoint, also if the job
        was resumed after the epoch's last step.

        Args:
            val: top-1 %; None without validation.
            consensus: the distance measured before validation; None if it was not measured.
        """
        self.metrics["consensus"] = UNKNOWN if consensus is None else consensus
        if self.steps and self.position[0] == epoch and self.position[1] != END and self.position != self.written:
            self._training_row()
        self.position = [epoch, END]
        self._row([UNKNOWN] * (2 * len(SCORES)), UNKNOWN if val is None else val)
        self.metrics["consensus"] = UNKNOWN

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint, as plain numbers."""
        return {
            "times": {name: asdict(running) for name, running in self.times.items()},
            "elapsed": self.elapsed,
            "place": list(self.position),
            "written": list(self.written),
            "steps": self.steps,
            "samples": self.samples,
            "now": {name: float(value) for name, value in self.now.items()},
            "sums": {name: float(value) for name, value in self.sums.items()},
            "metrics": dict(self.metrics),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Call before the first row. Raises ValueError if `state` is not a state of this class."""
        if self.file is not None:
            raise ValueError("a state must be loaded before the first row is written")
        check_structure(state, self.state_dict(), "csv")
        self.times = {name: Running(**values) for name, values in state["times"].items()}
        self.elapsed, self.steps, self.samples = state["elapsed"], state["steps"], state["samples"]
        self.position, self.written = list(state["place"]), list(state["written"])
        self.now, self.sums, self.metrics = dict(state["now"]), dict(state["sums"]), dict(state["metrics"])
        self.resumed = True

    def begin_at(self, epoch: int, step: int, seconds: float) -> None:
        """Continues, at the next step and time, a file that this number of ranks may have begun before."""
        self.position = [epoch, step - 1] if step else [epoch - 1, END]
        self.written, self.elapsed, self.resumed = list(self.position), seconds, True

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None
            self.resumed = True

    def _training_row(self) -> None:
        cells: list[float] = []
        for name in SCORES:
            average = self.sums[name] / self.samples if self.samples else UNKNOWN
            cells += [float(self.now[name]), float(average)]
        self._row(cells, UNKNOWN)

    def _row(self, scores: Sequence[float], val: float) -> None:
        times = [
            value
            for name in TIMES
            for value in (float(self.now[name]), self.times[name].mean, self.times[name].deviation)
        ]
        metrics = [f"{self.metrics[name]:.7g}" for name in ("consensus", "weight")]
        metrics += [f"{self.metrics[name]:.0f}" for name in ("payload_bytes", "wire_bytes")]
        metrics += [f"{self.metrics['staleness']:g}", f"{self.metrics['wait(s)']:.6g}"]
        cells = [f"{value:.6g}" for value in (*times, *scores, val)]
        line = ",".join([*map(str, self.position), *cells, *metrics, f"{self.elapsed:.3f}"])
        if self.file is None:
            self.file = open_file(self.path, self.preamble, self.written if self.resumed else None)
        self.file.write(line + "\n")
        # Flush each row, so that a killed run keeps its rows.
        self.file.flush()
        self.written = list(self.position)
        self.metrics |= dict.fromkeys(SUMMED, 0.0)


class Increments:
    """Turns growing totals, such as a meter's counters, into amounts since the last call.

    increments = Increments({"wire_bytes": meter.wire_bytes})
    ...
    csv.step(..., metrics=increments({"wire_bytes": meter.wire_bytes}))
    """

    def __init__(self, totals: Mapping[str, float]) -> None:
        self.before = dict(totals)

    def __call__(self, totals: Mapping[str, float]) -> dict[str, float]:
        grown = {name: total - self.before.get(name, 0.0) for name, total in totals.items()}
        self.before |= totals
        return grown


def accuracy(outputs: Tensor, targets: Tensor, ks: Sequence[int] = (1, 5)) -> tuple[Tensor, ...]:
    """Top-k accuracy in % for each of `ks`, on the outputs' device. A k above the number of classes means all.

    Shapes: outputs float [n, classes], targets int [n]. Raises ValueError for other shapes.
    """
    if outputs.dim() != 2 or targets.shape != outputs.shape[:1]:
        raise ValueError(f"outputs {list(outputs.shape)} and targets {list(targets.shape)} are not [n, c] and [n]")
    largest = min(max(ks), outputs.size(1))
    hits = outputs.detach().topk(largest, dim=1).indices == targets.unsqueeze(1)
    return tuple(100.0 * hits[:, :k].any(dim=1).double().mean() for k in ks)


def open_file(path: Path, preamble: Sequence[str], last: Sequence[int] | None) -> TextIO:
    """Opens the file for appending after row `last` (Epoch, itr), and drops later rows.

    A new file is begun if `last` is None, or if the existing file has another format.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    if last is not None and path.exists():
        # Text after the last line break is a row that was being written when the job was killed.
        lines = path.read_text(errors="replace").split("\n")[:-1]
    kept = []
    if len(lines) >= PREAMBLE and lines[PREAMBLE - 1] == preamble[-1] and last is not None:
        kept = [line for line in lines[PREAMBLE:] if _sort_key(line) <= _position(*last)]
    text = "".join(f"{line}\n" for line in (*preamble, *kept))
    write_atomically(path, lambda file: file.write(text.encode()))
    return path.open("a")


def _position(epoch: int, itr: int) -> tuple[float, float]:
    return (epoch, math.inf if itr == END else itr)


def _sort_key(line: str) -> tuple[float, float]:
    """The sort key of a row. A line that is not a row sorts after all rows."""
    cells = line.split(",")
    try:
        return _position(int(cells[0]), int(cells[1])) if len(cells) == len(COLUMNS) else (math.inf, 0.0)
    except ValueError:
        return (math.inf, 0.0)


class StepRecorder:
    """Measures steps and writes them to the CSV file of this rank.

    Args:
        directory: the run directory.
        tree: the complete config of the run.
        optimizer: the distributed optimizer, which has the columns of the algorithm.
    """

    def __init__(self, directory: Path, tree: DictConfig, optimizer: Any) -> None:
        settings = tree.train
        self.optimizer, self.metric = optimizer, settings.metric
        self.file = CsvLog(
            directory,
            rank=optimizer.transport.rank,
            size=optimizer.transport.size,
            batch_size=settings.batch_size * settings.num_batches_per_step,
            num_workers=tree.data.num_workers,
            every=settings.log_every,
        )

    def begin(self, seconds: Mapping[str, float]) -> None:
        """Starts timing a step. The time before this call is not counted. seconds: of each phase so far."""
        self.seconds = seconds
        self.started = time.perf_counter()
        self.increments = Increments(self._totals())
        self._begin_step()

    def _begin_step(self) -> None:
        self.samples = 0
        self.top: list[Any] = [0.0, 0.0]

    def _totals(self) -> dict[str, float]:
        data, meter = self.seconds.get("data", 0.0), self.optimizer.meter
        sent = {"payload_bytes": float(meter.payload_bytes), "wire_bytes": meter.wire_bytes}
        return {**sent, "wait(s)": meter.seconds["wait"], "data": data}

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
        found = self.optimizer.metrics()
        metrics = amounts | {name: found[name] for name in ("weight", "staleness") if name in found}
        self.file.step(epoch, itr, now - self.started, data_seconds, loss, top1, top5, samples, metrics)
        self.started = now
        self._begin_step()

    def end_epoch(self, epoch: int, results: Mapping[str, float]) -> None:
        """Call after an epoch's evaluation and before its checkpoint."""
        result = results.get(self.metric) if self.metric else None
        self.file.end_epoch(epoch, result, self.optimizer.metrics().get("consensus_distance"))

    def state_dict(self) -> dict[str, Any]:
        return self.file.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.file.load_state_dict(state)

    def begin_at(self, epoch: int, step: int, seconds: float) -> None:
        self.file.begin_at(epoch, step, seconds)

    def close(self) -> None:
        self.file.close()
