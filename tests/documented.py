"""Tables and code of the documentation, for tests that hold the code to them."""

from pathlib import Path
from textwrap import dedent

DOCS = Path(__file__).parents[1] / "docs"


def table(first: str, page: str = "experiments.md") -> list[list[str]]:
    """The rows of the page's table whose header begins with `first`, as texts."""
    text = (DOCS / page).read_text()
    lines = text[text.index(f"| {first}") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def code(page: str) -> list[str]:
    return [dedent(block.split("```")[0]) for block in (DOCS / page).read_text().split("```python\n")[1:]]
