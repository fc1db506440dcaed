"""Formats results, counts, bytes, their comparison with a dense all-reduce, and configs as text."""

from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dgc.units import against_dense as against_dense
from dgc.units import human_bytes as human_bytes
from dgc.units import plural as plural
from dgc_training.config.layers import Stack
from dgc_training.constructors import import_target, signature


def result_text(value: float) -> str:
    """A result of an evaluation: two decimals, or four below 10, where a percent of bits per character is 0.02."""
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.4f}"


WIDTH = 80


def changed_settings(tree: DictConfig) -> str:
    """The keys with other values than in configs/__init__.py: one line per key, wrapped at 80 columns.

    A node with a `_target_` is written as a call, without arguments that equal its constructor's defaults.
    """
    found = list(_changed(OmegaConf.to_container(tree, resolve=True), Stack().tree))
    width = max((len(key) for key, _ in found), default=0)
    lines: list[str] = []
    for key, value in found:
        lines += wrap(
            f"  {key:<{width}}  {value}",
            WIDTH,
            subsequent_indent=" " * (width + 6),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def _changed(now: Any, base: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in now.items():
        key = f"{prefix}{name}"
        # train.dgc and requires are only read by config files.
        if key in ("requires", "train.dgc") or (name in base and base[name] == value):
            continue
        inner = base.get(name)
        if isinstance(value, dict) and isinstance(inner, dict) and "_target_" not in value:
            yield from _changed(value, inner, f"{key}.")
        else:
            yield key, written(value)


def written(value: Any) -> str:
    """A value of a config as text; a node with a `_target_` as a call, without the defaults of its constructor.

    Raises ConfigError if the target cannot be imported.
    """
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if not isinstance(value, dict):
        return str(value)
    if "_target_" not in value:
        return "{" + ", ".join(f"{key}: {written(v)}" for key, v in value.items()) + "}"
    known = signature(import_target(value["_target_"])).parameters
    arguments = [
        f"{key}={written(v)}"
        for key, v in value.items()
        if not key.startswith("_") and not (key in known and known[key].default == v)
    ]
    return f"{value['_target_'].rpartition('.')[2]}({', '.join(arguments)})"
