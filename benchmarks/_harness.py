"""What benchmarks share: options, measurements in turns, tables, and the line of JSON at the end.

It imports nothing but Python's own library, so that `benchmarks.gpu` can say what is missing.
"""

import argparse
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from statistics import median
from typing import Any, TypeVar

Value = TypeVar("Value")
ByRound = Mapping[int, float]
SELDOM = 6  # slow methods take part in every sixth round
OUTPUT = """
Methods whose times are compared take turns within each round, in random order. A ratio of times is the median over
rounds of the ratio within a round. The output is a table and a line of JSON, of each network or of all.
"""


def options(module: str, description: str | None, **numbers: float) -> argparse.ArgumentParser:
    """A parser of `python -m MODULE`, whose help is the module's docstring. numbers: options, and defaults."""
    about = {"description": description, "formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": OUTPUT}
    parser = argparse.ArgumentParser(prog=f"python -m {module}", **about)  # type: ignore[arg-type]
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser


def add_methods(parser: argparse.ArgumentParser, names: Iterable[str], default: Sequence[str]) -> None:
    """Add --methods, of these names."""
    words = list(names)
    what = f"default: {' '.join(default)}; of {', '.join(words)}"
    parser.add_argument("--methods", nargs="+", choices=words, metavar="NAME", default=list(default), help=what)


def in_turns(
    works: Mapping[str, Callable[[int], Value]],
    rounds: int,
    warm_up: int = 2,
    *,
    slow: Iterable[str] = (),
    before: Callable[[int], object] | None = None,
) -> dict[str, dict[int, Value]]:
    """Let methods take turns, in each round in another order, so that other load on the machine meets all alike.

    Args:
        works: By method, what it does in the round of this number. It returns what it has measured.
        warm_up: Rounds before `rounds`, with numbers below 0, whose measurements are not kept.
        slow: Methods that skip most rounds. They have little relative noise.
        before: Called with the number at the start of each round.

    Returns: by method and round. The order is equal on all ranks.
    """
    found: dict[str, dict[int, Value]] = {name: {} for name in works}
    skipping = set(slow)
    for number in range(-warm_up, rounds):
        if before is not None:
            before(number)
        for name in random.Random(number).sample(list(works), len(works)):
            if name in skipping and number % SELDOM:
                continue
            value = works[name](number)
            if number >= 0:
                found[name][number] = value
    return found


def middle(times: ByRound) -> float:
    """The median over rounds."""
    return median(times.values())


def ratio(above: ByRound, below: ByRound) -> float:
    """The median over rounds of the ratio within a round."""
    return median(ratios(above, below))


def ratios(above: ByRound, below: ByRound) -> list[float]:
    """The ratios within the rounds, in ascending order."""
    return sorted(above[number] / below[number] for number in above.keys() & below.keys())


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """A confidence interval of at least 95 % of the median, of ordered values. None: there are fewer than 6.

    The k-th value from an end is beyond the median if fewer than k of n values are on that side of it, each with
    probability 1/2.
    """
    n, k, beyond = len(values), 0, 0.0
    while k < n and (beyond := beyond + math.comb(n, k) / 2**n) <= 0.025:
        k += 1
    return None if k == 0 else (values[k - 1], values[n - k])


class Table:
    """A table whose rows are printed one by one, and kept for the line of JSON.

    Args:
        first: Head of the first column, which has the names of the rows.
        width: Width of it.
        columns: (key of a row, head, format of a number such as "10.2f"). A row leaves out what it does not have.
        rows: First rows by name, if they are known.
    """

    def __init__(
        self, first: str, width: int, columns: Sequence[tuple[str, str, str]], rows: Mapping[str, Any] = {}
    ):
        self.width, self.columns = width, columns
        self.rows: dict[str, dict[str, Any]] = {}
        heads = "".join(f"{head:>{_width(form)}}" for _, head, form in columns)
        print(f"\n{first:<{width}}{heads}", flush=True)
        for name, row in rows.items():
            self.add(name, row)

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Print a row."""
        cells = ((row.get(key), form) for key, _, form in self.columns)
        text = "".join(" " * _width(form) if value is None else f"{value:{form}}" for value, form in cells)
        print(f"{name:<{self.width}}{text}".rstrip(), flush=True)
        self.rows[name] = dict(row)


def _width(form: str) -> int:
    """The width in a format such as "10.2f", "8,.0f" or "<9"."""
    return int("".join(takewhile(str.isdigit, form.lstrip("<>"))))


def print_json(result: Any) -> None:
    print(to_json(result))


def to_json(result: Any) -> str:
    """One line of JSON. JSON has no NaN and no infinity: such numbers become null."""
    return json.dumps(_finite(result), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
