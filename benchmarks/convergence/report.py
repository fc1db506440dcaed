"""The table, the line of JSON and the figure of all runs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib

from benchmarks.convergence.tasks import Task
from benchmarks.results import print_json

Summaries = Mapping[str, Sequence[Mapping[str, Any]]]


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean. None for a single value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def rows_of(task: Task, summaries: Summaries) -> dict[str, dict[str, Any]]:
    """One row for each method, from the summaries of its runs. Others are compared with the first."""
    quality = {m: [float(s["final"][task.metric]) for s in runs] for m, runs in summaries.items()}
    first = next(iter(quality.values()))
    rows: dict[str, dict[str, Any]] = {}
    for method, runs in summaries.items():
        differences = [a - b for a, b in zip(quality[method], first, strict=True)]
        wire, dense = (sum(s[key] for s in runs) for key in ("wire_bytes", "dense_wire_bytes"))
        rows[method] = {
            "quality": mean(quality[method]),
            "difference": mean(differences),
            "standard_error": standard_error(differences),
            "wire_bytes": wire,
            "dense_wire_bytes": dense,
            "dense_over_wire": dense / wire if wire else math.nan,
            "seconds": mean(s["seconds"] for s in runs),
            "runs": quality[method],
        }
    return rows


def report(task: Task, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table and a line of JSON."""
    print(
        f"\n{'method':<20} {task.quality + task.unit:>20} {'minus ' + next(iter(rows)):>20} {'std. error':>10} "
        f"{'dense / wire':>12} {'MB per run':>11} {'seconds':>8}"
    )
    for method, row in rows.items():
        error = "" if row["standard_error"] is None else f"{row['standard_error']:.{task.decimals}f}"
        print(
            f"{method:<20} {row['quality']:20.{task.decimals}f} {row['difference']:20.{task.decimals}f} "
            f"{error:>10} {row['dense_over_wire']:12.1f} {row['wire_bytes'] / len(row['runs']) / 1e6:11.2f} "
            f"{row['seconds']:8.1f}"
        )
    print_json({"benchmark": "convergence", "metric": task.metric, "methods": rows})


def draw(task: Task, rows: Mapping[str, Mapping[str, Any]], title: str, file: Path) -> None:
    """Draw the quality of each method against how many times fewer bytes it sends. Better is higher."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "convergence", "svg.fonttype": "none", "font.size": 9}
    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    axes.axhline(next(iter(rows.values()))["quality"], color="black", linewidth=0.8, linestyle=":")
    colors = plt.get_cmap("tab10")
    for number, (method, row) in enumerate(rows.items()):
        color = "black" if number == 0 else colors((number - 1) % 10)
        x, y = row["dense_over_wire"], row["quality"]
        axes.errorbar(x, y, row["standard_error"], fmt="o", color=color, markersize=5, elinewidth=0.6)
        axes.annotate(method, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8, color=color)
    axes.set_xscale("log")
    axes.margins(x=0.2, y=0.15)
    if task.lower_is_better:
        axes.invert_yaxis()
    axes.set_xlabel("times fewer wire bytes than dense fp32, whole run")
    axes.set_ylabel(f"test {task.quality}{', %' if task.unit else ''}")
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else {})
    plt.close(figure)
