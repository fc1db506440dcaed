"""Overrides on the command line: `--configs.train.num_epochs 500` or `--configs.train.num_epochs=500`.

Values are literals, never code.
"""

import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dgc_training.config.errors import ConfigError, closest, short
from dgc_training.config.tree import Config, Path, copy, dotted, leaves, merge_, merges, suggest

PREFIX = "--configs."
# The flags of train.py. They are only used to suggest the spelling of an unknown flag.
FLAGS = (
    "--configs",
    "--devices",
    "--evaluate",
    "--suffix",
    "--run-dir",
    "--no-resume",
    "--print-config",
    "--help",
)
_WORDS = {"null": None, "none": None, "~": None, "true": True, "false": False}
_INT = re.compile(r"[+-]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[+-]?(((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|inf)", re.IGNORECASE)


def parse(words: Sequence[str], tree: Config, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields (key without 'configs.', value) of each override. Adds a message to `problems` for any other word.

    `tree` is only used to suggest the correct form of a key without its prefix.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.partition("=")
        text = value if equals else None
        if word.startswith("--") and not equals and rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        try:
            override = _read(word, key, text, tree)
        except ConfigError as error:
            problems.append(str(error))
        else:
            yield override


def _read(word: str, key: str, text: str | None, tree: Config) -> tuple[str, Any]:
    if not key.startswith(PREFIX) or key == PREFIX:
        meant = prefixed(key, text, tree)
        if word.startswith("--"):
            near = "" if meant else f"{closest(key, FLAGS)}; config keys are written {PREFIX}KEY VALUE"
            raise ConfigError(f"unknown option {key}{near}{meant}")
        rule = (
            ": config files follow --configs directly, an override has one value, and a list is written as one "
            "word: '[1,2]'"
        )
        raise ConfigError(f"unexpected {word!r} on the command line{meant or rule}")
    if text is None:
        raise ConfigError(f"{key} has no value; write {key} VALUE")
    if not text.strip():
        raise ConfigError(f"{key} has an empty value; write null for none, or '\"\"' for the empty string")
    return key.removeprefix(PREFIX), literal(text.strip(), key)


def prefixed(word: str, text: str | None, tree: Config) -> str:
    """'; write --configs.KEY VALUE' if a word looks like a key of the tree without its prefix, otherwise ''."""
    name = re.sub(r"^-*(configs?\.)?", "", word)
    keys = [dotted(path) for path, _ in leaves(tree)]
    same = [key for key in keys if name and key == name] or [key for key in keys if key.endswith(f".{name}")]
    found = same or difflib.get_close_matches(name, keys, n=1, cutoff=0.85)
    value = "VALUE" if text is None else shlex.quote(text)
    return f"; write {' or '.join(f'{PREFIX}{key} {value}' for key in found[:3])}" if found else ""


def literal(text: str, key: str) -> Any:
    """The value of a word: null, true, 5, 1e-4, [1, 2], {k: 1}, "quoted", otherwise the word itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if text[0] == text[-1] and text[0] in "\"'" and len(text) > 1:
        return text[1:-1]
    if text[0] + text[-1] in ("[]", "{}"):
        try:
            content = OmegaConf.to_container(OmegaConf.create(f"value: {text}"))
            return copy(_nulls(content))["value"]
        except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
            reason = short(str(error).splitlines()[0], 160)
            raise ConfigError(f"{key}: {short(text)} is no list or mapping: {reason}") from error
    return text


def _nulls(value: Any) -> Any:
    """Replaces 'None' by None inside a list or mapping, where YAML itself only accepts null."""
    if isinstance(value, list):
        return [_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _nulls(item) for key, item in value.items()}
    return None if value == "None" else value


def assign_(tree: Config, key: str, value: Any) -> None:
    """Sets a dotted key. Numbers are list indices. A mapping is merged as in a YAML file, but {} empties the node.

    Raises ConfigError if a part of the key does not exist.
    """
    node: Any = tree
    parts = key.split(".")
    done: Path = ()
    while parts:
        if isinstance(node, list):
            if not parts[0].isdecimal() or int(parts[0]) >= len(node):
                raise ConfigError(f"{dotted(done)} is a list of {len(node)}; there is no {parts[0]!r} in it")
            step: Any = int(parts[0])
            taken = 1
        elif isinstance(node, Config):
            # A key may contain dots: the longest existing key is used, otherwise the part up to the next dot.
            names = [(".".join(parts[:n]), n) for n in range(len(parts), 0, -1)]
            step, taken = next(((name, n) for name, n in names if name in node), (parts[0], 1))
            if step not in node and len(parts) > 1:
                raise ConfigError(f"unknown key {dotted((*done, step))}{suggest(step, node, tree)}")
        else:
            what = "null, so nothing is below it" if node is None else f"the value {node!r}, not a node"
            raise ConfigError(f"{dotted(done)} is {what}: {dotted((*done, *parts))} cannot be set")
        done, parts = (*done, str(step)), parts[taken:]
        old = node[step] if isinstance(node, list) else node.get(step)
        if parts:
            node = old
        elif value and merges(old, value):
            merge_(old, value)
        else:
            node[step] = value
