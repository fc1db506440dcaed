"""The tables of docs/experiments.md, for tests that hold the code to them."""

from pathlib import Path

DOCS = (Path(__file__).parents[1] / "docs/experiments.md").read_text()


def table(first: str) -> list[list[str]]:
    """The rows of the documentation's table whose header begins with `first`, as texts."""
    lines = DOCS[DOCS.index(f"| {first}") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
