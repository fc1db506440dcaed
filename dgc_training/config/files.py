"""Finds config files and the bases of their folders, and reads a file into the tree."""

import os
import traceback
from contextvars import ContextVar
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dgc_training.config.errors import ConfigError, closest
from dgc_training.config.tree import Config, copy, is_constructor, leaves, lookup, merge_, of_constructors

REPOSITORY = Path(__file__).resolve().parents[2]
SUFFIXES = (".py", ".yaml", ".yml")
UNDER_CONSTRUCTION: ContextVar[Config | None] = ContextVar("configs", default=None)


def base_of(folder: Path) -> Path | None:
    """The base file of a folder, or None. Raises ConfigError if there are two."""
    found = [file for suffix in SUFFIXES if (file := folder / f"__init__{suffix}").is_file()]
    if len(found) > 1:
        raise ConfigError(f"{show(folder)} has two bases: {', '.join(file.name for file in found)}")
    return found[0] if found else None


def bases_of(file: Path) -> list[Path]:
    """The bases that apply before `file`, topmost first: those of its folder and of all folders above, up to the
    first one without a base.
    """
    bases: list[Path] = []
    for folder in file.parents:
        base = base_of(folder)
        if base is None:
            break
        bases.insert(0, base)
    return bases


def find(name: str | os.PathLike[str]) -> Path:
    """The absolute path of config file `name`, searched in the working directory and then in the repository.

    The suffix may be left out. A folder stands for its base. Raises ConfigError unless exactly one file matches.
    """
    asked = Path(name).expanduser()
    for root in (Path.cwd(), REPOSITORY):
        path = Path(os.path.abspath(root / asked))
        found = [path] if path.is_file() else []
        if not found:
            candidates = [Path(f"{path}{suffix}") for suffix in SUFFIXES]
            found = [file for file in candidates if file.is_file()] + ([path] if path.is_dir() else [])
        if len(found) > 1:
            raise ConfigError(f"{name} may mean {' or '.join(show(file) for file in found)}; write which")
        if found and found[0].is_dir():
            base = base_of(found[0])
            if base is None:
                inside = ", ".join(show(file) for file in config_files(found[0])) or "nothing else to name"
                raise ConfigError(
                    f"the folder {name} has no base (__init__.py or __init__.yaml); it has: {inside}"
                )
            return base
        if found:
            if found[0].suffix not in SUFFIXES:
                raise ConfigError(f"{name} is no config file; they end in {', '.join(SUFFIXES)}")
            return found[0]
    shipped = [str(file.relative_to(REPOSITORY)) for file in config_files(REPOSITORY / "configs")]
    raise ConfigError(f"there is no config file {name}{closest(str(name), shipped, show=30)}")


def config_files(folder: Path) -> list[Path]:
    """All config files below `folder` except bases, sorted."""
    files = [file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
    return sorted(file for file in files if not file.stem.startswith((".", "__")))


def show(path: Path) -> str:
    """A path relative to the working directory or the repository, if it is below one of them."""
    for root in (Path.cwd(), REPOSITORY):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return str(path)


def read_into_(tree: Config, file: Path, whole: bool = False) -> None:
    """Applies one file to the tree. Raises ConfigError with file, line and reason.

    If `whole`, constructors and collections of constructors (meters) in a YAML file replace those of the tree
    completely.
    """
    if file.suffix == ".py":
        return _execute(tree, file)
    content = parse_yaml(file)
    for path, _ in leaves(content) if whole else ():
        if is_constructor(node := lookup(tree, path)) or of_constructors(node):
            node.clear()
    merge_(tree, content)


def _execute(tree: Config, file: Path) -> None:
    # The file is compiled and run, not imported: an import would run only once per process and keep its state.
    try:
        source = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{show(file)} cannot be read: {error}") from error
    token = UNDER_CONSTRUCTION.set(tree)
    try:
        exec(compile(source, str(file), "exec"), {"__name__": f"config {file}", "__file__": str(file)})
    except SyntaxError as error:
        where = f"line {error.lineno}" if error.filename == str(file) else str(error.filename)
        raise ConfigError(f"{show(file)}, {where}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(file)]
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{show(file)}, line {lines[-1] if lines else '?'}: {reason}") from error
    finally:
        UNDER_CONSTRUCTION.reset(token)


def parse_yaml(file: Path) -> Config:
    """Reads one YAML file, without its bases. Raises ConfigError with file, line and reason."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        if not isinstance(content, dict):
            raise ConfigError(f"{show(file)}: a config file is a mapping of keys, not a list")
        return copy(content)
    except yaml.MarkedYAMLError as error:
        # YAML counts the end of a file as one more line.
        last = len(file.read_text().splitlines())
        line = f", line {min(error.problem_mark.line + 1, last)}" if error.problem_mark else ""
        raise ConfigError(f"{show(file)}{line}: {error.problem}") from error
    except ConfigError:
        raise
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(f"{show(file)}: {str(error).splitlines()[0]}") from error
