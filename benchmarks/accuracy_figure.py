"""The figure of docs/results.md: accuracy against bytes, for the methods of the table in docs/results.md.

    python -m benchmarks.accuracy_figure [FILE]

The table "Which method keeps the accuracy" is the only source of the numbers. The figure shows some methods of
each family. Vertical lines are standard errors of the difference to dense.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

DOCS = Path(__file__).parent.parent / "docs"
FIGURE = DOCS / "accuracy.svg"
BLACK, RED, BLUE, GREEN, GRAY = "black", "tab:red", "tab:blue", "tab:green", "dimgray"
# method: color, and offset of its label from the point, in points
SHOWN = {
    "dense": (BLACK, (5, 5)),
    "natural": (GRAY, (5, -10)),
    "qsgd": (GRAY, (-5, 5)),
    "random-block": (GRAY, (5, -10)),
    "terngrad": (GRAY, (-5, 5)),
    "2bit": (GREEN, (-5, 5)),
    "2bit-adaptive": (GREEN, (-5, -10)),
    "onebit": (GRAY, (-5, 5)),
    "signum": (GRAY, (5, 5)),
    "topk": (GRAY, (-5, -10)),
    "dgc": (RED, (5, -10)),
    "powersgd-4": (BLUE, (5, -2)),
    "powersgd-adaptive": (BLUE, (5, 5)),
    "powersgd-2": (BLUE, (5, -10)),
    "powersgd-1": (BLUE, (5, -10)),
    "powersgd-2-fp16": (BLUE, (2, 6)),
}


@dataclass(frozen=True)
class Point:
    """One row of the table."""

    method: str
    accuracy: float  # percent, mean over folds
    error: float  # standard error of the difference to dense, in points
    saved: float  # dense wire bytes / wire bytes


def points(text: str) -> list[Point]:
    """Read the rows of the table."""
    section = text.split("## Which method keeps the accuracy\n")[1].split("\n## ")[0]
    found = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith("`"):
            found.append(Point(cells[0].strip("`"), float(cells[1]), float(cells[3] or 0), float(cells[4])))
    return found


def shown(text: str) -> list[Point]:
    """The rows that the figure shows."""
    return [point for point in points(text) if point.method in SHOWN]


def draw(chosen: list[Point], file: Path) -> None:
    """Draw the points as an SVG file."""
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "accuracy", "svg.fonttype": "none", "font.size": 9}
    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    dense = next(point.accuracy for point in chosen if point.method == "dense")
    axes.axhline(dense, color="black", linewidth=0.8, linestyle=":")
    for point in chosen:
        color, place = SHOWN[point.method]
        x, y = point.saved, point.accuracy
        axes.errorbar(x, y, point.error, fmt="o", color=color, markersize=5, elinewidth=0.6)
        side = "left" if place[0] > 0 else "right"
        axes.annotate(
            point.method, (x, y), xytext=place, textcoords="offset points", fontsize=8, color=color, ha=side
        )
    axes.set_xscale("log")
    axes.set_xlim(0.8, 250)
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axes.set_xlabel("times fewer wire bytes than dense fp32, whole run")
    axes.set_ylabel("test accuracy, %")
    axes.set_title("Handwritten digits, 4 ranks, 5 folds, the same steps for every method", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, format="svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURE
    chosen = shown((DOCS / "results.md").read_text())
    draw(chosen, file)
    print(f"drew {len(chosen)} methods: {file}")


if __name__ == "__main__":
    main()
