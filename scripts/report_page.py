"""The page of `scripts.report`: its tables and notes, which are filled into report_page.html.

All text that comes from runs is escaped.
"""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from dgc_training.logging.formatting import human_bytes
from scripts.report_figures import VARIABLES, common_unit, draw_figures, look
from scripts.report_runs import ABSENT_TEXT, PHASES, ReportedRun, differing_settings

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
# A column: its title, the cell of a run, and the number whose best value is bold (None: unknown).
Column = tuple[str, Callable[[ReportedRun], str], Callable[[ReportedRun], float | None] | None]


def page(runs: Sequence[ReportedRun], warnings: Iterable[str] = ()) -> str:
    """The HTML text. warnings: notes that reading the runs gave."""
    settings = differing_settings(runs) if len(runs) > 1 else []
    drawn = draw_figures(runs)
    title = f"Report of {runs[0].name}" if len(runs) == 1 else f"Report of {len(runs)} runs"
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        subtitle=", ".join(escape(str(run.directory)) for run in runs),
        notes="\n".join(f'<p class="note">{escape(note)}</p>' for note in [*notes(runs, settings), *warnings]),
        results=results_table(runs),
        bold=" Bold: the best of the finished runs." if len(runs) > 1 else "",
        settings=settings_section(runs, settings),
        legend="".join(f"<span>{swatch(i)}{escape(run.name)}</span>" for i, run in enumerate(runs)),
        figures="\n".join(figure(name, title, svg) for name, title, svg in drawn if name != "phases"),
        phases="\n".join(phases_section(svg) for name, _, svg in drawn if name == "phases"),
    )


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


def results_table(runs: Sequence[ReportedRun]) -> str:
    columns: list[Column] = [
        ("ranks", lambda run: str(run.run.ranks) if run.run else ABSENT_TEXT, None),
        ("epochs", epochs, None),
        ("final", lambda run: number(run.final), lambda run: goodness(run, run.final)),
        ("best (epoch)", best, lambda run: goodness(run, run.best and run.best[0])),
        ("bytes per step", bytes_per_step, lambda run: -last(run.traffic.wire)),
        ("bytes in total", total_bytes, lambda run: -(run.wire_bytes or float("nan"))),
        ("time", lambda run: seconds(run.seconds), lambda run: -(run.seconds or float("nan"))),
        ("samples/s", lambda run: f"{run.run.samples_per_second:,.0f}" if run.run else ABSENT_TEXT, None),
    ]
    if any(run.summary.get("dropped_steps") for run in runs):
        columns.append(("dropped steps", lambda run: str(run.summary.get("dropped_steps", ABSENT_TEXT)), None))
    metrics = dict.fromkeys(run.metric for run in runs)
    metric = " / ".join(metrics)
    unit = f" ({unit})" if (unit := common_unit(runs)) else ""
    of_metric = ("final", "best (epoch)")
    head = "".join(
        f"<th>{escape(metric)},<br>{title}{unit}</th>" if title in of_metric else f"<th>{title}</th>"
        for title, _, _ in columns
    )
    rows = []
    for i, run in enumerate(runs):
        cells = ""
        for title, cell, rank in columns:
            comparable = title not in of_metric or len(metrics) == 1
            strong = rank is not None and comparable and is_best(run, runs, rank)
            cells += f"<td>{f'<b>{cell(run)}</b>' if strong else cell(run)}</td>"
        rows.append(f"<tr><th>{swatch(i)}{escape(run.name)}</th>{cells}</tr>")
    return f"<table><thead><tr><th>run</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def goodness(run: ReportedRun, value: float | None) -> float | None:
    """A value of the metric, with the sign with which more is better."""
    return -value if value is not None and run.lower_is_better else value


def is_best(run: ReportedRun, runs: Sequence[ReportedRun], rank: Callable[[ReportedRun], float | None]) -> bool:
    """Whether a finished run has the largest value of the finished runs, and not all have the same."""
    known = [value for other in runs if other.summary and (value := rank(other)) is not None and value == value]
    return bool(run.summary) and len(set(known)) > 1 and rank(run) == max(known)


def epochs(run: ReportedRun) -> str:
    if run.summary or run.planned_epochs is None:
        return str(run.epochs)
    return f'{run.epochs} of {run.planned_epochs}<span class="small">unfinished</span>'


def best(run: ReportedRun) -> str:
    return ABSENT_TEXT if run.best is None else f"{run.best[0]:.2f} ({run.best[1]})"


def bytes_per_step(run: ReportedRun) -> str:
    return sent(last(run.traffic.wire), last(run.traffic.dense))


def total_bytes(run: ReportedRun) -> str:
    return sent(run.wire_bytes, run.dense_wire_bytes)


def sent(wire: float | None, dense: float | None) -> str:
    """Bytes, and below them how they compare with dense ones."""
    if wire is None or wire != wire:
        return ABSENT_TEXT
    if not (dense and dense > 0 and wire > 0):
        return human_bytes(wire)
    ratio = "as dense" if 0.95 < wire / dense < 1.05 else f"{wire / dense:.2g}× dense"
    if wire / dense <= 0.95:
        ratio = f"{dense / wire:.3g}× fewer"
    return f'{human_bytes(wire)}<span class="small">({ratio})</span>'


def last(values: Sequence[float]) -> float:
    return values[-1] if values else float("nan")


def number(value: float | None) -> str:
    return ABSENT_TEXT if value is None else f"{value:.2f}"


def seconds(value: float | None) -> str:
    """90 -> 1 min 30 s."""
    if value is None:
        return ABSENT_TEXT
    if value < 60:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def settings_section(runs: Sequence[ReportedRun], settings: Sequence[tuple[str, list[str]]]) -> str:
    if len(runs) < 2:
        return ""
    if not settings:
        return "<h2>Settings</h2><p>The configs of the runs are equal.</p>"
    cells = [["<th></th>", *(f"<th>{swatch(i)}{escape(run.name)}</th>" for i, run in enumerate(runs))]]
    for key, values in settings:
        cells.append([f'<th class="key">{escape(key)}</th>', *(f"<td>{escape(value)}</td>" for value in values)])
    if len(runs) > WIDEST:
        cells = [list(column) for column in zip(*cells, strict=True)]
    head, *rows = ["<tr>" + "".join(row) + "</tr>" for row in cells]
    table = f'<table class="settings"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<h2>Settings that differ</h2><div class="card scroll">{table}</div>'


def swatch(i: int) -> str:
    """The colour and line of run i in the figures."""
    colour, line = look(i)
    return f'<span class="swatch" style="border-top: 4px {BORDERS[line]} var({VARIABLES[colour]})"></span>'


def figure(name: str, title: str, svg: str) -> str:
    return f'<figure class="card" id="{name}"><figcaption>{escape(title)}</figcaption>{svg}</figure>'


def phases_section(svg: str) -> str:
    legend = "".join(
        f'<span><span class="block" style="background: var(--phase-{i})"></span>{MEANINGS[phase]} ({phase})</span>'
        for i, phase in enumerate(PHASES)
    )
    return (
        '<h2>Where the time of a step went</h2><figure class="card wide" id="phases">'
        f'<div class="legend">{legend}</div>{svg}</figure>'
    )
