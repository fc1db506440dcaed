"""The layers of a stack: config files, found by name, and overrides of the command line, which are never code."""

import os
import re
import shlex
import traceback
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dgc_training.config.formulas import NUMBER, number
from dgc_training.config.tree import Config, similar
from dgc_training.errors import ConfigError, closest, collecting, short

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT_BASE = REPOSITORY / "configs" / "__init__.py"
SUFFIXES = (".py", ".yaml", ".yml")
UNDER_CONSTRUCTION: ContextVar[Config | None] = ContextVar("configs", default=None)
PREFIX = "--configs."
# The flags of train.py. They are only used to suggest the spelling of an unknown flag.
FLAGS = "--configs --devices --evaluate --suffix --run-dir --no-resume --print-config --help".split()


def _existing(*paths: Path) -> Path | None:
    """The config file at one of these paths, with or without its suffix. Raises ConfigError if there are two."""
    found = [file for path in paths for end in ("", *SUFFIXES) if (file := Path(f"{path}{end}")).is_file()]
    if len(found) > 1:
        raise ConfigError(f"{show(paths[0])} may mean {' or '.join(map(show, found))}; write which, or keep one")
    if found and found[0].suffix not in SUFFIXES:
        raise ConfigError(f"{show(paths[0])} is no config file; they end in {', '.join(SUFFIXES)}")
    return found[0] if found else None


def bases_of(file: Path) -> list[Path]:
    """The bases of the folders of `file`, topmost first, up to the first folder without a base."""
    bases: list[Path] = []
    for folder in file.parents:
        if not (base := _existing(folder / "__init__")):
            break
        bases.insert(0, base)
    return bases


def find(name: str | os.PathLike[str], tree: dict[str, Any]) -> Path:
    """The absolute path of config file `name`, searched in the working directory and then in the repository.

    The suffix may be left out. A folder stands for its base. Raises ConfigError unless exactly one file matches.
    """
    folder = ROOT_BASE.parent
    for root in (Path.cwd(), REPOSITORY):
        path = Path(os.path.abspath(root / Path(name).expanduser()))
        if found := _existing(path, path / "__init__"):
            return found
        folder = path if path.is_dir() else folder
    key, equals, value = str(name).partition("=")
    near = equals and prefixed(key, value, tree) or closest(str(name), map(show, config_files(folder)), 30)
    raise ConfigError(f"there is no config file {name}{near}")


def config_files(folder: Path) -> list[Path]:
    """All config files below `folder` except bases, sorted."""
    files = [file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
    return sorted(file for file in files if not file.stem.startswith((".", "__")))


def show(path: Path) -> str:
    """A path relative to the working directory or the repository, if it is below one of them."""
    roots = [root for root in (Path.cwd(), REPOSITORY) if path.is_relative_to(root)]
    return str(path.relative_to(roots[0]) if roots else path)


def execute(file: Path, tree: Config) -> None:
    """Runs a Python file that changes `tree`. Raises ConfigError with file, line and reason."""
    # The file is compiled and run, not imported: an import would run only once per process and keep its state.
    token = UNDER_CONSTRUCTION.set(tree)
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), {"__name__": f"config {file}", "__file__": str(file)})
    except (Exception, SystemExit) as error:
        lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(file)]
        if isinstance(error, SyntaxError) and error.filename == str(file):
            lines.append(error.lineno)
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{show(file)}, line {lines[-1] if lines else '?'}: {reason}") from error
    finally:
        UNDER_CONSTRUCTION.reset(token)


def parse_yaml(file: Path) -> dict[Any, Any]:
    """Reads one YAML file, without its bases. Raises ConfigError with file, line and reason."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(file))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        line, reason = "", str(error).splitlines()[0]
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            # YAML counts the end of a file as one more line.
            last = len(file.read_text().splitlines())
            line, reason = f", line {min(error.problem_mark.line + 1, last)}", str(error.problem)
        raise ConfigError(f"{show(file)}{line}: {reason}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{show(file)}: a config file is a mapping of keys, not a list")
    return content


def parse(words: Sequence[str], tree: dict[str, Any], problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields (key without 'configs.', value) of each override. Adds a message to `problems` for any other word."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.partition("=")
        if word.startswith("--") and not equals and rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        if not key.startswith(PREFIX) or key == PREFIX:
            near = prefixed(key, text, tree) or (closest(key, FLAGS, 0) if word.startswith("--") else "")
            rule = "config files follow --configs, overrides are written --configs.KEY VALUE, a list as '[1,2]'"
            problems.append(f"unexpected {word!r} on the command line{near or f'; {rule}'}")
        elif not text.strip():
            problems.append(f"{key} has no value; write {key} VALUE: null for none, '\"\"' for the empty string")
        else:
            with collecting(problems):
                yield key.removeprefix(PREFIX), literal(text.strip(), key)


def prefixed(word: str, text: str, tree: dict[str, Any]) -> str:
    """'; write --configs.KEY VALUE' if a word looks like a key of the tree without its prefix, otherwise ''."""
    keys = similar(re.sub(r"^-*(configs?\.)?", "", word), tree)
    found = [f"{PREFIX}{key} {shlex.quote(text) if text else 'VALUE'}" for key in keys]
    return f"; write {' or '.join(found)}" if found else ""


def literal(text: str, key: str) -> Any:
    """The value of a word: null, true, 5, 1e-4, [1, 2], {k: 1}, "quoted", otherwise the word itself."""
    if re.fullmatch(rf"[+-]?({NUMBER}|inf)", text):
        return number(text)
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    if not re.fullmatch(r"(?is)null|none|~|true|false|\[.*\]|\{.*\}", text):
        return text
    try:  # as YAML, where None is text
        nulls = re.sub(r"(?<=[\[{:, ])None(?=[\]},\s])|(?i:^none$)", "null", text)
        content: Any = OmegaConf.to_container(OmegaConf.create(f"value: {nulls}"))
        return content["value"]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{key}: {short(text)} is no list or mapping: {short(reason, 160)}") from error
