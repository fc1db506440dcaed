"""The figures of `scripts.plot`: error against time and iterations, metric against bytes, scaling, loss against
steps. In all figures the colour shows the method, and the marker or the line style shows the number of ranks.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, Formatter, MaxNLocator, NullLocator

from dgc_training.logging.formatting import plural
from scripts.plot_runs import Curve, Run, mean

FAMILIES = ((r"ar\b|all-?reduce", "Reds"), (r"d-?psgd", "Greens"), (r"o?sgp", "Blues"))
# matplotlib's default cycle without its blue, green and red, which could be mistaken for a method above
OTHERS = ("C1", "C4", "C5", "C6", "C8", "C9", "C7")
MARKERS = "osD^vP*X"
LINES = ("-", "--", "-.", ":")
STYLE = {
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "savefig.dpi": 160,
}


def names(runs: Sequence[Run]) -> list[str]:
    """The name of each run in the legend: the shortest one that distinguishes the runs."""
    found = [run.label for run in runs]
    if len({run.ranks for run in runs}) > 1:
        found = [f"{run.label}, {plural(run.ranks, 'rank')}" for run in runs]
    for parts in (1, 2, 3):  # of the path: a folder of runs may have one of the same name
        ends = ["/".join(run.directory.resolve().parts[-parts:]) for run in runs]
        told = [
            f"{name} ({end})" if found.count(name) > 1 else name for name, end in zip(found, ends, strict=True)
        ]
        if len({*told}) == len({(name, run.directory.resolve()) for name, run in zip(found, runs, strict=True)}):
            break
    return told


def methods(runs: Sequence[Run]) -> list[tuple[str, int]]:
    """The key of each run's colour: its label. Runs of one label and number of ranks are numbered from 0."""
    kinds = [(run.label, run.ranks) for run in runs]
    return [(label, kinds[:i].count((label, ranks))) for i, (label, ranks) in enumerate(kinds)]


def colours(methods: Sequence[tuple[str, int]]) -> list[Any]:
    """Colours: AR red, D-PSGD green, SGP blue, each from dark to light. Every other method has its own colour."""
    distinct = list(dict.fromkeys(methods))
    families = {
        method: next((shades for pattern, shades in FAMILIES if re.match(pattern, method[0].lower())), None)
        for method in distinct
    }
    found: dict[tuple[str, int], Any] = {}
    for method, family in families.items():
        of = [other for other in distinct if families[other] == family]
        number = of.index(method)
        if family is None:
            found[method] = OTHERS[number % len(OTHERS)]
        else:
            shade = 0.75 if len(of) == 1 else 0.95 - 0.5 * number / (len(of) - 1)
            found[method] = matplotlib.colormaps[family](shade)
    return [found[method] for method in methods]


def of_ranks(runs: Sequence[Run], kinds: Sequence[str]) -> list[str]:
    """Selects one of `kinds` for each run, by its number of ranks."""
    counts = sorted({run.ranks for run in runs})
    return [kinds[counts.index(run.ranks) % len(kinds)] for run in runs]


def figure(width: float, panels: int) -> tuple[Figure, list[Axes]]:
    drawn = Figure(figsize=(width, 4.2), layout="constrained")
    engine = drawn.get_layout_engine()
    assert engine is not None
    engine.set(w_pad=0.08, h_pad=0.08)  # type: ignore[call-arg]  # inches
    return drawn, list(np.atleast_1d(drawn.subplots(1, panels)))


def draw_line(axes: Axes, x: Sequence[float], y: Sequence[float], line: str, **style: Any) -> None:
    """Draws a line with at most 20 markers, which are not clipped at the edge of the axes."""
    (drawn,) = axes.plot(x, y, line, markevery=1 + len(x) // 20, clip_on=False, **style)
    drawn.set_in_layout(False)  # unclipped markers would otherwise change the margins of the figure


def log_axis(axis: Axis, formatter: Formatter | str, labels: int) -> None:
    """At most so many labels: at 1, 2 and 5 of every decade, at 1 only, or at round numbers of a short range."""
    low, high = sorted(axis.get_view_interval())
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**e for e in exponents for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    if len(ticks) > labels:
        decades = [10.0**e for e in exponents if low <= 10.0**e <= high]
        ticks = decades[:: math.ceil(len(decades) / labels)]
    elif len(ticks) < 2:
        ticks = [tick for tick in MaxNLocator(3).tick_values(low, high) if low <= tick <= high]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(formatter)
    axis.set_minor_locator(NullLocator())


def legend(drawn: Figure, handles: list[Any]) -> None:
    # as many columns as fit with the longest label
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), int(drawn.get_figwidth() * 12 / (longest + 7))))
    rows = -(-len(handles) // columns)
    drawn.legend(handles=handles, loc="outside lower center", ncols=-(-len(handles) // rows), frameon=False)


def time_unit(longest: float) -> tuple[float, str]:
    """The time unit that suits `longest` seconds: its length in seconds and its name."""
    for seconds, unit in ((3600.0, "hours"), (60.0, "minutes")):
        if longest >= 3 * seconds:
            return seconds, unit
    return 1.0, "seconds"


def metric_label(run: Run) -> str:
    """The metric with its unit."""
    name = "top-1 accuracy" if run.is_top1 else run.metric
    return f"{name} (%)" if run.unit else name


def error_figure(runs: Sequence[Run]) -> Figure | None:
    """Error after each epoch, against time and against iterations; None if no run has completed an epoch.

    The error is 100 % less an accuracy. Any other metric is drawn as it is.
    """
    curves = [curve for run in runs for curve in (run.training, run.validation)]
    if not any(curve.y for curve in curves):
        return None
    drawn, (by_time, by_step) = figure(10, 2)
    seconds, unit = time_unit(max(curve.seconds[-1] for curve in curves if curve.y))
    handles: list[Any] = []
    drawn_as = zip(runs, names(runs), colours(methods(runs)), of_ranks(runs, MARKERS), strict=True)
    for run, name, colour, marker in drawn_as:
        for curve, line, fill in ((run.training, "--", "none"), (run.validation, "-", "full")):
            error = [100 - y for y in curve.y] if run.unit else curve.y
            for axes, x in ((by_time, [s / seconds for s in curve.seconds]), (by_step, curve.steps)):
                draw_line(axes, x, error, line, color=colour, marker=marker, fillstyle=fill, alpha=0.9)
        handles.append(Line2D([], [], color=colour, marker=marker, label=name))
    handles.append(Line2D([], [], color="0.4", linestyle="-", label="validation"))
    if any(run.training.y for run in runs):
        handles.append(Line2D([], [], color="0.4", linestyle="--", label="training"))
    label = metric_label(runs[0])
    if runs[0].unit:
        label = "top-1 error (%)" if runs[0].is_top1 else f"100 % - {label}"
    by_time.set(xlabel=f"training time ({unit})", ylabel=label)
    by_step.set(xlabel="iterations", ylabel=label)
    for axes in (by_time, by_step):
        axes.set_xlim(left=0)
        if runs[0].unit:
            axes.set_ylim(bottom=0)
    legend(drawn, handles)
    return drawn


def bytes_figure(runs: Sequence[Run]) -> Figure | None:
    """The metric after each epoch against the bytes that one rank has sent; None if no run has sent any."""
    if not any(wire > 0 for run in runs for wire in run.validation.wire):
        return None
    drawn, (axes,) = figure(7, 1)
    handles: list[Any] = []
    for run, name, colour, marker in zip(
        runs, names(runs), colours(methods(runs)), of_ranks(runs, MARKERS), strict=True
    ):
        points = [(wire, y) for wire, y in zip(run.validation.wire, run.validation.y, strict=True) if wire > 0]
        if points:
            wire, metric = zip(*points, strict=True)
            draw_line(axes, wire, metric, "-", color=colour, marker=marker)
            handles.append(Line2D([], [], color=colour, marker=marker, label=name))
    axes.set(xlabel="bytes sent by one rank", ylabel=f"{metric_label(runs[0])}, validation", xscale="log")
    log_axis(axes.xaxis, EngFormatter("B"), labels=9)
    legend(drawn, handles)
    return drawn


def scaling_figure(runs: Sequence[Run]) -> Figure:
    """Time per iteration and throughput against the number of ranks, with one line per label.

    Runs with the same label and number of ranks are averaged.
    """
    drawn, (times, rates) = figure(10, 2)
    labels = sorted({run.label for run in runs})
    counts = sorted({run.ranks for run in runs})
    # milliseconds if the numbers are then more readable
    factor, unit = (1e3, "ms") if max(run.seconds_per_step for run in runs) < 1 else (1.0, "s")
    handles: list[Any] = []
    for label, colour in zip(labels, colours([(label, 0) for label in labels]), strict=True):
        marker = MARKERS[len(handles) % len(MARKERS)]
        values: tuple[Callable[[Run], float], ...] = (
            lambda run: factor * run.seconds_per_step,
            lambda run: run.samples_per_second,
        )
        ranks = [n for n in counts if any(run.ranks == n and run.label == label for run in runs)]
        for axes, value in zip((times, rates), values, strict=True):
            y = [mean(value(run) for run in runs if run.label == label and run.ranks == n) for n in ranks]
            draw_line(axes, ranks, y, "-", color=colour, marker=marker)
        handles.append(Line2D([], [], color=colour, marker=marker, label=label))
    if len(counts) > 1:
        first = max((run for run in runs if run.ranks == counts[0]), key=lambda run: run.samples_per_second)
        ideal = [first.samples_per_second * n / counts[0] for n in counts]
        rates.plot(counts, ideal, ":", color="0.5", linewidth=1.2, zorder=1)
        handles.append(Line2D([], [], color="0.5", linestyle=":", label="linear"))
    times.set(xlabel="ranks", ylabel=f"time per iteration ({unit})")
    rates.set(xlabel="ranks", ylabel="throughput (samples/s)")
    for axes in (times, rates):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(counts[0] / 1.25, counts[-1] * 1.25)
        axes.set_ylim(bottom=0)
    legend(drawn, handles)
    return drawn


def smooth(curve: Curve) -> Curve:
    """Running mean over a fiftieth of the curve."""
    half = len(curve.y) // 100
    y = np.asarray(curve.y)
    means = [float(y[max(0, i - half) : i + half + 1].mean()) for i in range(len(y))]
    return Curve(curve.steps, curve.seconds, curve.wire, means)


def loss_figure(runs: Sequence[Run]) -> Figure | None:
    """The training loss against steps: the rows in the background, their running mean in front."""
    if not any(np.isfinite(run.loss.y).any() for run in runs):
        return None
    drawn, (axes,) = figure(7, 1)
    handles: list[Any] = []
    drawn_as = zip(runs, names(runs), colours(methods(runs)), of_ranks(runs, LINES), strict=True)
    for run, name, colour, style in drawn_as:
        axes.plot(run.loss.steps, run.loss.y, color=colour, linewidth=0.8, alpha=0.25, zorder=1)
        line = smooth(run.loss)
        handles += axes.plot(line.steps, line.y, style, color=colour, label=name)
    axes.set(xlabel="optimizer steps", ylabel="training loss")
    axes.set_xlim(left=0)
    legend(drawn, handles)
    return drawn
