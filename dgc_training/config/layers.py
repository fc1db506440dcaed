"""The layers of a load: config files, found by name, and overrides of the command line, which are never code."""

import os
import re
import shlex
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dgc_training.config.earlier import converted, key_now
from dgc_training.config.formulas import NUMBER, is_formula, number
from dgc_training.config.tree import Config, Key, assign_, checked, kinds_of, leaves, merge_, plain, similar
from dgc_training.errors import ConfigError, closest, collecting, short

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT_BASE = REPOSITORY / "configs" / "__init__.py"
SUFFIXES = (".py", ".yaml", ".yml")
UNDER_CONSTRUCTION: ContextVar[Config | None] = ContextVar("configs", default=None)
PREFIX = "--configs."
RULE = "config files follow --configs, overrides are written --configs.KEY VALUE, a list as '[1,2]'"
# The flags of train.py. They are only used to suggest the spelling of an unknown flag.
FLAGS = "--configs --devices --evaluate --suffix --run-dir --no-resume --print-config --help".split()


class Stack:
    """The tree of all layers so far. The shipped root base is the first layer of every stack.

    Attributes:
        tree: the values as nested dicts and lists, with formulas as text.
        sections: {dotted key: {name: Key}}, the mappings in which only declared keys are accepted.
        origins: the layer that last set, changed or removed each key.
    """

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.sections: dict[str, dict[str, Key]] = {"": {}}
        self.origins: dict[str, str] = {}
        self._bases: set[Path] = set()  # those that have been applied
        self.add(ROOT_BASE)

    def origin(self, path: str) -> str:
        """The layer that set the value at `path`, or the closest node that contains it."""
        while path and path not in self.origins:
            path = path.rpartition(".")[0]
        return self.origins.get(path, "nobody")

    def add(self, file: Path) -> None:
        """Applies a file, after its bases that have not been applied yet."""
        bases = bases_of(file)
        is_first = {*self.origins.values()} == {show(ROOT_BASE)}
        for layer in bases if file in bases else [*bases, file]:
            if layer.resolve() in self._bases:
                continue
            self._bases |= {layer.resolve()} if layer in bases else set()
            if layer.suffix == ".py":
                self.apply(show(layer), execute, layer, declares=layer in bases[:1])
                continue
            content = parse_yaml(layer)
            if is_first and not bases:  # it may be the config.yaml of a run of an earlier version
                content = converted(content)
            # A first file with all declared keys, like the config.yaml of a run, replaces the tree. It may have
            # further keys, which its own stack declared.
            declared = {f"{path}.{name}".lstrip(".") for path, keys in self.sections.items() for name in keys}
            is_saved = is_first and not bases and declared <= dict(leaves(content)).keys()
            change = Config.update if is_saved else merge_
            self.apply(show(layer), change, content, declares=is_saved or layer in bases[:1])

    def override(self, words: Sequence[str], problems: list[str]) -> None:
        """Applies the words of a command line. Each that is no override, or cannot be applied, is a problem."""
        rest = list(words)
        while rest:
            word = rest.pop(0)
            key, equals, text = word.partition("=")
            if word.startswith("--") and not equals and rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            with collecting(problems):
                if not key.startswith(PREFIX) or key == PREFIX:
                    near = prefixed(key, text, self.tree) or closest(key, FLAGS, 0) or f"; {RULE}"
                    raise ConfigError(f"unexpected {word!r} on the command line{near}")
                if not text.strip():
                    cure = f"write {key} VALUE: null for none, '\"\"' for the empty string"
                    raise ConfigError(f"{key} has no value; {cure}")
                value = literal(text.strip(), key)
                if (now := key_now(key.removeprefix(PREFIX), self.tree)) is not None:
                    raise ConfigError(f"{key}: local steps are not gossip; write {PREFIX}{now}")
                self.apply(f"command line, {key}", assign_, key.removeprefix(PREFIX), value)

    def apply(self, origin: str, change: Callable[..., None], *args: Any, declares: bool = False) -> None:
        """Applies one layer: `change` edits a copy of the tree. `declares`: whether it adds keys to sections."""
        node = checked(self.tree)
        sections = {path: value for path, value in leaves(node) if path in self.sections}
        try:
            change(node, *args)
            for path, value in leaves(node) if declares else ():
                if path in sections and isinstance(value, Config):  # it may be new: `configs.train = Config()`
                    for key in sections[path]:
                        value.setdefault(key, sections[path][key])
            tree = plain(node)
            OmegaConf.create(tree)
        except OmegaConfBaseException as error:  # a formula that cannot be read
            reason = short(str(error).splitlines()[0], 160)
            raise ConfigError(f"{origin}: {error.full_key} is no value or formula: {reason}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(str(error) if origin in str(error) else f"{origin}: {error}") from error
        if declares:
            self._declare(node)
        before, after = dict(leaves(self.tree)), dict(leaves(tree))
        paths = {**before, **after}
        changed = [path for path in paths if repr(before.get(path, ...)) != repr(after.get(path, ...))]
        for path in changed:  # two layers may not require different values, as two compression methods do
            if path.startswith("requires.") and path in before and path in after:
                needs = f"{origin} needs {path.removeprefix('requires.')} to be {after[path]}"
                other = f"{self.origin(path)} needs {before[path]}"
                raise ConfigError(f"{needs}, but {other}; leave out the one or the other")
        self.origins |= dict.fromkeys(changed, origin)
        self.tree = tree

    def _declare(self, node: Config) -> None:
        """Accepts the keys that are new in a section from now on. A mapping with keys becomes a section."""
        for path, value in leaves(node):
            section, _, name = path.rpartition(".")
            if name in self.sections.get(section, (name,)):
                continue
            kind = "Any" if value is None or is_formula(value) else kinds_of(value)[0]
            self.sections[section][name] = value if isinstance(value, Key) else Key(f"{kind} | None")
            if kind == "dict" and value:
                self.sections[section][name], self.sections[path] = Key(dict, {}), {}


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
    base = _existing(file.parent / "__init__")
    return [*bases_of(file.parent), base] if base else []


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


def execute(tree: Config, file: Path) -> None:
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
            last = len(file.read_text().splitlines())  # YAML counts the end of a file as one more line
            line, reason = f", line {min(error.problem_mark.line + 1, last)}", str(error.problem)
        raise ConfigError(f"{show(file)}{line}: {reason}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{show(file)}: a config file is a mapping of keys, not a list")
    return content


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
