"""Reads config.yaml and summary.json of run directories, which may be damaged or of another program.

What this module returns is safe to draw: it consists of None, bool, int, float, str, lists and dicts, and the keys
that plots and reports use have the expected types. Anything else is a PlotError, which names the file.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

LARGEST = 1e30  # larger counts are damage, and axes cannot show them
MOST = 100_000  # values of a file, counting what YAML's aliases repeat
Kinds = Mapping[str, str]  # what each key must be, by path; "*" is any name
CONFIG: Kinds = {
    **dict.fromkeys(
        ("train", "train.meters", "train.meters.*", "train.local", "train.gossip", "train.compression"),
        "a mapping",
    ),
    **{"train.metric": "text", "train.num_epochs": "a count or a formula"},
}
SUMMARY: Kinds = {
    **dict.fromkeys(("epochs", "best_epoch", "dropped_steps"), "a count"),
    **dict.fromkeys(("wire_bytes", "dense_wire_bytes"), "a number of bytes"),
    **{"best": "a mapping", "final": "a mapping", "best.*": "a number", "final.*": "a number"},
    **{"metric": "text", "lower_is_better": "true or false"},
}
CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "a mapping": lambda value: isinstance(value, dict),
    "text": lambda value: isinstance(value, str),
    "true or false": lambda value: isinstance(value, bool),
    "a number": lambda value: type(value) in (int, float),
    "a number of bytes": lambda value: type(value) in (int, float) and 0 <= value <= LARGEST,
    "a count": lambda value: type(value) is int and 0 <= value <= LARGEST,
    "a count or a formula": lambda value: "${" in value if isinstance(value, str) else CHECKS["a count"](value),
}


class PlotError(ValueError):
    """The given runs cannot be plotted. The message has the cause and a remedy."""


def read_text(path: Path) -> str | None:
    """The text of a UTF-8 file. None: there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PlotError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PlotError(f"{path} is damaged: byte {error.start} is not UTF-8 text") from None


def read_config(path: Path) -> dict[str, Any]:
    """config.yaml; empty if there is no such file."""
    return _read(path, yaml.safe_load, CONFIG) or {}


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a finished run, without the keys that are null; empty if there is no such file."""
    try:
        found = _read(path, json.loads, SUMMARY)
        if found is not None and "epochs" not in found:
            raise PlotError(f"{path} is not the summary of a run: it has no epochs")
    except PlotError as error:
        raise PlotError(f"{error}. Remove it: the run then counts as unfinished.") from None
    return {key: value for key, value in (found or {}).items() if value is not None}


def printable(text: object) -> str:
    """The text, with a replacement for characters that pages, fonts and terminals cannot show."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in str(text))


def _read(path: Path, parse: Callable[[str], Any], kinds: Kinds) -> dict[str, Any] | None:
    text = read_text(path)
    if text is None:
        return None
    try:
        tree = _plain(parse(text), iter(range(MOST)))
        if not isinstance(tree, dict):
            raise ValueError("it is not a mapping of keys to values")
        for key, kind in kinds.items():
            for name, value in _find(tree, key.split("."), ""):
                if value is not None and not CHECKS[kind](value):
                    raise ValueError(f"{name} is {str(value)[:40]!r}, not {kind}")
    except RecursionError:
        raise PlotError(f"{path} is damaged: its values are nested too deeply") from None
    except (ValueError, OverflowError, yaml.YAMLError) as error:
        raise PlotError(f"{path} is damaged: {printable(' '.join(str(error).split()))[:300]}") from None
    return tree


def _plain(value: Any, budget: Iterator[int], name: str = "") -> Any:
    if next(budget, None) is None:
        raise ValueError(f"it has more than {MOST} values")
    if name == "_target_" and not isinstance(value, str | None):
        raise ValueError("a _target_ is not text")
    if isinstance(value, dict):
        return {printable(key): _plain(item, budget, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, budget) for item in value]
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{name or 'a number'} is too large")
    return value if value is None or isinstance(value, bool | int | float) else printable(value)


def _find(tree: Any, keys: list[str], above: str) -> Iterator[tuple[str, Any]]:
    """The values behind a path of keys, of which "*" is any."""
    if not keys:
        yield above, tree
    elif isinstance(tree, dict):
        for key in tree if keys[0] == "*" else {keys[0]} & tree.keys():
            yield from _find(tree[key], keys[1:], f"{above}.{key}".lstrip("."))
