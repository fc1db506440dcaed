"""The layers of a load: each file and each override changes one tree, which records who set each value."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dgc_training.config.errors import ConfigError, short
from dgc_training.config.formulas import is_formula
from dgc_training.config.layers import ROOT_BASE, bases_of, execute, parse_yaml, show
from dgc_training.config.targets import Key, kind_of
from dgc_training.config.tree import Config, Keys, checked, dotted, leaves, merge_, plain


class Stack:
    """The tree of all layers so far. The shipped root base is the first layer of every stack.

    Attributes:
        tree: the values as nested dicts and lists, with formulas as text.
        keys: the declared keys, parents first.
        origins: the layer that last set, changed or removed each key.
    """

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.keys: dict[Keys, Key] = {}
        self.origins: dict[Keys, str] = {}
        self._bases: set[Path] = set()  # those that have been applied
        self.add(ROOT_BASE)

    def origin(self, path: Keys) -> str:
        """The layer that set the value at `path`, or the closest node that contains it."""
        known = [path[:n] for n in range(len(path), 0, -1) if path[:n] in self.origins]
        return self.origins[known[0]] if known else "nobody"

    def add(self, file: Path, first: bool = False) -> None:
        """Applies a file, after its bases that have not been applied yet. `first`: no file is before it."""
        bases = bases_of(file)
        for layer in bases if file in bases else [*bases, file]:
            if layer.resolve() in self._bases:
                continue
            self._bases |= {layer.resolve()} if layer in bases else set()
            if layer.suffix == ".py":
                self.apply(partial(execute, layer), show(layer), declares=layer in bases[:1])
                continue
            content = parse_yaml(layer)
            # A file with all declared keys, like the config.yaml of a run, replaces the tree. It may have further
            # keys, which its own stack declared.
            is_saved = first and not bases and self.keys.keys() <= dict(leaves(content)).keys()
            self.apply(partial(merge_, other=content), show(layer), is_saved or layer in bases[:1], is_saved)

    def apply(
        self, change: Callable[[Config], None], origin: str, declares: bool = False, replaces: bool = False
    ) -> None:
        """Applies one layer: `change` edits a copy of the tree, or an empty one if the layer replaces it.

        Raises ConfigError if the change fails, or if it requires another value than an earlier layer.
        """
        node = checked({} if replaces else self.tree)
        read = dict(leaves(node))
        try:
            change(node)
            new = {(): node, **dict(leaves(node))}
            for path in self.keys if declares else ():
                section = new.get(path[:-1])
                if path in read and isinstance(section, Config) and section is not read.get(path[:-1], node):
                    section.setdefault(path[-1], read[path])  # after `configs.train = Config()`
            tree = plain(node)
            before, after = dict(leaves(self.tree)), dict(leaves(tree))
            same = {path for path in before.keys() & after.keys() if _text(before[path]) == _text(after[path])}
            changed = {path: after.get(path) for path in {**before, **after} if path not in same}
            formulas = {dotted(path): value for path, value in changed.items() if "${" in _text(value)}
            OmegaConf.create(formulas)  # raises if one cannot be read
        except OmegaConfBaseException as error:
            reason = short(str(error).splitlines()[0], 160)
            raise ConfigError(f"{origin}: {error.full_key} is no value or formula: {reason}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(str(error) if origin in str(error) else f"{origin}: {error}") from error
        for path, value in leaves(node) if declares else ():
            if path not in self.keys and (
                len(path) == 1 or path[:-1] in self.keys and self.keys[path[:-1]].section
            ):
                kind = "Any" if value is None or is_formula(value) else kind_of(value)
                known = Key(dict, section=True) if kind == "dict" and value else Key(f"{kind} | None")
                self.keys[path] = value if isinstance(value, Key) else known
        self._check_requirements(tree, origin)
        self.origins |= dict.fromkeys(changed, origin)
        self.tree = tree

    def _check_requirements(self, tree: dict[str, Any], origin: str) -> None:
        """Raises ConfigError if two layers require different values, as two compression methods do."""
        before, now = self.tree.get("requires"), tree.get("requires")
        if not isinstance(before, dict) or not isinstance(now, dict):
            return  # reported when the finished tree is checked
        for key in before:
            if key in now and before[key] != now[key]:
                raise ConfigError(
                    f"{origin} needs {key} to be {now[key]}, but {self.origin(('requires', key))} needs "
                    f"{before[key]}; leave out the one or the other"
                )


def _text(value: Any) -> str:
    """Differs if values or their types do. Mappings are compared key by key."""
    return "{}" if isinstance(value, dict) else repr(value)
