"""Loads a stack of config files and overrides as one checked tree."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dgc_training.config.changes import History, check_layer, is_declared, keep_declared_
from dgc_training.config.errors import ConfigError, short, together
from dgc_training.config.files import REPOSITORY, bases_of, config_files, find, parse_yaml, read_into_, show
from dgc_training.config.finish import RequirementError, check_finished
from dgc_training.config.overrides import assign_, parse, prefixed
from dgc_training.config.tree import MISSING, Config, copy, leaves, lookup

NEEDED = ("dataset", "model", "train.num_epochs", "train.batch_size")


def load(paths: Sequence[str | os.PathLike[str]], overrides: Sequence[str] = ()) -> DictConfig:
    """Loads config files and command-line overrides as one checked, read-only tree with its formulas.

    Args:
        paths: config files, searched in the working directory and then in the repository. `.py` and `.yaml` may be
            left out. A folder stands for its base.
        overrides: "--configs.train.num_epochs", "500" or "--configs.train.num_epochs=500".

    Raises:
        ConfigError: with one message for every wrong key or value: the key, the layer that set it, and the closest
            valid names. After a file that cannot be read, no further errors are listed.
    """
    stack = _Stack()
    files = _found(paths, stack)
    try:
        stack.add_all(files)
        for key, value in parse(overrides, stack.tree, stack.problems):
            stack.override(key, value)
        if lacking := stack.lacking():
            names = " or ".join(_experiments())
            raise ConfigError(
                f"no {', '.join(lacking)} in this stack; name an experiment first: --configs {names}"
            )
        tree = check_finished(stack.tree, stack.history, stack.problems)
    except RequirementError as error:
        raise together([*stack.problems, f"{error}{_cure(error, files)}"]) from error
    except ConfigError as error:
        raise together([*stack.problems, str(error)]) from error
    if stack.problems:
        raise together(stack.problems)
    return tree


def defaults() -> Config:
    """The tree of the root base, configs/__init__.py, which is the first layer of every stack."""
    return _Stack().tree


def to_yaml(tree: DictConfig, resolve: bool = False) -> str:
    """The tree as YAML.

    resolve=False keeps formulas: the file loads as the same tree, and derived values follow overrides.
    resolve=True writes the computed values instead.
    """
    return OmegaConf.to_yaml(tree, resolve=resolve)


class _Stack:
    """The tree so far, its history, and its problems.

    The shipped root base is the first layer of every stack, also for files outside of the repository.
    """

    def __init__(self) -> None:
        self.tree = Config()
        self.history = History()
        self.applied: set[Path] = set()  # bases
        self.problems: list[str] = []
        self.add(REPOSITORY / "configs" / "__init__.py")

    def apply(self, change: Callable[[Config], None], origin: str, declares: bool = False) -> None:
        """Applies one layer: `change` edits a copy of the tree, which is then checked against the tree.

        Raises ConfigError if the change itself fails. Errors in its result are added to `problems`.
        """
        after: Config = copy(self.tree)
        read = dict(leaves(after)) if declares else {}
        try:
            change(after)
            keep_declared_(self.tree, read, after, self.history.declared)
            after = copy(after)
        except ConfigError as error:
            raise ConfigError(str(error) if origin in str(error) else f"{origin}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{origin}: {error}") from error
        self._check_requirements(after, origin)
        self.problems += check_layer(self.history, self.tree, after, origin, declares)
        self.tree = after

    def _check_requirements(self, after: Config, origin: str) -> None:
        """Raises ConfigError if two layers require different values, as two compression methods do."""
        before, now = self.tree.get("requires") or {}, after.get("requires") or Config()
        if not isinstance(now, Config):
            raise ConfigError(f"{origin}: requires is {short(now)}, but it must be a mapping of dotted keys")
        for key in before.keys() & now.keys():
            if before[key] != now[key]:
                other = self.history.origin(("requires", key))
                raise ConfigError(
                    f"{origin} needs {key} to be {now[key]}, but {other} needs {before[key]}; leave out the one "
                    "or the other"
                )

    def override(self, key: str, value: Any) -> None:
        """Applies one override of the command line."""
        try:
            self.apply(partial(assign_, key=key, value=value), f"command line, --configs.{key}")
        except ConfigError as error:
            self.problems.append(str(error))

    def add_all(self, files: Sequence[Path]) -> None:
        """Applies files from left to right."""
        for n, file in enumerate(files):
            self.add(file, first=n == 0)

    def add(self, file: Path, first: bool = False) -> None:
        """Applies a file, after its bases that have not been applied yet."""
        bases = bases_of(file)
        for layer in bases if file in bases else [*bases, file]:
            if layer in bases:
                if layer.resolve() in self.applied:
                    continue
                self.applied.add(layer.resolve())
            saved = first and layer == file and not bases and self.is_saved_tree(file)
            change = partial(read_into_, file=layer, whole=saved)
            self.apply(change, show(layer), declares=saved or layer in bases[:1])

    def is_saved_tree(self, file: Path) -> bool:
        """Whether a YAML file has every declared key, like the config.yaml of a run.

        Such a file replaces the stack that it was saved from: its collections are complete, and it may have
        further keys that this stack declared.
        """
        if file.suffix == ".py":
            return False
        content, declared = parse_yaml(file), self.history.declared
        paths = [path for path, _ in leaves(declared) if is_declared(declared, path)]
        return all(lookup(content, path) is not MISSING for path in paths)

    def lacking(self) -> list[str]:
        """The keys in NEEDED that are not set."""
        return [key for key in NEEDED if lookup(self.tree, tuple(key.split("."))) in (None, MISSING)]


def _found(paths: Sequence[str | os.PathLike[str]], stack: _Stack) -> list[Path]:
    """The files of the paths. Raises one ConfigError for all paths without a file."""
    files, problems = [], []
    for path in paths:
        try:
            files.append(find(path))
        except ConfigError as error:
            key, equals, value = str(path).partition("=")
            meant = prefixed(key, value, stack.tree) if equals else ""
            problems.append(f"there is no config file {path}{meant}" if meant else str(error))
    if problems:
        raise together(problems)
    return files


def _experiments() -> list[str]:
    """The shipped files that are complete experiments on their own."""
    names = []
    for file in config_files(REPOSITORY / "configs"):
        stack = _Stack()
        with suppress(ConfigError):
            stack.add(file, first=True)
            if not stack.lacking():
                names.append(show(file))
    return names


def _cure(error: RequirementError, files: Sequence[Path]) -> str:
    """A hint with the right order: files that require a value come after files that change it."""
    late = [file for file in files if error.wanted_by in map(show, [*bases_of(file), file])]
    right = [*dict.fromkeys(file for file in files if file not in late), *dict.fromkeys(late)]
    if late and right != list(files):
        return f"; the right order is --configs {' '.join(map(show, right))}"
    names = " ".join(map(show, late)) or error.wanted_by
    return f"; leave out the one or the other: {error.found_in}, {names}"
