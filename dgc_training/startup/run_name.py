"""Run directories: their names, and comparison of their configs.

Names have the form of the original trainer: the config files are a tree of path components below `configs/`,
joined by dots, with siblings in [a+b]. For example, configs/cifar/resnet20.py with configs/dgc/wm5.py gives
[cifar.resnet20+dgc.wm5].

The number of ranks follows, .np8. If torchrun may restart the run on another number of ranks, .elastic follows, so
that the restarted run finds its checkpoints.
"""

import glob
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

Tree = dict[str, "Tree"]
RANKS_AT_END = re.compile(r"(?<=.)\.(np\d+|elastic)$")


def _components(path: str, base: Path) -> list[str]:
    """Path components below the innermost `configs` folder; without such a folder, only the file's stem."""
    full = Path(os.path.normpath(base / path))
    parts = list(full.parts)
    if full.suffix in (".py", ".yaml", ".yml"):
        parts[-1] = full.stem
    if full.name == "config.yaml":
        # The config of an earlier run repeats that run in a new directory. The suffix is appended later.
        name = full.parent.name
        return [f"{name[: match.start()] if (match := RANKS_AT_END.search(name)) else name}.repeat"]
    if "configs" in parts:
        parts = parts[len(parts) - parts[::-1].index("configs") :]
    else:
        parts = parts[-1:]
    parts = [part for part in parts if part != "__init__"]
    return parts or ["configs"]


def _join(tree: Tree) -> str:
    branches = [name + ("." + _join(below) if below else "") for name, below in tree.items()]
    return branches[0] if len(branches) == 1 else "[" + "+".join(branches) + "]"


def run_name(configs: Sequence[str], suffix: str = "", size: int | None = 1, base: Path | None = None) -> str:
    """Name of a run.

    Args:
        configs: paths of the config files.
        suffix: text appended to the name.
        size: number of ranks; None: it may change.
        base: folder of relative paths; None: the working directory.
    """
    tree: Tree = {}
    for path in configs:
        node = tree
        for component in _components(path, base or Path.cwd()):
            node = node.setdefault(component, {})
    return f"{_join(tree)}{suffix}." + ("elastic" if size is None else f"np{size}")


def warn_of_other_run(directory: Path, rank: int) -> None:
    """Warns, on rank 0, if there is an unfinished run of this name on another number of ranks."""
    if rank:
        return
    stem = RANKS_AT_END.sub("", directory.name)
    for other in sorted(directory.parent.glob(f"{glob.escape(stem)}.*")):
        same_name = other != directory and RANKS_AT_END.sub("", other.name) == stem
        if same_name and (other / "checkpoints/latest.json").exists() and not (other / "summary.json").exists():
            warnings.warn(
                f"{directory} is a new run and starts from the beginning. {other} is unfinished. To continue that "
                f"one on this number of ranks: --run-dir {other}",
                stacklevel=2,
            )
