"""Reads runs for `scripts.report`: the curves of `scripts.plot`, and the run's config, result, bytes and times.

What a finished run has in summary.json is read from there. For an unfinished run it is computed from the curves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dgc_training.errors import ConfigError
from dgc_training.formulas import is_formula
from dgc_training.logging.formatting import written
from scripts.gossip.csv_runs import read_file
from scripts.plot import read, split_label
from scripts.plot_events import LAST, STEPS, load_events
from scripts.plot_figures import names
from scripts.plot_runs import NotBegun, Run, is_lower_better, mean, metric_of, unit_of
from scripts.run_files import printable, read_config, read_summary

# The phases of a step, as in TensorBoard's tags time/..., in the order of the bars.
PHASES = ("data", "forward_backward", "compress", "launch", "wait", "decode", "step", "other")
NOT_SETTINGS = ("requires", "train.dgc")  # only read by config files
ABSENT = object()
ABSENT_TEXT = "–"


@dataclass
class Traffic:
    """Wire bytes per step of one rank, against optimizer steps. dense: of dense fp32 all-reduces, or NaN."""

    steps: list[float] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)
    dense: list[float] = field(default_factory=list)


@dataclass
class ReportedRun:
    """What the report knows about one run.

    Attributes:
        name: Name in tables and figures.
        directory: The run directory, as it was given.
        run: The curves. None: the run has no point yet.
        config: Contents of config.yaml; empty without such a file.
        summary: Contents of summary.json; empty while the run is unfinished.
        traffic: Bytes per step.
        phases: Seconds per step of rank 0 in each of PHASES; empty if they were not logged.
    """

    name: str
    directory: Path
    run: Run | None
    config: dict[str, Any]
    summary: dict[str, Any]
    traffic: Traffic
    phases: dict[str, float]

    @property
    def metric(self) -> str:
        return metric_of(self.config, self.summary)

    @property
    def lower_is_better(self) -> bool:
        return is_lower_better(self.config, self.summary)

    @property
    def unit(self) -> str:
        return unit_of(self.config, self.summary)

    @property
    def quality(self) -> list[float]:
        """The metric after each epoch."""
        return self.run.validation.y if self.run else []

    @property
    def epochs(self) -> int:
        return int(self.summary.get("epochs", len(self.quality)))

    @property
    def planned_epochs(self) -> int | None:
        """None: unknown, or a formula of the config."""
        found = (self.config.get("train") or {}).get("num_epochs")
        return found if isinstance(found, int) else None

    @property
    def final(self) -> float | None:
        known = self.summary.get("final") or {}
        return known.get(self.metric, self.quality[-1] if self.quality else None)

    @property
    def best(self) -> tuple[float, int] | None:
        """The best value of the metric, and its epoch, counted from 1."""
        known, epoch = (self.summary.get("best") or {}).get(self.metric), self.summary.get("best_epoch")
        if known is not None and epoch is not None:
            return known, epoch
        choose = min if self.lower_is_better else max
        return choose(((y, epoch) for epoch, y in enumerate(self.quality, 1)), key=lambda p: p[0], default=None)

    @property
    def seconds(self) -> float | None:
        """Seconds of training so far, without evaluation and checkpoints."""
        return self.run.loss.seconds[-1] if self.run and self.run.loss.seconds else None

    @property
    def wire_bytes(self) -> float | None:
        """Bytes that one rank has sent so far."""
        return self.summary.get("wire_bytes", self.run.loss.wire[-1] if self.run and self.run.loss.wire else None)

    @property
    def dense_wire_bytes(self) -> float | None:
        """Bytes of as many dense fp32 all-reduces. None if unknown."""
        if "dense_wire_bytes" in self.summary:
            return float(self.summary["dense_wire_bytes"])
        total = sum(d * n for d, n in zip(self.traffic.dense, increments(self.traffic.steps), strict=True))
        return total if total > 0 else None


def read_reported(words: Sequence[str]) -> list[ReportedRun]:
    """Reads runs from DIR or LABEL=DIR. Raises PlotError for a directory that is no run."""
    runs: list[tuple[str | None, Path, Run | None]] = []
    for word in words:
        label, directory = split_label(word)
        try:
            runs.append((label, directory, read(word)))
        except NotBegun:
            if not (directory / "config.yaml").is_file():
                raise
            runs.append((label, directory, None))
    distinct = iter(names([run for *_, run in runs if run is not None]))
    return [
        ReportedRun(
            name=printable(next(distinct) if run is not None else label or directory.resolve().name),
            directory=directory,
            run=run,
            config=read_config(directory / "config.yaml"),
            summary=read_summary(directory / "summary.json"),
            **(read_details(directory, run) if run is not None else {"traffic": Traffic(), "phases": {}}),
        )
        for label, directory, run in runs
    ]


def increments(totals: Sequence[float]) -> list[float]:
    return [after - before for before, after in zip([0.0, *totals], totals, strict=False)]


def read_details(directory: Path, run: Run) -> dict[str, Any]:
    """Bytes and times per step, from the TensorBoard files. CSV files alone have fewer of them."""
    try:
        events = load_events(directory)
    except NotBegun:
        return details_of_csv(directory, run)
    elapsed = events.values(LAST)
    steps = {sample: value for sample, value in events.values(STEPS).items() if sample in elapsed}
    taken = dict(zip(steps, increments(list(steps.values())), strict=True))
    wire, dense = events.values("bytes/wire_per_step"), events.values("bytes/dense_wire_per_step")
    at = [sample for sample in wire if sample in steps and sample in dense]
    total = sum(taken.values())
    logged = {phase: events.values(f"time/{phase}").items() for phase in PHASES}
    phases = {phase: sum(v * taken.get(sample, 0.0) for sample, v in logged[phase]) / total for phase in PHASES}
    return {
        "traffic": Traffic([steps[i] for i in at], [wire[i] for i in at], [dense[i] for i in at]),
        "phases": disjoint(phases, max(elapsed.values()) / total),
    }


def disjoint(phases: dict[str, float], step: float) -> dict[str, float]:
    """Phases that add up to the seconds of a `step`.

    forward_backward includes the compression that runs during backward, which has phases of its own. What the sum
    exceeds a step by was therefore counted twice, and is taken from forward_backward.
    """
    excess = sum(phases.values()) - step
    return {
        **phases,
        "forward_backward": max(0.0, phases["forward_backward"] - max(0.0, excess)),
        "other": max(0.0, -excess),
    }


def details_of_csv(directory: Path, run: Run) -> dict[str, Any]:
    """Bytes from the run's curve. Times from rank 0: waiting for data, waiting for other ranks, and the rest."""
    loss = run.loss
    taken, sent = increments(loss.steps), increments(loss.wire)
    known = [i for i, wire in enumerate(sent) if wire == wire]
    traffic = Traffic(
        [loss.steps[i] for i in known], [sent[i] / taken[i] for i in known], [float("nan")] * len(known)
    )
    phases: dict[str, float] = {}
    path = directory / "csv" / f"out_r0_n{run.ranks}.csv"
    if path.is_file():
        rows = [row for (_, itr), row in read_file(path)[1].items() if itr >= 0]
        if all("wait(s)" in row and "DT(s)" in row for row in rows):
            waited = max(0.0, sum(row["wait(s)"] for row in rows) / loss.steps[-1])
            data, step = max(0.0, mean(row["DT(s)"] for row in rows)), mean(row["BT(s)"] for row in rows)
            phases = {**dict.fromkeys(PHASES, 0.0), "data": data, "wait": waited}
            phases["other"] = max(0.0, step - data - waited)
    return {"traffic": traffic, "phases": phases}


def differing_settings(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """The keys of config.yaml with different values, and the value in each run; ABSENT_TEXT where there is none.

    Values that a config derives from other keys are left out: the other keys are listed. Runs without config.yaml
    are not compared.
    """
    known = [run.config for run in runs if run.config]
    rows = []
    for key, values in _differing(known, ""):
        texts = iter([_text(value) for value in values])
        rows.append((key, [next(texts) if run.config else ABSENT_TEXT for run in runs]))
    return rows


def _differing(values: list[Any], key: str) -> Iterator[tuple[str, list[Any]]]:
    if key in NOT_SETTINGS or all(value == values[0] for value in values):
        return
    if all(isinstance(value, dict) for value in values) and len({value.get("_target_") for value in values}) == 1:
        for name in dict.fromkeys(name for value in values for name in value):
            below = [value.get(name, ABSENT) for value in values]
            yield from _differing(below, f"{key}.{name}" if key else str(name))
    elif not any(is_formula(value) for value in values):
        yield key, values


def _without_derived(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_derived(item) for key, item in value.items() if not is_formula(item)}
    return value


def _text(value: Any) -> str:
    if value is ABSENT:
        return ABSENT_TEXT
    value = _without_derived(value)
    try:
        return written(value)
    except ConfigError:  # the target no longer exists, so that its defaults are unknown
        return str(yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)).strip()
