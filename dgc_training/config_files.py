"""Config files on disk: found by name, the bases that apply before them, and their names in messages."""

import os
from collections.abc import Sequence
from pathlib import Path

from dgc_training.errors import ConfigError, closest

REPOSITORY = Path(__file__).resolve().parents[1]
ROOT_BASE = REPOSITORY / "configs" / "__init__.py"
SUFFIXES = (".py", ".yaml", ".yml")


def _existing(*paths: Path) -> Path | None:
    """The config file at one of these paths, with or without its suffix. Raises ConfigError if there are two."""
    files = [file for path in paths for end in ("", *SUFFIXES) if (file := Path(f"{path}{end}")).is_file()]
    found = [file for file in files if file.suffix in SUFFIXES]
    if len(found) > 1:
        raise ConfigError(f"{show(paths[0])} may mean {' or '.join(map(show, found))}; write which, or keep one")
    return found[0] if found else None


def bases_of(file: Path) -> list[Path]:
    """The bases of the folders of `file`, topmost first, up to the first folder without a base."""
    base = _existing(file.parent / "__init__")
    return [*bases_of(file.parent), base] if base else []


def find_config_file(name: str | os.PathLike[str], words: Sequence[str]) -> Path:
    """The absolute path of config file `name`, searched in the working directory and then in the repository.

    The suffix may be left out. A folder stands for its base. Raises ConfigError unless exactly one file matches.
    """
    paths = [Path(os.path.abspath(root / Path(name).expanduser())) for root in (Path.cwd(), REPOSITORY)]
    for path in paths:
        if found := _existing(path, path / "__init__"):
            return found
    folder = next(filter(Path.is_dir, paths), ROOT_BASE.parent)
    near = closest(str(name).partition("=")[0], [*map(show, config_files(folder)), *words])
    raise ConfigError(f"there is no config file {name}{near}")


def config_files(folder: Path) -> list[Path]:
    """All config files below `folder` except bases, sorted."""
    files = [file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
    return sorted(file for file in files if not file.stem.startswith((".", "__")))


def show(path: Path) -> str:
    """A path relative to the working directory or the repository, if it is below one of them."""
    roots = [root for root in (Path.cwd(), REPOSITORY) if path.is_relative_to(root)]
    return str(path.relative_to(roots[0]) if roots else path)
