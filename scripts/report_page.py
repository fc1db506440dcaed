"""The page of `scripts.report`: its tables and notes, which are filled into report_page.html.

Elements are made by `tag` alone, which escapes whatever is not `Markup`. So no value of a run can become markup.
"""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from dgc_training.logging.formatting import human_bytes
from scripts.report_figures import VARIABLES, common_unit, draw_figures, look
from scripts.report_runs import ABSENT_TEXT, PHASES, ReportedRun, differing_settings
from scripts.run_files import printable

TEMPLATE = Path(__file__).with_name("report_page.html")
MEANINGS = {
    "data": "waiting for data",
    "forward_backward": "forward and backward",
    "compress": "compressing",
    "launch": "handing messages over",
    "wait": "waiting for other ranks",
    "decode": "work after the last reply",
    "step": "the optimizer's step",
    "other": "anything else",
}
WIDEST = 5  # runs that have a column each in the table of settings; more runs have a row each
BORDERS = {"-": "solid", "--": "dashed", ":": "dotted", "-.": "double"}


class Markup(str):
    """Text that is HTML already."""


def markup(*parts: object) -> Markup:
    """The parts one after the other. What is not Markup is shown as it is."""
    return Markup("".join(part if isinstance(part, Markup) else escape(printable(part)) for part in parts))


def tag(name: str, *parts: object, **attributes: object) -> Markup:
    """An element with these parts. `class_` gives the attribute class."""
    given = "".join(f' {key.rstrip("_")}="{markup(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{given}>{markup(*parts)}</{name}>")


BREAK = Markup("<br>")
# A column: its title, the cell of a run, and the number whose best value is bold (None: unknown).
Column = tuple[str, Callable[[ReportedRun], object], Callable[[ReportedRun], float | None] | None]


def page(runs: Sequence[ReportedRun], warnings: Iterable[str] = ()) -> str:
    """The HTML text. warnings: notes that reading the runs gave."""
    settings = differing_settings(runs) if len(runs) > 1 else []
    drawn = draw_figures(runs)
    title = f"Report of {runs[0].name}" if len(runs) == 1 else f"Report of {len(runs)} runs"
    parts = {
        "title": title,
        "subtitle": ", ".join(str(run.directory) for run in runs),
        "notes": markup(*(tag("p", note, class_="note") for note in [*notes(runs, settings), *warnings])),
        "results": results_table(runs),
        "bold": " Bold: the best of the finished runs." if len(runs) > 1 else "",
        "settings": settings_section(runs, settings),
        "legend": markup(*(tag("span", swatch(i), run.name) for i, run in enumerate(runs))),
        "figures": markup(*(figure(name, title, svg) for name, title, svg in drawn if name != "phases")),
        "phases": markup(*(phases_section(svg) for name, _, svg in drawn if name == "phases")),
    }
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute({name: markup(part) for name, part in parts.items()})


def notes(runs: Sequence[ReportedRun], settings: Sequence[tuple[str, list[str]]]) -> list[str]:
    """What a reader must know before comparing the runs."""
    found = []
    for run in runs:
        of = f" of {run.planned_epochs}" if run.planned_epochs else ""
        if run.run is None:
            found.append(f"{run.name} has not logged a step yet.")
        elif not run.summary:
            found.append(
                f"{run.name} is unfinished: it has no summary.json. It is shown after {run.epochs}{of} epochs."
            )
        if run.run is not None and not run.phases:
            found.append(f"{run.name} has no log of where the time of a step went.")
    if unlike := [key for key, _ in settings if key.split(".")[0] in ("dataset", "model")]:
        found.append(f"The runs have different models or data ({', '.join(unlike)}): do not compare their curves.")
    if len({run.metric for run in runs if run.run}) > 1:
        found.append("The runs have different metrics (train.metric): do not compare them.")
    return found


def results_table(runs: Sequence[ReportedRun]) -> Markup:
    columns: list[Column] = [
        ("ranks", lambda run: run.run.ranks if run.run else ABSENT_TEXT, None),
        ("epochs", epochs, None),
        ("final", lambda run: number(run.final), lambda run: goodness(run, run.final)),
        ("best (epoch)", best, lambda run: goodness(run, run.best and run.best[0])),
        ("bytes per step", bytes_per_step, lambda run: -last(run.traffic.wire)),
        ("bytes in total", total_bytes, lambda run: -(run.wire_bytes or float("nan"))),
        ("time", lambda run: seconds(run.seconds), lambda run: -(run.seconds or float("nan"))),
        ("samples/s", samples_per_second, None),
    ]
    if any(run.summary.get("dropped_steps") for run in runs):
        columns.append(("dropped steps", lambda run: run.summary.get("dropped_steps", ABSENT_TEXT), None))
    metrics = dict.fromkeys(run.metric for run in runs)
    unit = f" ({unit})" if (unit := common_unit(runs)) else ""
    of_metric = ("final", "best (epoch)")
    head = [
        tag("th", " / ".join(metrics), ",", BREAK, title, unit) if title in of_metric else tag("th", title)
        for title, _, _ in columns
    ]
    rows = []
    for i, run in enumerate(runs):
        cells = []
        for title, cell, rank in columns:
            comparable = title not in of_metric or len(metrics) == 1
            strong = rank is not None and comparable and is_best(run, runs, rank)
            cells.append(tag("td", tag("b", cell(run)) if strong else cell(run)))
        rows.append(tag("tr", tag("th", swatch(i), run.name), *cells))
    return tag("table", tag("thead", tag("tr", tag("th", "run"), *head)), tag("tbody", *rows))


def goodness(run: ReportedRun, value: float | None) -> float | None:
    """A value of the metric, with the sign with which more is better."""
    return -value if value is not None and run.lower_is_better else value


def is_best(run: ReportedRun, runs: Sequence[ReportedRun], rank: Callable[[ReportedRun], float | None]) -> bool:
    """Whether a finished run has the largest value of the finished runs, and not all have the same."""
    known = [value for other in runs if other.summary and (value := rank(other)) is not None and value == value]
    return bool(run.summary) and len(set(known)) > 1 and rank(run) == max(known)


def epochs(run: ReportedRun) -> object:
    if run.summary or run.planned_epochs is None:
        return run.epochs
    return markup(f"{run.epochs} of {run.planned_epochs}", tag("span", "unfinished", class_="small"))


def best(run: ReportedRun) -> str:
    return ABSENT_TEXT if run.best is None else f"{number(run.best[0])} ({run.best[1]})"


def samples_per_second(run: ReportedRun) -> str:
    rate = run.run.samples_per_second if run.run else float("nan")
    return f"{rate:,.0f}" if rate == rate else ABSENT_TEXT


def bytes_per_step(run: ReportedRun) -> object:
    return sent(last(run.traffic.wire), last(run.traffic.dense))


def total_bytes(run: ReportedRun) -> object:
    return sent(run.wire_bytes, run.dense_wire_bytes)


def sent(wire: float | None, dense: float | None) -> Markup:
    """Bytes, and below them how they compare with dense ones."""
    if wire is None or wire != wire:
        return markup(ABSENT_TEXT)
    if not (dense and dense > 0 and wire > 0):
        return markup(human_bytes(wire))
    ratio = "as dense" if 0.95 < wire / dense < 1.05 else f"{wire / dense:.2g}× dense"
    if wire / dense <= 0.95:
        ratio = f"{dense / wire:.3g}× fewer"
    return markup(human_bytes(wire), tag("span", f"({ratio})", class_="small"))


def last(values: Sequence[float]) -> float:
    return values[-1] if values else float("nan")


def number(value: float | None) -> str:
    return ABSENT_TEXT if value is None else f"{value:.2f}" if abs(value) < 1e9 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """90 -> 1 min 30 s."""
    if value is None:
        return ABSENT_TEXT
    if value < 60:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def settings_section(runs: Sequence[ReportedRun], settings: Sequence[tuple[str, list[str]]]) -> Markup:
    if len(runs) < 2:
        return Markup()
    if not settings:
        return markup(tag("h2", "Settings"), tag("p", "The configs of the runs are equal."))
    cells = [[tag("th"), *(tag("th", swatch(i), run.name) for i, run in enumerate(runs))]]
    for key, values in settings:
        cells.append([tag("th", key, class_="key"), *(tag("td", value) for value in values)])
    if len(runs) > WIDEST:
        cells = [list(column) for column in zip(*cells, strict=True)]
    head, *rows = [tag("tr", *row) for row in cells]
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="settings")
    return markup(tag("h2", "Settings that differ"), tag("div", table, class_="card scroll"))


def swatch(i: int) -> Markup:
    """The colour and line of run i in the figures."""
    colour, line = look(i)
    return tag("span", class_="swatch", style=f"border-top: 4px {BORDERS[line]} var({VARIABLES[colour]})")


def figure(name: str, title: str, svg: str) -> Markup:
    """svg: drawn by matplotlib, which escapes its texts."""
    return tag("figure", tag("figcaption", title), Markup(svg), class_="card", id=name)


def phases_section(svg: str) -> Markup:
    blocks = [tag("span", class_="block", style=f"background: var(--phase-{i})") for i in range(len(PHASES))]
    texts = [f"{MEANINGS[phase]} ({phase})" for phase in PHASES]
    legend = [tag("span", block, text) for block, text in zip(blocks, texts, strict=True)]
    drawn = tag("figure", tag("div", *legend, class_="legend"), Markup(svg), class_="card wide", id="phases")
    return markup(tag("h2", "Where the time of a step went"), drawn)
