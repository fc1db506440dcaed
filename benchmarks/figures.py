"""What `benchmarks.exchange` or `benchmarks.train_step` measured at several rates, as a figure.

    python -m benchmarks.exchange --hosts 4 --rate 100mbit 1gbit 10gbit --methods ... > measured.txt
    python -m benchmarks.figures measured.txt figure.svg

Left: how many times faster than the fastest 16-bit dense method each method is, against the rate that one TCP
connection reached. Above 1 it pays. The numbers and the crossing points are printed. Right: where the time of a
step went at the lowest rate, as the mean over ranks: computing messages, waiting
for replies, decoding, updating parameters, and the rest. Other benchmarks take their axes from here.
"""

import json
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks._harness import options

TAKES = "5 s"
OPPONENTS = ("fp16", "bf16", "horovod-fp16", "ddp-fp16")
PHASES = {"compress": "compress", "launch": "launch", "wait": "wait", "decode": "decode", "step": "update"}
NOT_SHOWN = ("noop", "ddp-noop", "update")
Lines = list[dict[str, Any]]


def axes_of(name: str, size: tuple[float, float], columns: int = 1, **more: Any) -> tuple[Any, Any]:
    """A figure of this size in inches, and its axes, one or several. Equal calls give equal files."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}
    figure, axes = plt.subplots(1, columns, figsize=size, layout="constrained", **more)
    return figure, axes


def write(figure: Any, file: Path, title: str = "") -> None:
    """Write a figure in the format that the file's extension names."""
    import matplotlib.pyplot as plt

    figure.suptitle(title, fontsize=9)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else {})
    plt.close(figure)


def read_lines(path: Path) -> Lines:
    """The lines of JSON in a file with the output of a benchmark, by rising rate."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    found = sorted((line for line in lines if line.get("network")), key=rate)
    if not found:
        raise ValueError(f"{path}: no line of a benchmark with --hosts")
    kinds = {(line["benchmark"], line["model"], line["ranks"]) for line in found}
    if len(kinds) > 1:
        raise ValueError(f"{path}: lines of different models or numbers of ranks: {sorted(kinds)}")
    return found


def rate(line: dict[str, Any]) -> float:
    """Mbit/s that one TCP connection reached."""
    return float(line["network"]["bits_per_second"] / 1e6)


def speed_ups(lines: Lines) -> dict[str, list[tuple[float, float]]]:
    """By method, (Mbit/s, times faster than the fastest 16-bit dense method)."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        rows, key = line["methods"], "exchange_ms" if line["benchmark"] == "exchange" else "step_ms"
        best = min(rows[name][key] for name in OPPONENTS if name in rows)
        for name, row in rows.items():
            if name not in NOT_SHOWN:
                found.setdefault(name, []).append((rate(line), best / row[key]))
    return found


def crossing(points: list[tuple[float, float]]) -> float | None:
    """The rate at which a method stops to pay, between two measured rates. None: it does not cross 1 once."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 > 1 >= y1:
            share = log(y0) / (log(y0) - log(y1))
            return exp(log(x0) + share * (log(x1) - log(x0)))
    return None


def draw_exchange(lines: Lines, file: Path) -> None:
    figure, (left, right) = axes_of("exchange", (10, 4), 2)
    for name, of in speed_ups(lines).items():
        left.plot(*zip(*of, strict=True), ".-", linewidth=1, label=name)
    left.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    left.set(xscale="log", yscale="log", xlabel="Mbit/s of one TCP connection")
    left.set_ylabel("times faster than the fastest 16-bit dense method")
    line = lines[0]
    rows = {name: row for name, row in line["methods"].items() if name not in NOT_SHOWN}
    ends = dict.fromkeys(rows, 0.0)
    for phase, label in PHASES.items():
        widths = [row["phases_ms"][phase] for row in rows.values()]
        right.barh(list(rows), widths, left=list(ends.values()), label=label)
        ends = {name: ends[name] + width for name, width in zip(rows, widths, strict=True)}
    rest = [max(0.0, row["step_ms"] - ends[name]) for name, row in rows.items()]
    right.barh(list(rows), rest, left=list(ends.values()), color="lightgray", label="rest")
    right.invert_yaxis()
    right.set_xlabel(f"ms of a step at {rate(line):.0f} Mbit/s")
    for axes in (left, right):
        axes.legend(fontsize=7, frameon=False)
    write(figure, file, f"{line['model']}, {line['ranks']} ranks on {line['network']['hosts']} hosts")


def main() -> None:
    parser = options("benchmarks.figures", __doc__)
    parser.add_argument("measured", type=Path)
    parser.add_argument("figure", type=Path, help="its extension names the format")
    args = parser.parse_args()
    try:
        lines = read_lines(args.measured)
    except ValueError as error:
        parser.error(str(error))
    draw_exchange(lines, args.figure)
    for name, of in speed_ups(lines).items():
        ends = ", ".join(f"{times:.2f} at {mbit:.0f} Mbit/s" for mbit, times in of)
        crossed = crossing(of)
        print(f"{name:<24}{ends}" + (f"; pays below {crossed:.0f} Mbit/s" if crossed else ""))


if __name__ == "__main__":
    main()
