"""Reads runs for `scripts.plot` from the CSV files of their ranks (`scripts.gossip.rank_csv`).

The time axis is a run's real time: seconds summed over all steps, including those left out of the averages,
without validation and checkpoints. In a file without that column (elapsed(s)), the BT of a row is used for all
steps since the previous row. Curves are means over the ranks that have the row.
"""

import math
import re
import warnings
from collections.abc import Iterable
from pathlib import Path

from scripts.plot_runs import Curve, Run, algorithm, mean, metric_of, setting_of, unit_of
from scripts.run_files import LARGEST, PlotError, printable, read_config

NAME = re.compile(r"out_r(\d+)_n(\d+)\.csv")
PREAMBLE = 4  # lines before the header
MOST = 1e9  # epochs, or steps of an epoch
NEEDED = ("Epoch", "itr", "BT(s)", "avg:BT(s)", "Loss", "avg:Prec@1", "val")
MEASURED = ("BT(s)", "avg:BT(s)", "DT(s)", "wait(s)", "elapsed(s)", "wire_bytes")  # finite in any run
Row = dict[str, float]
Rows = dict[tuple[int, int], Row]


def read_file(path: Path) -> tuple[dict[str, int], Rows]:
    """Reads world size, batch size and the rows by (Epoch, itr). An incomplete last line is left out."""
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError as error:
        raise PlotError(f"{path} cannot be read: {error.strerror}") from None
    # A last line without line break was being written when the run was killed.
    lines.pop()
    try:
        start, *pairs = lines[:PREAMBLE]
        head = {name: int(value) for name, value in (pair.split(",") for pair in pairs)}
        columns = lines[PREAMBLE].split(",")
        missing = [name for name in NEEDED if name not in columns]
        if start != "BEGIN-TRAINING" or missing or not 0 < head["World-Size"] < LARGEST > head["Batch-Size"] > 0:
            raise ValueError
    except (ValueError, IndexError, KeyError):
        raise PlotError(f"{path} is not a CSV log: its first five lines differ from a log's") from None
    rows: Rows = {}
    for number, line in enumerate(lines[PREAMBLE + 1 :], PREAMBLE + 2):
        cells = line.split(",")
        try:
            row = row_of(dict(zip(columns, map(float, cells), strict=True)))
            rows[int(row["Epoch"]), int(row["itr"])] = row
        except ValueError:
            if number == len(lines):
                break
            raise PlotError(f"{path}, line {number}, is damaged: {line[:80]!r}. Remove the line.") from None
    return head, rows


def row_of(row: Row) -> Row:
    """A row, with NaN for the loss or scores of a run that diverges. Raises ValueError for other damage."""
    measured = [row[name] for name in MEASURED if name in row]
    if not (0 <= row["Epoch"] < MOST and -1 <= row["itr"] < MOST and all(-1 <= v < LARGEST for v in measured)):
        raise ValueError
    return {name: value if abs(value) < LARGEST else math.nan for name, value in row.items()}


def add_totals(rows: Rows, per_epoch: int) -> None:
    """Adds up wire_bytes, and estimates elapsed(s) if the file has no such column."""
    seconds = done = wire = 0.0
    for (epoch, itr), row in rows.items():
        if itr >= 0:
            steps = epoch * per_epoch + itr + 1
            seconds += row["BT(s)"] * (steps - done)
            done = steps
        row.setdefault("elapsed(s)", seconds)
        wire += row.get("wire_bytes", float("nan"))
        row["wire"] = wire


def read_run(directory: Path, label: str | None = None) -> Run:
    """Reads the run of a directory that `has_csv`. label: None uses the algorithm from its config.yaml."""
    paths = {tuple(map(int, found.groups())): p for p, found in _files(directory / "csv")}
    sizes = sorted({size for _, size in paths})
    if wrong := [path for (rank, size), path in paths.items() if rank >= size]:
        raise PlotError(f"{wrong[0]} has a rank in its name that is not below the number of ranks")
    if len(sizes) > 1:
        raise PlotError(
            f"{directory}/csv has files of {' and of '.join(map(str, sizes))} ranks: the run was resumed on "
            "another number of ranks. Move the files of all but one elsewhere."
        )
    size = sizes[0]
    if len(paths) < size:
        warnings.warn(f"{directory}: drawing {len(paths)} of {size} ranks; the others have no file", stacklevel=2)
    heads, files = zip(*(read_file(path) for _, path in sorted(paths.items())), strict=True)
    if (batches := {head["Batch-Size"] for head in heads}) and len(batches) > 1:
        raise PlotError(f"{directory}/csv has files of several runs: batches of {sorted(batches)} per rank")
    for (_, path), rows in zip(sorted(paths.items()), files, strict=True):
        if all(itr < 0 for _, itr in rows):
            raise PlotError(f"{path} has no rows: the run was killed before its first step")
    per_epoch = max(itr for rows in files for _, itr in rows) + 1
    for rows in files:
        add_totals(rows, per_epoch)
    config = read_config(directory / "config.yaml")
    training, validation = epochs(files, per_epoch)
    run = Run(
        directory=directory,
        label=printable(label if label is not None else algorithm(config, directory)),
        ranks=size,
        batch=batches.pop(),
        seconds_per_step=mean(map(seconds_per_step, files)),
        metric=metric_of(config, {}),
        unit=unit_of(config, {}),
        training=training,
        validation=validation,
        loss=losses(files, per_epoch),
        setting=setting_of(config),
    )
    if not run.is_top1:
        run.training = Curve()  # files have the top-1 accuracy of training alone
    return run


def seconds_per_step(rows: Rows) -> float:
    """The last known average. If every epoch was too short for one, the mean over the rows."""
    averages = [row["avg:BT(s)"] for row in rows.values() if row["avg:BT(s)"] >= 0]
    return averages[-1] if averages else mean(row["BT(s)"] for row in rows.values())


def epochs(files: Iterable[Rows], per_epoch: int) -> tuple[Curve, Curve]:
    """Top-1 accuracy in training (mean over the epoch) and the metric, of epochs that every rank has completed."""
    ranks = []
    for rows in files:
        ended = {epoch for epoch, itr in rows if itr < 0 or (epoch + 1, 0) in rows}
        last = {key[0]: row for key, row in sorted(rows.items()) if key[1] >= 0}
        ranks.append({epoch: (last[epoch], rows.get((epoch, -1))) for epoch in ended if epoch in last})
    training, validation = Curve(), Curve()
    for epoch in sorted(set.intersection(*(set(rank) for rank in ranks))):
        ends = [rank[epoch] for rank in ranks]
        steps = (epoch + 1) * per_epoch
        seconds, wire = (mean(row[name] for row, _ in ends) for name in ("elapsed(s)", "wire"))
        correct = mean(row["avg:Prec@1"] for row, _ in ends if row["avg:Prec@1"] >= 0)
        tested = mean(row["val"] for _, row in ends if row is not None and row["val"] >= 0)
        for curve, value in ((training, correct), (validation, tested)):
            if value == value:
                curve.add(steps, seconds, wire, value)
    return training, validation


def losses(files: Iterable[Rows], per_epoch: int) -> Curve:
    """The loss in every row, averaged over the ranks that have the row."""
    found: dict[tuple[int, int], list[Row]] = {}
    for rows in files:
        for key, row in rows.items():
            if key[1] >= 0:
                found.setdefault(key, []).append(row)
    curve = Curve()
    for (epoch, itr), rows_there in sorted(found.items()):
        steps = epoch * per_epoch + itr + 1
        seconds, wire, loss = (mean(row[name] for row in rows_there) for name in ("elapsed(s)", "wire", "Loss"))
        curve.add(steps, seconds, wire, loss)
    return curve


def has_csv(directory: Path) -> bool:
    return any(_files(directory / "csv"))


def _files(folder: Path) -> Iterable[tuple[Path, re.Match[str]]]:
    for path in sorted(folder.glob("*.csv")):
        if found := NAME.fullmatch(path.name):
            yield path, found
