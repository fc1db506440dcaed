"""The pictures of measurements in docs/ are drawn from the tables of its pages, and their texts can be read."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from documented import DOCS

from scripts.docs import pictures
from scripts.docs.pictures import PICTURES, Axis, main, number, rows

# Widths of characters in Helvetica, as shares of the size of the font; 0.556 is that of digits and most letters.
WIDTHS = (
    dict.fromkeys("ijl.,:;/tfr -()'|", 0.29) | dict.fromkeys("mMwW%", 0.86) | dict.fromkeys("ABCDEGKPRSTUX", 0.69)
)
SIZES = {kind: int(size) for kind, size in re.findall(r"\.(\w+) \{ font-size: (\d+)px", pictures.STYLE)}

Box = tuple[float, float, float, float]


def texts(svg: str) -> Iterator[tuple[str, Box]]:
    """Each text with its box: left, top, right, bottom."""
    for kind, x, y, anchor, text in re.findall(
        r'<text class="(\w+)[^"]*" x="([\d.]+)" y="([\d.]+)"(?: text-anchor="(\w+)")?>(.*?)</text>', svg
    ):
        width = SIZES[kind] * sum(WIDTHS.get(character, 0.556) for character in unescape(text))
        left = float(x) - {"": 0.0, "middle": width / 2, "end": width}[anchor]
        yield unescape(text), (left, float(y) - 0.72 * SIZES[kind], left + width, float(y) + 0.1 * SIZES[kind])


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_drawn_from_its_table(name: str) -> None:
    """And no text of it is on another or cut off."""
    svg = PICTURES[name]().svg()
    assert (DOCS / f"{name}.svg").read_text() == svg, "python -m scripts.docs.pictures"
    assert any(f"{name}.svg)" in page.read_text() for page in (DOCS.parent / "README.md", *DOCS.glob("*.md")))
    found = list(texts(svg))
    assert len(found) == svg.count("<text ") > 8
    width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', svg)[0])
    for place, (text, box) in enumerate(found):
        assert box[0] >= 0 and box[2] <= width and box[3] <= height, text
        assert [other for other, its in found[place + 1 :] if overlap(box, its)] == [], text


def test_every_picture_has_colours_for_a_dark_background() -> None:
    for file in DOCS.glob("*.svg"):
        light, dark = file.read_text().split("@media (prefers-color-scheme: dark)")
        assert ".page" in light and ".page" in dark, file


def test_a_changed_number_changes_the_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in DOCS.glob("*.md"):
        (tmp_path / page.name).write_text(page.read_text().replace("| 91.0 |", "| 95.0 |"))
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    assert main(["accuracy"]) == 0
    assert "Up to 95 times fewer bytes" in (tmp_path / "accuracy.svg").read_text()
    capsys.readouterr()
    assert main(["accuracy", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("no picture nothing; there are accuracy, ")


def test_cells_and_axes_are_read_as_numbers() -> None:
    assert [number(cell) for cell in ("1,273", "+5.0 %", "-0.06", "")] == [1273.0, 5.0, -0.06, 0.0]
    assert rows("results.md", "method | accuracy % | minus dense")["dense"][0] == "99.28"
    axis = Axis("", 1.0, 100.0, [], logarithmic=True)
    assert [axis.share(value) for value in (1.0, 10.0, 100.0)] == [0.0, 0.5, 1.0]
    assert Axis("", 2.0, 4.0, []).share(3.0) == 0.5
