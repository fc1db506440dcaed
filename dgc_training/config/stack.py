"""The layers of a load: each file and each override changes one tree, which records who set each value."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dgc_training.config.formulas import is_formula
from dgc_training.config.keys import ANYTHING, Key, kind_of
from dgc_training.config.layers import ROOT_BASE, bases_of, execute, parse_yaml, show
from dgc_training.config.tree import Config, checked, leaves, merge_, plain
from dgc_training.errors import ConfigError, short


class Stack:
    """The tree of all layers so far. The shipped root base is the first layer of every stack.

    Attributes:
        tree: the values as nested dicts and lists, with formulas as text.
        keys: what the declared keys accept, parents first.
        origins: the layer that last set, changed or removed each key.
    """

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.keys = {"": Key(dict, section=True)}
        self.origins: dict[str, str] = {}
        self._bases: set[Path] = set()  # those that have been applied
        self.add(ROOT_BASE)

    def origin(self, path: str) -> str:
        """The layer that set the value at `path`, or the closest node that contains it."""
        while path and path not in self.origins:
            path = path.rpartition(".")[0]
        return self.origins.get(path, "nobody")

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
            is_saved = first and not bases and self.keys.keys() - {""} <= dict(leaves(content)).keys()
            self.apply(partial(merge_, other=content), show(layer), is_saved or layer in bases[:1], is_saved)

    def apply(
        self, change: Callable[[Config], None], origin: str, declares: bool = False, replaces: bool = False
    ) -> None:
        """Applies one layer: `change` edits a copy of the tree, or an empty one if the layer replaces it."""
        node = checked({} if replaces else self.tree)
        sections = {path: value for path, value in leaves(node) if self.keys.get(path, ANYTHING).section}
        try:
            change(node)
            for path, value in leaves(node) if declares else ():
                if path in sections and isinstance(value, Config):  # it may be new: `configs.train = Config()`
                    for key in sections[path]:
                        value.setdefault(key, sections[path][key])
            tree = plain(node)
            before, after = dict(leaves(self.tree)), dict(leaves(tree))
            paths = {**before, **after}
            changed = [path for path in paths if _text(before.get(path, ...)) != _text(after.get(path, ...))]
            OmegaConf.create({path: after[path] for path in changed if "${" in _text(after.get(path))})
        except OmegaConfBaseException as error:  # a formula that cannot be read
            reason = short(str(error).splitlines()[0], 160)
            raise ConfigError(f"{origin}: {error.full_key} is no value or formula: {reason}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(str(error) if origin in str(error) else f"{origin}: {error}") from error
        for path, value in leaves(node) if declares else ():
            if path not in self.keys and self.keys.get(path.rpartition(".")[0], ANYTHING).section:
                kind = "Any" if value is None or is_formula(value) else kind_of(value)
                known = Key(dict, section=True) if kind == "dict" and value else Key(f"{kind} | None")
                self.keys[path] = value if isinstance(value, Key) else known
        for path in changed:  # two layers may not require different values, as two compression methods do
            if path.startswith("requires.") and path in before and path in after:
                needs = f"{origin} needs {path.removeprefix('requires.')} to be {after[path]}"
                other = f"{self.origin(path)} needs {before[path]}"
                raise ConfigError(f"{needs}, but {other}; leave out the one or the other")
        self.origins |= dict.fromkeys(changed, origin)
        self.tree = tree


def _text(value: Any) -> str:
    """Differs if values or their types do. Mappings are compared key by key."""
    return "{}" if isinstance(value, dict) else repr(value)
