"""Draws the pictures of measurements in docs/, each from a table of a page.

    python -m tools.docs.pictures [NAME ...]

The tables are the only source of the numbers, also of those in the titles. The files have colours for a light and
a dark background, and are the same on every machine.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import log
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
WIDTH = 660
STYLE = """
  .page { fill: #ffffff; }
  text { font-family: Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-size: 21px; font-weight: bold; }
  .note { font-size: 15px; fill: #59636e; }
  .text { font-size: 16px; }
  .strong { font-size: 16px; font-weight: bold; }
  .label { font-size: 15px; }
  .bar { fill: #3f51b5; }
  .base { fill: #98a1ab; }
  .grid { stroke: #d7dce1; stroke-width: 1; fill: none; }
  .axis { stroke: #59636e; stroke-width: 1.2; fill: none; }
  .zero { stroke: #59636e; stroke-width: 1.2; stroke-dasharray: 4 4; fill: none; }
  .gray { fill: #59636e; stroke: #59636e; }
  .blue { fill: #2f5fc4; stroke: #2f5fc4; }
  .red { fill: #c62828; stroke: #c62828; }
  .green { fill: #2e7d32; stroke: #2e7d32; }
  .orange { fill: #ad5a00; stroke: #ad5a00; }
  .violet { fill: #7b3fa0; stroke: #7b3fa0; }
  text.gray, text.blue, text.red, text.green, text.orange, text.violet { stroke: none; }
  path.gray, path.blue, path.red, path.green, path.orange, path.violet { fill: none; stroke-width: 2.2; }
  path.error { stroke-width: 1; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #16181d; }
    text { fill: #e6e8eb; }
    .note { fill: #a5adb6; }
    .bar { fill: #8c9eff; }
    .base { fill: #6b747d; }
    .grid { stroke: #343a41; }
    .axis, .zero { stroke: #a5adb6; }
    .gray { fill: #a5adb6; stroke: #a5adb6; }
    .blue { fill: #82aaff; stroke: #82aaff; }
    .red { fill: #ff8a80; stroke: #ff8a80; }
    .green { fill: #81c784; stroke: #81c784; }
    .orange { fill: #ffb74d; stroke: #ffb74d; }
    .violet { fill: #ce93d8; stroke: #ce93d8; }
  }
"""


@dataclass
class Picture:
    """The elements of an SVG file, below a title of one or more lines and a line that says what was measured.

    width: of the drawing. It is shown as wide as the others, so that the texts of a narrow one are larger.
    """

    title: Sequence[str]
    note: str
    height: int
    width: int = WIDTH
    elements: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number, line in enumerate(self.title):
            self.text(20, 36 + 27 * number, line, "title")
        self.text(20, self.top - 18, self.note, "note")

    @property
    def top(self) -> int:
        """Where the space below title and note begins."""
        return 52 + 27 * len(self.title)

    def text(self, x: float, y: float, text: str, kind: str = "text", anchor: str = "start") -> None:
        place = f'x="{x:.1f}" y="{y:.1f}"' + (f' text-anchor="{anchor}"' if anchor != "start" else "")
        self.elements.append(f'<text class="{kind}" {place}>{escape(text, quote=False)}</text>')

    def bar(self, x: float, y: float, width: float, kind: str, height: int = 20) -> None:
        self.elements.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="2"/>'
        )

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.elements.append(f'<path class="{kind}" d="M{path}"/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        self.elements.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')

    def svg(self) -> str:
        height = round(self.height * WIDTH / self.width)
        size = f'viewBox="0 0 {self.width} {self.height}" width="{WIDTH}" height="{height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title">'
        title = f'<title id="title">{escape(" ".join(self.title), quote=False)}</title>'
        page = f'<rect class="page" width="{self.width}" height="{self.height}" rx="8"/>'
        return "\n".join([head, title, f"<style>{STYLE}</style>", page, *self.elements, "</svg>"]) + "\n"


def rows(page: str, header: str) -> dict[str, list[str]]:
    """The rows of a page's table by their first word in backquotes; `header` begins the table."""
    text = (DOCS / page).read_text()
    lines = text[text.index(f"| {header}") :].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0].split("`")[1] if "`" in row[0] else row[0]: row[1:] for row in cells}


def number(cell: str) -> float:
    """`1,273`, `+5.0 %` or an empty cell, which is 0."""
    found = re.sub(r"[^\d.-]", "", cell)
    return float(found) if found else 0.0


@dataclass
class Bars:
    """A column of bars. value: of each row; None has no bar. shown: what is written at each bar."""

    heading: str
    value: Sequence[float | None]
    shown: Sequence[str]


def draw_bars(
    title: Sequence[str], note: str, names: Sequence[str], base: set[str], columns: Sequence[Bars]
) -> Picture:
    """Horizontal bars with their numbers. base: rows in gray, with which the others are compared.

    Each column has a scale of its own.
    """
    picture = Picture(title, note, 0)
    left = 36 + max(8.4 * len(name) for name in names)
    room = (WIDTH - left - 10) / len(columns)
    top = picture.top + 14
    for place, column in enumerate(columns):
        x = left + place * room
        picture.text(x, top, column.heading, "strong")
        drawn = [
            (value, len(text)) for value, text in zip(column.value, column.shown, strict=True) if value is not None
        ]
        longest, texts = (max(numbers) for numbers in zip(*drawn, strict=True)) if drawn else (1.0, 0)
        scale = (room - 9 * texts - 18) / longest
        for row, (name, value, shown) in enumerate(zip(names, column.value, column.shown, strict=True)):
            y = top + 16 + 31 * row
            if place == 0:
                picture.text(20, y + 15.5, name)
            length = 0.0 if value is None else max(2.0, scale * value)
            if value is not None:
                picture.bar(x, y, length, "base" if name in base else "bar")
            picture.text(x + length + (8 if length else 0), y + 15.5, shown, "note" if value is None else "text")
    picture.height = round(top + 31 * len(names) + 26)
    return picture


@dataclass
class Axis:
    """A linear or logarithmic axis. ticks: (value, label)."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Where a value is: 0 at `low`, 1 at `high`."""
        if self.logarithmic:
            return (log(value) - log(self.low)) / (log(self.high) - log(self.low))
        return (value - self.low) / (self.high - self.low)


def draw_axes(
    picture: Picture, x: Axis, y: Axis, left: float, height: float, right_axis: bool = False
) -> Callable[[float, float], tuple[float, float]]:
    """Draws the grid and the labels, and returns the function from values to a place in the picture."""
    top, right = picture.top + 34, WIDTH - (62 if right_axis else 24)
    bottom = top + height

    def place(a: float, b: float) -> tuple[float, float]:
        return left + (right - left) * x.share(a), bottom - height * y.share(b)

    picture.text(20, picture.top + 12, y.label, "note")
    for value, label in y.ticks:
        at = place(x.low, value)[1]
        picture.line([(left, at), (right, at)], "grid")
        picture.text(
            right + 8 if right_axis else left - 8, at + 5, label, "note", "start" if right_axis else "end"
        )
    for value, label in x.ticks:
        at = place(value, y.low)[0]
        picture.line([(at, bottom), (at, bottom + 5)], "axis")
        picture.text(at, bottom + 22, label, "note", "middle")
    picture.line([(left, bottom), (right, bottom)], "axis")
    picture.text((left + right) / 2, bottom + 46, x.label, "note", "middle")
    picture.height = round(bottom + 62)
    return place


@dataclass
class Point:
    """A method in a picture of quality against bytes. error: standard error of y, in the unit of y.

    label: offset of the label from the point. A label with an offset to the left ends there.
    """

    name: str
    x: float
    y: float
    error: float
    colour: str
    label: tuple[float, float]


def draw_points(
    title: Sequence[str], note: str, x: Axis, y: Axis, points: Sequence[Point], height: float = 300
) -> Picture:
    """Quality against bytes, with labels, error bars and a dotted line at dense training, which is 0.

    y has the quality lost: lower is better, and further to the right.
    """
    picture = Picture(title, note, 0)
    place = draw_axes(picture, x, y, 62, height)
    picture.text(WIDTH - 24, picture.top + 12, "better: down, and to the right ↘", "note", "end")
    picture.line([place(x.low, 0.0), place(x.high, 0.0)], "zero")
    for point in points:
        at = place(point.x, point.y)
        if point.error:
            ends = [place(point.x, point.y + sign * point.error) for sign in (-1, 1)]
            picture.line(ends, f"error {point.colour}")
        picture.dot(*at, point.colour)
        dx, dy = point.label
        anchor = "end" if dx < 0 else "start" if dx else "middle"
        picture.text(at[0] + dx, at[1] + dy, point.name, f"label {point.colour}", anchor)
    return picture


def saved(low: float, high: float, *ticks: float) -> Axis:
    """The axis of wire bytes."""
    label = "times fewer wire bytes than dense fp32, whole run"
    return Axis(label, low, high, [(tick, f"{tick:,g}") for tick in ticks], logarithmic=True)


RIGHT, LEFT = (9.0, 5.0), (-9.0, 5.0)
ABOVE, BELOW = (0.0, -12.0), (0.0, 23.0)


def accuracy() -> Picture:
    """docs/accuracy.svg, of results.md: all methods of the table within a point of dense, by bytes."""
    table = rows("results.md", "method | accuracy % | minus dense")
    close = {name: cells for name, cells in table.items() if number(cells[1]) > -1}
    names = sorted(close, key=lambda name: number(close[name][3]))
    best = max(number(cells[3]) for cells in close.values() if number(cells[1]) + number(cells[2]) >= 0)
    points = [f"{close[name][1]} ± {close[name][2]}" if close[name][1] else "" for name in names]
    return draw_bars(
        [f"Up to {best:.0f} times fewer bytes at the accuracy of dense training"],
        "Handwritten digits, 4 ranks, 5 folds, equal steps; ± standard error of the difference",
        names,
        {"dense"},
        [
            Bars(
                "times fewer wire bytes",
                [number(close[name][3]) for name in names],
                [close[name][3] for name in names],
            ),
            Bars("points from dense", [None] * len(names), points),
        ],
    )


def fewer_bytes() -> Picture:
    """docs/fewer_bytes.svg, of results.md: the bytes of four methods, and that they are as accurate as dense."""
    names = {"dense": "dense fp32", "int4": "4 bits", "dgc": "DGC", "powersgd-2": "PowerSGD"}
    table = rows("results.md", "method, second run")
    chosen = {shown: [number(cell) for cell in table[name]] for name, shown in names.items()}
    accuracies, differences, _, _, megabytes = zip(*chosen.values(), strict=True)
    assert min(differences) > -0.5, "not the accuracy of dense training"
    ratios = [megabytes[0] / sent for sent in megabytes]
    picture = Picture(
        ["The accuracy that you had,", f"with {ratios[1]:.0f} to {ratios[-1]:.0f} times fewer bytes"],
        "Bytes that each of 4 ranks sends in a run with SGD",
        0,
        480,
    )
    left, room = 112, 280
    y = picture.top + 2
    for name, ratio, sent in zip(chosen, ratios, megabytes, strict=True):
        base = name == "dense fp32"
        length = room * sent / megabytes[0]
        picture.text(20, y + 19.5, name)
        picture.bar(left, y, length, "base" if base else "bar", 28)
        shown = f"{sent:.0f} MB" if base else f"{sent:.0f} MB, {ratio:.1f} times fewer"
        picture.text(left + length + 8, y + 19.5, shown, "strong")
        y += 40
    low, high = min(accuracies[1:]), max(accuracies[1:])
    shown = f"Accuracy: {low:.2f} to {high:.2f} %, dense {accuracies[0]:.2f} %; digits, 5 folds"
    picture.text(20, y + 14, shown, "note")
    picture.height = round(y + 34)
    return picture


def outer() -> Picture:
    """docs/outer.svg, of local.md."""
    places = {
        "dense": ("gray", (8.0, 19.0)),
        "local-h10": ("gray", (-9.0, 3.0)),
        "diloco-h10": ("orange", (-9.0, -10.0)),
        "streaming-2": ("orange", (-9.0, 18.0)),
        "diloco-h20": ("orange", (-4.0, 22.0)),
        "diloco-h40": ("orange", (-9.0, -8.0)),
        "sparse4-h10": ("blue", (-1.0, -26.0)),
        "sparse16-h4": ("blue", (7.0, 17.0)),
        "sparse16-h10": ("blue", (0.0, -13.0)),
        "sparse16-h20": ("blue", (-9.0, -2.0)),
        "sparse64-h10": ("blue", (-2.0, 23.0)),
        "sign-h10": ("violet", (9.0, 8.0)),
        "sign-h32-momentum": ("violet", (9.0, 2.0)),
        "2bit-h10": ("green", (-7.0, -4.0)),
        "zero-one-h10": ("red", (-9.0, -2.0)),
        "zero-one-h6": ("red", (9.0, 14.0)),
    }
    table = rows("local.md", "method | bits per character | to dense | +- | exchanges")
    points = []
    for name, (colour, label) in places.items():
        _, difference, error, *_, wire = table[name]
        points.append(Point(name, number(wire), number(difference), number(error), colour, label))
    good, small = table["zero-one-h6"], table["sign-h32-momentum"]
    out = table["powersgd4-h10"]
    return draw_points(
        [
            f"{number(good[-1]):.0f} times fewer bytes cost {number(good[1])} % more bits per character,",
            f"{number(small[-1]):.0f} times fewer cost {number(small[1])} %",
        ],
        f"GPT, 4 ranks, 4000 steps, 3 seeds; not shown: powersgd4-h10, {number(out[1]):.0f} % at {out[-1]} times",
        saved(0.8, 5000, 1, 10, 100, 1000),
        Axis(
            "bits per character more than dense, %",
            -1.5,
            12.5,
            [(value, f"{value}") for value in (0, 2, 4, 6, 8, 10, 12)],
        ),
        points,
        380,
    )


def muon() -> Picture:
    """docs/muon.svg, of local.md."""
    adam = rows("local.md", "method | bits per character | to dense | +- | exchanges")
    own = rows("local.md", "method | bits per character | to dense AdamW | +-")
    best = {name: row[3:] for name, row in rows("local.md", "at the best rate").items()}
    places = {
        "dense": ("gray", (9.0, -10.0)),
        "muon": ("blue", (9.0, 6.0)),
        "muon-local-momentum-h10": ("blue", (5.0, 22.0)),
        "muon-local-momentum-h20": ("blue", (0.0, -12.0)),
        "muon-local-4-bits-h10": ("blue", (9.0, 16.0)),
        "muon-local-2-bits-h10": ("blue", (-9.0, -10.0)),
        "muon-local-sign-h32": ("blue", (9.0, 14.0)),
        "muon-local-sign-h64": ("blue", (9.0, 5.0)),
        "zero-one-h6": ("red", (-9.0, 5.0)),
        "2bit-h10": ("red", (-9.0, -9.0)),
        "local-h10": ("red", (9.0, 5.0)),
        "sign-h32-momentum": ("red", (9.0, -9.0)),
    }
    points = []
    for name, (colour, label) in places.items():
        row = {**adam, **own, **best}[name]
        points.append(Point(name, number(row[-1]), number(row[1]), number(row[2]), colour, label))
    signs = best["muon-local-sign-h32"]
    assert number(signs[1]) < 0
    return draw_points(
        [
            f"Muon with {number(signs[-1]):.0f} times fewer bytes",
            f"ends {-number(signs[1])} % better than dense AdamW",
        ],
        "GPT, 4 ranks, 4000 steps, 3 seeds; blue: Muon, most at the best of 3 rates; red: AdamW",
        saved(0.8, 25000, 1, 10, 100, 1000, 10000),
        Axis(
            "bits per character more than dense AdamW, %",
            -6,
            9,
            [(value, f"{value}") for value in (-4, -2, 0, 2, 4, 6, 8)],
        ),
        points,
        380,
    )


def pysource() -> Picture:
    """docs/pysource.svg, of language.md."""
    places = {
        "dense": ("gray", (9.0, -10.0)),
        "onebit-adam": ("red", (9.0, 15.0)),
        "zero-one-adam": ("red", ABOVE),
        "dgc-adam": ("blue", LEFT),
        "powersgd-4": ("green", (-9.0, 15.0)),
        "dgc-adam-0.1-percent": ("blue", (0.0, -16.0)),
    }
    table = rows("language.md", "method | bits per character | to dense | +- | dense / wire")
    points = []
    for name, (colour, label) in places.items():
        _, difference, error, times = table[name]
        points.append(Point(name, number(times), number(difference), number(error), colour, label))
    one, zero = table["onebit-adam"], table["zero-one-adam"]
    assert number(one[1]) < 0
    return draw_points(
        [
            f"1-bit Adam loses nothing with {number(one[-1]):.1f} times fewer bytes,",
            f"0/1 Adam {number(zero[1])} % with {number(zero[-1]):.1f} times fewer",
        ],
        "GPT on Python sources, 4 ranks, 1000 steps of AdamW, 3 seeds",
        saved(0.8, 36, 1, 2, 5, 10, 20),
        Axis(
            "bits per character more than dense, %",
            -4,
            24,
            [(value, f"{value}") for value in (0, 5, 10, 15, 20)],
        ),
        points,
    )


RATES = ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s")


def exchange() -> Picture:
    """docs/exchange.svg, of when_to_compress.md."""
    table = rows("when_to_compress.md", "method | 100 Mbit/s | 1 Gbit/s | 10 Gbit/s")
    names = list(table)
    base = {"horovod-fp16", "fp16", "dense"}
    values = [[number(cells[place]) for cells in table.values()] for place in range(3)]
    best = [max(column) for column in values]
    return draw_bars(
        [
            f"The slower the link, the more it gains: {best[0]:.0f} times at 100 Mbit/s,",
            f"{best[1]:.0f} times at 1 Gbit/s, {best[2]:.1f} times at 10 Gbit/s",
        ],
        "Speed of an exchange of ResNet-18's gradients, 4 hosts; 1 is the faster of the two fp16 rows",
        names,
        base,
        [
            Bars(heading, column, [cells[place] for cells in table.values()])
            for place, (heading, column) in enumerate(zip(RATES, values, strict=True))
        ],
    )


def scaling() -> Picture:
    """docs/scaling.svg, of when_to_compress.md."""
    page = (DOCS / "when_to_compress.md").read_text()
    header = next(line for line in page.splitlines() if line.startswith("| ranks |"))
    names = re.findall(r"`([^`]+)`", header)
    table = {
        float(ranks): [number(cell) for cell in cells] for ranks, cells in rows_of_ranks(page, header).items()
    }
    colours = {"dense": "gray", "fp16": "gray", "dgc:radix": "orange", "dgc:laplace": "green"}
    faster = max(ranks for ranks, cells in table.items() if max(cells[2:]) > cells[1])
    picture = Picture(
        [
            f"The fastest DGC beats fp16 on up to {faster:.0f} ranks at 1 Gbit/s;",
            "on more, its all-gather is too large",
        ],
        "Predicted: ResNet-50, 0.25 s of computing, 50 µs; dgc:NAME is DGC with that selector",
        0,
    )
    x = Axis("ranks", 1.8, 4600, [(ranks, f"{ranks:g}") for ranks in table], logarithmic=True)
    y = Axis(
        "speed of a rank, % of the speed of one rank alone",
        0,
        100,
        [(value, f"{value} %") for value in (0, 20, 40, 60, 80, 100)],
    )
    place = draw_axes(picture, x, y, 126, 300, right_axis=True)
    curves = {
        name: [place(ranks, 100 * cells[column] / ranks) for ranks, cells in table.items()]
        for column, name in enumerate(names)
    }
    for name, points in curves.items():
        for point in points:
            picture.dot(*point, colours.get(name, "blue"))
        picture.line(points, colours.get(name, "blue"))
    lowest = float("inf")  # labels go from the lowest curve up, at least a line apart
    for name in sorted(curves, key=lambda name: -curves[name][0][1]):
        lowest = min(curves[name][0][1] + 5, lowest - 18)
        shown = {"dense": "dense fp32"}.get(name, name)
        picture.text(116, lowest, shown, f"label {colours.get(name, 'blue')}", "end")
    return picture


def rows_of_ranks(page: str, header: str) -> Mapping[str, list[str]]:
    lines = page[page.index(header) :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def time_to_bits() -> Picture:
    """docs/time_to_bits.svg, of when_to_compress.md."""
    table = rows("when_to_compress.md", "method | bits per character | seconds | MB sent")
    names = list(table)
    seconds = [number(cells[3]) or None for cells in table.values()]
    megabytes = [number(cells[4]) or None for cells in table.values()]
    shown = [
        f"{value:.1f} s" if value else f"not reached; {number(cells[0]):.2f} bits/char"
        for value, cells in zip(seconds, table.values(), strict=True)
    ]
    ratio = (seconds[0] or 0) / (seconds[names.index("onebit-adam")] or 1)
    return draw_bars(
        [f"1-bit Adam reaches the quality of fp16 {ratio:.1f} times sooner"],
        "To at most 2 % more bits per character than fp16; GPT, 4 hosts, links of 50 Mbit/s, one run",
        names,
        {"fp16"},
        [
            Bars("training time", seconds, shown),
            Bars("sent by a rank", megabytes, [f"{value:.1f} MB" if value else "" for value in megabytes]),
        ],
    )


PICTURES: dict[str, Callable[[], Picture]] = {
    "accuracy": accuracy,
    "exchange": exchange,
    "fewer_bytes": fewer_bytes,
    "muon": muon,
    "outer": outer,
    "pysource": pysource,
    "scaling": scaling,
    "time_to_bits": time_to_bits,
}


def main(names: Sequence[str]) -> int:
    if unknown := set(names) - PICTURES.keys():
        print(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}", file=sys.stderr)
        return 2
    for name in names or PICTURES:
        file = DOCS / f"{name}.svg"
        file.write_text(PICTURES[name]().svg())
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
