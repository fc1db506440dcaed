"""Run directories: their names, and comparison of their configs.

Names have the form of the original trainer: the config files are a tree of path components below `configs/`,
joined by dots, with siblings in [a+b]. For example, configs/cifar/resnet20.py with configs/dgc/wm5.py gives
[cifar.resnet20+dgc.wm5].
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

# Keys that may change when a run is resumed, since they do not affect the training result.
FREE_KEYS = (
    "data.num_threads_per_worker",
    "data.num_workers",
    "train.bucket_mb",
    "train.kernels",
    "train.timeout",
    "train.log_every",
    "train.checkpoint_every",
    "train.check_replicas_every",
    "train.trace",
    "train.csv",
)

Tree = dict[str, "Tree"]


def _components(path: str, base: Path) -> list[str]:
    """Path components below the innermost `configs` folder; without such a folder, only the file's stem."""
    full = Path(os.path.normpath(base / path))
    parts = list(full.parts)
    if full.suffix in (".py", ".yaml", ".yml"):
        parts[-1] = full.stem
    if full.name == "config.yaml":
        # The config of an earlier run repeats that run in a new directory. The suffix .npN is appended later.
        name = full.parent.name
        stem, _, ranks = name.rpartition(".np")
        return [f"{stem if stem and ranks.isdecimal() else name}.repeat"]
    if "configs" in parts:
        parts = parts[len(parts) - parts[::-1].index("configs") :]
    else:
        parts = parts[-1:]
    parts = [part for part in parts if part != "__init__"]
    return parts or ["configs"]


def _join(tree: Tree) -> str:
    branches = [name + ("." + _join(below) if below else "") for name, below in tree.items()]
    return branches[0] if len(branches) == 1 else "[" + "+".join(branches) + "]"


def run_name(configs: Sequence[str], suffix: str = "", size: int = 1, base: Path | None = None) -> str:
    """Name of a run.

    Args:
        configs: paths of the config files.
        suffix: text appended to the name.
        size: number of ranks.
        base: folder of relative paths; None: the working directory.
    """
    tree: Tree = {}
    for path in configs:
        node = tree
        for component in _components(path, base or Path.cwd()):
            node = node.setdefault(component, {})
    return f"{_join(tree)}{suffix}.np{size}"


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings, by dotted key. Lists are leaves."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


def config_differences(old: str, new: str) -> list[str]:
    """Lines 'key: old -> new' for the differences of two resolved configs (YAML), without FREE_KEYS."""
    before, after = flatten(yaml.safe_load(old) or {}), flatten(yaml.safe_load(new) or {})
    lines = []
    for key in sorted(before.keys() | after.keys()):
        values = [repr(side[key]) if key in side else "(absent)" for side in (before, after)]
        if values[0] != values[1] and key not in FREE_KEYS:
            lines.append(f"  {key}: {values[0]} -> {values[1]}")
    return lines


def move_aside(directory: Path) -> Path:
    """Renames an earlier run's directory to the first free NAME.1, NAME.2, ... and returns the new name."""
    number = 1
    while (aside := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    directory.rename(aside)
    return aside
