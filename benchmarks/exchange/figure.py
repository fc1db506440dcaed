"""Draws what `benchmarks.exchange` or `benchmarks.train_step` measured at several rates.

    python -m benchmarks.exchange --hosts 4 --rate 100mbit 1gbit 10gbit --methods ... > measured.txt
    python -m benchmarks.exchange.figure measured.txt exchange.svg

Left: how many times faster than the fastest 16-bit dense method each method is, against the rate that one TCP
connection reached. Above 1 it pays. The crossing points are printed. Right: where the time of a step went at one
rate (--at, in Mbit/s; default: the lowest), as the mean over ranks: computing messages, waiting for replies,
decoding, updating parameters, and the rest.
"""

import argparse
import json
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

import matplotlib

OPPONENTS = ("fp16", "bf16", "horovod-fp16", "ddp-fp16", "ddp-bf16")
PHASES = {"compress": "compress", "launch": "launch", "wait": "wait", "decode": "decode", "step": "update"}
NOT_SHOWN = ("noop", "ddp-noop", "update")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of JSON in a file with the output of the benchmark, by rising rate.

    Raises:
        ValueError: There is none with a network, or they are of different models or numbers of ranks.
    """
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


def key_of(line: dict[str, Any]) -> str:
    return "exchange_ms" if line["benchmark"] == "exchange" else "step_ms"


def speed_ups(lines: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """By method, (Mbit/s, times faster than the fastest 16-bit dense method)."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        rows, key = line["methods"], key_of(line)
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


def draw(lines: list[dict[str, Any]], at: float | None, file: Path) -> None:
    """Draw both parts."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "exchange", "svg.fonttype": "none", "font.size": 9}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, points in speed_ups(lines).items():
        left.plot(*zip(*points, strict=True), ".-", linewidth=1, label=name)
    left.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("Mbit/s of one TCP connection")
    left.set_ylabel("times faster than the fastest 16-bit dense method")
    left.legend(fontsize=7, frameon=False)
    line = min(lines, key=lambda line: abs(log(rate(line)) - log(at))) if at else lines[0]
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
    right.legend(fontsize=7, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{line['model']}, {line['ranks']} ranks on {line['network']['hosts']} hosts", fontsize=9)
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else {})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("figure", type=Path, help="its extension names the format")
    parser.add_argument("--at", type=float, metavar="MBIT", help="rate of the right part")
    args = parser.parse_args()
    try:
        lines = read_lines(args.measured)
    except ValueError as error:
        parser.error(str(error))
    draw(lines, args.at, args.figure)
    for name, points in speed_ups(lines).items():
        ends = ", ".join(f"{times:.2f} at {mbit:.0f} Mbit/s" for mbit, times in points)
        crossed = crossing(points)
        print(f"{name:<24}{ends}" + (f"; pays below {crossed:.0f} Mbit/s" if crossed else ""))


if __name__ == "__main__":
    main()
