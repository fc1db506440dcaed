"""The layers of a stack: config files, found by name and read, and overrides on the command line.

An override is written `--configs.train.num_epochs 500` or `--configs.train.num_epochs=500`. Its value is a
literal, never code.
"""

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

from dgc_training.config.errors import ConfigError, closest, collecting, short
from dgc_training.config.tree import Config, similar

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT_BASE = REPOSITORY / "configs" / "__init__.py"
SUFFIXES = (".py", ".yaml", ".yml")
UNDER_CONSTRUCTION: ContextVar[Config | None] = ContextVar("configs", default=None)
PREFIX = "--configs."
# The flags of train.py. They are only used to suggest the spelling of an unknown flag.
FLAGS = "--configs --devices --evaluate --suffix --run-dir --no-resume --print-config --help".split()
_WORDS = {"null": None, "none": None, "~": None, "true": True, "false": False}
_INT = re.compile(r"[+-]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[+-]?(((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|inf)", re.IGNORECASE)


def _with_suffix(path: Path) -> list[Path]:
    return [file for suffix in SUFFIXES if (file := Path(f"{path}{suffix}")).is_file()]


def bases_of(file: Path) -> list[Path]:
    """The bases that apply before `file`, topmost first: those of its folder and of all folders above, up to the
    first one without a base. Raises ConfigError if a folder has two.
    """
    bases: list[Path] = []
    for folder in file.parents:
        found = _with_suffix(folder / "__init__")
        if len(found) > 1:
            raise ConfigError(f"{show(folder)} has two bases: {', '.join(file.name for file in found)}")
        if not found:
            break
        bases = [*found, *bases]
    return bases


def find(name: str | os.PathLike[str], tree: dict[str, Any]) -> Path:
    """The absolute path of config file `name`, searched in the working directory and then in the repository.

    The suffix may be left out. A folder stands for its base. Raises ConfigError unless exactly one file matches.
    """
    folder = ROOT_BASE.parent
    for root in (Path.cwd(), REPOSITORY):
        path = Path(os.path.abspath(root / Path(name).expanduser()))
        found = [path] if path.is_file() else [*_with_suffix(path), *_with_suffix(path / "__init__")]
        if len(found) > 1:
            raise ConfigError(f"{name} may mean {' or '.join(map(show, found))}; write which")
        if found and found[0].suffix not in SUFFIXES:
            raise ConfigError(f"{name} is no config file; they end in {', '.join(SUFFIXES)}")
        if found:
            return found[0]
        folder = path if path.is_dir() else folder
    key, equals, value = str(name).partition("=")
    near = prefixed(key, value, tree) if equals else ""
    raise ConfigError(
        f"there is no config file {name}{near or closest(str(name), map(show, config_files(folder)), 30)}"
    )


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
    except yaml.MarkedYAMLError as error:
        # YAML counts the end of a file as one more line.
        last = len(file.read_text().splitlines())
        line = f", line {min(error.problem_mark.line + 1, last)}" if error.problem_mark else ""
        raise ConfigError(f"{show(file)}{line}: {error.problem}") from error
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(f"{show(file)}: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{show(file)}: a config file is a mapping of keys, not a list")
    return content


def parse(words: Sequence[str], tree: dict[str, Any], problems: list[str]) -> Iterator[tuple[str, Any]]:
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
        if not key.startswith(PREFIX) or key == PREFIX:
            near = prefixed(key, text, tree) or (closest(key, FLAGS, 0) if word.startswith("--") else "")
            rule = "config files follow --configs, overrides are written --configs.KEY VALUE, a list as '[1,2]'"
            problems.append(f"unexpected {word!r} on the command line{near or f'; {rule}'}")
        elif text is None or not text.strip():
            problems.append(f"{key} has no value; write {key} VALUE: null for none, '\"\"' for the empty string")
        else:
            with collecting(problems):
                yield key.removeprefix(PREFIX), literal(text.strip(), key)


def prefixed(word: str, text: str | None, tree: dict[str, Any]) -> str:
    """'; write --configs.KEY VALUE' if a word looks like a key of the tree without its prefix, otherwise ''."""
    value = "VALUE" if text is None else shlex.quote(text)
    found = [f"{PREFIX}{key} {value}" for key in similar(re.sub(r"^-*(configs?\.)?", "", word), tree)]
    return f"; write {' or '.join(found)}" if found else ""


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
    if text[0] + text[-1] not in ("[]", "{}"):
        return text
    try:  # as YAML, where None is text
        nulls = re.sub(r"(?<=[\[{:, ])None(?=[\]},\s])", "null", text)
        content: Any = OmegaConf.to_container(OmegaConf.create(f"value: {nulls}"))
        return content["value"]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
        reason = short(str(error).splitlines()[0], 160)
        raise ConfigError(f"{key}: {short(text)} is no list or mapping: {reason}") from error
