"""The figures of `scripts.report`, as SVG to be placed in the page.

Text, grid and lines have CSS variables as colours, which the page defines for light and dark. matplotlib accepts
only colours, so that each variable is drawn as a colour of its own and replaced in the SVG.
"""

import io
import re
from collections.abc import Iterable, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from scripts.plot_figures import draw_line, log_axis, smooth, time_unit
from scripts.report_runs import PHASES, ReportedRun

COLOURS = 8  # of runs, in the page's style; later runs repeat them with another kind of line
LINES = ("-", "--", ":", "-.")
INK, GRID = "#0e0f01", "#0e0f02"
RUN, PHASE = "#0e0fa%x", "#0e0fb%x"
VARIABLES = {
    INK: "--ink-2",
    GRID: "--grid",
    **{RUN % i: f"--run-{i}" for i in range(COLOURS)},
    **{PHASE % i: f"--phase-{i}" for i in range(len(PHASES))},
}
STYLE = {
    "font.size": 10,
    "text.parse_math": False,  # a name may contain "$"
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "report",  # the same runs give the same file
}
# A figure's name, its title and its SVG.
Drawn = tuple[str, str, str]


def draw_figures(runs: Sequence[ReportedRun]) -> list[Drawn]:
    """The figures that the runs have data for."""
    metric = " / ".join(dict.fromkeys(run.metric for run in runs))
    titles = {
        "epochs": f"{metric} after each epoch",
        "bytes": f"{metric} against bytes sent",
        "time": f"{metric} against training time",
        "loss": "Training loss",
        "traffic": "Bytes per step",
        "phases": "Where the time of a step went",
    }
    with matplotlib.rc_context(STYLE):
        drawn = {
            "epochs": quality_figure(runs, "epochs"),
            "bytes": quality_figure(runs, "bytes"),
            "time": quality_figure(runs, "time"),
            "loss": loss_figure(runs),
            "traffic": traffic_figure(runs),
            "phases": phases_figure(runs),
        }
        return [(name, titles[name], to_svg(figure, name)) for name, figure in drawn.items() if figure is not None]


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element whose ids no other figure of the page has."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue()
    # the metadata has the date
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r'( id="|url\(#|xlink:href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub("|".join(VARIABLES), lambda found: f"var({VARIABLES[found[0]]})", svg)
    return re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)  # the page sets the size


def new_figure(width: float = 4.5, height: float = 3.1) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def look(number: int) -> tuple[str, str]:
    """Colour and kind of line of a run."""
    return RUN % (number % COLOURS), LINES[number // COLOURS % len(LINES)]


def quality_figure(runs: Sequence[ReportedRun], against: str) -> Figure | None:
    """The metric after each epoch. against: "epochs", "bytes" of one rank, or "time" in training steps."""
    figure, axes = new_figure()
    longest = max((run.run.validation.seconds[-1] for run in runs if run.run and run.quality), default=0.0)
    length, unit = time_unit(longest)
    empty = True
    for number, run in enumerate(runs):
        if run.run is None:
            continue
        curve = run.run.validation
        x: Iterable[float] = range(1, len(curve.y) + 1)
        if against != "epochs":
            x = curve.wire if against == "bytes" else [seconds / length for seconds in curve.seconds]
        points = [(a, b) for a, b in zip(x, run.quality, strict=True) if a > 0]
        if points:
            colour, line = look(number)
            at, quality = zip(*points, strict=True)
            draw_line(axes, at, quality, line, color=colour, marker="o")
            empty = False
    labels = {"epochs": "epochs", "bytes": "bytes sent by one rank", "time": f"training time ({unit})"}
    axes.set(xlabel=labels[against], ylabel=common_unit(runs))
    if against == "bytes":
        axes.set_xscale("log")
        log_axis(axes.xaxis, EngFormatter("B"), labels=6)
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=against == "epochs"))
    return None if empty else figure


def common_unit(runs: Sequence[ReportedRun]) -> str:
    """The unit of the metrics; "" if they have none, or not the same."""
    units = {run.unit for run in runs}
    return units.pop() if len(units) == 1 else ""


def loss_figure(runs: Sequence[ReportedRun]) -> Figure | None:
    """The running mean of the training loss, against optimizer steps."""
    losses = [(i, run.run.loss) for i, run in enumerate(runs) if run.run is not None]
    curves = [(i, smooth(loss)) for i, loss in losses if np.isfinite(loss.y).any()]
    figure, axes = new_figure()
    for number, curve in curves:
        colour, line = look(number)
        axes.plot(curve.steps, curve.y, line, color=colour)
    axes.set(xlabel="optimizer steps")
    axes.set_xlim(left=0)
    if all(value > 0 for _, curve in curves for value in curve.y):
        axes.set_yscale("log")
        log_axis(axes.yaxis, "{x:g}", labels=11)
    return figure if curves else None


def traffic_figure(runs: Sequence[ReportedRun]) -> Figure | None:
    """Wire bytes of one rank per step. In grey: the bytes of a dense fp32 all-reduce."""
    figure, axes = new_figure()
    sent = [(i, run.traffic) for i, run in enumerate(runs) if any(wire > 0 for wire in run.traffic.wire)]
    for dense in {dense for _, traffic in sent for dense in traffic.dense[-1:] if dense > 0}:
        axes.axhline(dense, color=INK, linewidth=1.2, linestyle=(0, (2, 2)), zorder=1)
        axes.annotate(
            "dense fp32", (1, dense), xycoords=("axes fraction", "data"), xytext=(0, 3),
            textcoords="offset points", ha="right", fontsize=9,
        )  # fmt: skip
    for number, traffic in sent:
        colour, line = look(number)
        wire = [value if value > 0 else float("nan") for value in traffic.wire]
        axes.plot(traffic.steps, wire, line, color=colour)
    axes.set(xlabel="optimizer steps", yscale="log")
    axes.set_xlim(left=0)
    low, high = axes.get_ylim()
    axes.set_ylim(low / 2, high * 2)  # bytes that hardly change are a level line
    log_axis(axes.yaxis, EngFormatter("B"), labels=11)
    return figure if sent else None


def shortened(names: Sequence[str], most: int = 40) -> list[str]:
    """Names of at most so many characters: long ones without their middle, unless they would then be equal."""
    half = (most - 3) // 2
    short = [name if len(name) <= most else f"{name[:half]} … {name[-half:]}" for name in names]
    return [cut if short.count(cut) == 1 else name for cut, name in zip(short, names, strict=True)]


def phases_figure(runs: Sequence[ReportedRun]) -> Figure | None:
    """One bar per run: the seconds of rank 0 per step, by phase."""
    known = [run for run in runs if run.phases]
    if not known:
        return None
    figure, axes = new_figure(14.5, 0.75 + 0.42 * len(known))
    longest = max(sum(run.phases.values()) for run in known)
    factor, unit = (1e3, "ms") if longest < 1 else (1.0, "s")
    for y, run in enumerate(known):
        left = 0.0
        for i, phase in enumerate(PHASES):
            width = factor * run.phases[phase]
            axes.barh(y, width, left=left, height=0.62, color=PHASE % i, linewidth=0)
            left += width
        axes.annotate(f"{left:.3g} {unit}", (left, y), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(known)), shortened([run.name for run in known]))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(known) - 0.5, -0.5)
    axes.set_xlim(0, 1.08 * factor * longest)
    axes.set_xlabel(f"{unit} per step, rank 0")
    axes.grid(False, axis="y")
    return figure
