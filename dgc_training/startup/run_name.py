"""Run directories: their names, and comparison of their configs.

Names have the form of the original trainer: the config files are a tree of path components below `configs/`,
joined by dots, with siblings in [a+b]. For example, configs/cifar/resnet20.py with configs/dgc/wm5.py gives
[cifar.resnet20+dgc.wm5].
"""

import os
from collections.abc import Sequence
from pathlib import Path

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
