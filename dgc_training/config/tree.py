"""The tree that a config file changes: nested `Config` mappings, lists and scalars, and what its keys accept."""

import difflib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dgc_training.constructors import SPECIAL, import_path, signature
from dgc_training.errors import ConfigError, closest, short

# Kinds of values, as messages name them.
_KINDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}
_KINDS |= {"list": "a list", "dict": "a mapping", "Config": "a node that names its constructor (_target_)"}
# Kinds and further words for them in annotations. An annotation with any other word accepts every value.
_ALIASES = {"list": "List tuple Tuple Sequence Iterable Collection", "None": "NoneType Optional"}
_ALIASES |= {"": "Union Tensor torch typing collections abc dgc_training config tree"}
_WORDS = {word: kind for kind in (*_KINDS, *_ALIASES) for word in f"{kind} {_ALIASES.get(kind, '')}".split()}
_NODES = {"Config", "None"}


@dataclass(frozen=True)
class Key:
    """What a key of the tree accepts. The root base declares its keys: `configs.seed = Key(int, 42, least=0)`.

    Args:
        type: bool, int, float, str, list, dict, Config (a node that names its constructor), or a union of them.
        default: value before any other file. If it is None, but `type` is not, an experiment must set the key.
        least: the smallest value.
        items: what the values of a mapping with free names accept.
    """

    type: Any
    default: Any = None
    least: float | None = None
    items: "Key | None" = None

    def kinds(self) -> set[str]:
        """The kinds of accepted values; empty: every value."""
        words = re.findall(r"\w+", inspect.formatannotation(self.type))
        return {_WORDS[word] for word in words} - {""} if _WORDS.keys() >= set(words) else set()

    def wanted(self, value: Any) -> str:
        """What the value must be instead; '' if it is accepted. 100.0 is accepted as a whole number."""
        kinds, fitting = self.kinds(), kinds_of(value)
        too_small = self.least is not None and "float" in fitting and not value >= self.least
        if not kinds or kinds.intersection(fitting) and not too_small:
            return ""
        names = [name for kind, name in _KINDS.items() if kind in kinds and (kind != "Config" or kinds <= _NODES)]
        return " or ".join(names) + (f", at least {self.least}" if self.least is not None else "")


ANYTHING = Key(Any)
VALUES = "values"  # a keyword of compressors, and a method of mappings


def key_of(kinds: set[str], default: Any = None) -> Key:
    """Accepts these kinds, null and a node, of which the constructor gets the object. Without kinds: anything."""
    return Key(" | ".join(kinds | _NODES) if kinds - _NODES else Any, default)


def kinds_of(value: Any) -> list[str]:
    """The kind of a value, and the other kind that it is accepted as. "None", or keys of `_KINDS`."""
    kind = "None" if value is None else type(value).__name__
    if isinstance(value, dict):
        return ["Config", "dict"] if "_target_" in value else ["dict"]
    if kind == "int" or kind == "float" and value.is_integer():
        return [kind, "float" if kind == "int" else "int"]
    return [kind]


def keywords(target: Any) -> dict[str, Key] | None:
    """What the keywords of `target` accept, by annotation or default. None if it accepts any keyword."""
    parameters = signature(target).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    keys = {"_target_": Key(str), "_partial_": Key(bool)}
    for p in parameters:
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            # A default of 0 is common where fractions are accepted.
            default = {bool: "bool", int: "int | float", float: "float", str: "str"}.get(type(p.default), Any)
            keys[p.name] = key_of(Key(default if p.annotation is p.empty else p.annotation).kinds(), p.default)
    return keys


class Config(dict[str, Any]):
    """A node of the tree: `Config(Target, key=value, ...)` describes a later call; Config() is a mapping.

    Keys are also attributes, `values` as well where it is a key. A derived value reads as its formula, so a copy
    of it stays derived. items(), keys() and values() leave out `_target_` and `_partial_`, so that a loop over
    them copies the keywords into a node of another constructor.

    Args:
        target: an importable class or function, or its import path. It is stored as the path.
        keys: keywords of the target: None, bool, int, float, str, list or Config.

    Raises:
        ValueError: for any other value.
    """

    def __init__(self, target: Any = None, /, *args: Any, **keys: Any) -> None:
        super().__init__()
        if args:
            raise ValueError("Config takes arguments by name only: Config(Target, key=value)")
        self.update({} if target is None else {"_target_": target}, **keys)

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str) or not key:
            raise ValueError(f"a config key must be a non-empty string, not {key!r}")
        is_object = key == "_target_" and not isinstance(value, str)
        super().__setitem__(key, import_path(value) if is_object else checked(value, key))

    def __getattribute__(self, key: str) -> Any:
        if key == VALUES and dict.__contains__(self, key):
            return self[key]
        return super().__getattribute__(key)

    def __setattr__(self, key: str, value: Any) -> None:
        if hasattr(dict, key) and key != VALUES:
            raise ValueError(f"{key!r} is also a method of a mapping: write configs[...][{key!r}]")
        self[key] = value

    def __getattr__(self, key: str) -> Any:
        if key in self:
            return self[key]
        raise AttributeError(f"no key {key!r} here{closest(key, self)}")

    def __delattr__(self, key: str) -> None:
        self.__getattr__(key)
        del self[key]

    def items(self) -> Any:
        """A copy of all (keyword, value) pairs, so that the node may change during iteration."""
        return {key: self[key] for key in self if key not in SPECIAL}.items()

    def keys(self) -> Any:
        return dict(self.items()).keys()

    def values(self) -> Any:
        return dict(self.items()).values()

    def update(self, *others: Any, **keys: Any) -> None:
        """Like dict.update, with every value checked."""
        for key, value in dict(*others, **keys).items():
            self[key] = value


def checked(value: Any, key: str = "configs") -> Any:
    """Returns the value, with other mappings as Config objects and tuples as lists. Raises ValueError."""
    if isinstance(value, list | tuple):
        return [checked(item, key) for item in value]
    if isinstance(value, dict) and not isinstance(value, Config):
        node = Config()
        node.update(value)
        return node
    if value is None or isinstance(value, Config | Key) or type(value) in (bool, int, float, str):
        return value
    accepted = "null, bool, int, float, str, list or Config(Class, ...)"
    raise ValueError(f"{key} is {short(repr(value))}, but it must be {accepted}")


def plain(value: Any, key: str = "configs") -> Any:
    """Copies a node to nested dicts and lists, with all values checked. A Key becomes its default."""
    value = checked(value.default if isinstance(value, Key) else value, key)
    if isinstance(value, dict):
        return {name: plain(value[name], name) for name in value}
    return [plain(item, key) for item in value] if isinstance(value, list) else value


def merge_(node: Config | list[Any], other: dict[str, Any]) -> None:
    """Merges a mapping into a node: nested mappings key by key if they name the same constructor or none. Another
    value replaces the old one. Raises ConfigError for a key that is no index of a list.
    """
    for key, value in other.items():
        at, old = _child(node, key)
        target = old.get("_target_") if isinstance(old, Config) else None
        if isinstance(old, Config | list) and isinstance(value, dict) and value.get("_target_", target) == target:
            merge_(old, value)
        else:
            node[at] = value


def assign_(tree: Config, key: str, value: Any) -> None:
    """Sets a dotted key. Mappings that do not exist are created. A mapping is merged, but {} empties the node."""
    *above, last = key.split(".")
    node: Any = tree
    for name in above:
        merge_(node, {name: {}})
        node = _child(node, name)[1]
    if value == {}:
        merge_(node, {last: None})
    merge_(node, {last: value})


def _child(node: Config | list[Any], key: str) -> tuple[Any, Any]:
    """The key, or the index in a list, and its value: None if there is none."""
    if not isinstance(node, list):
        return key, node.get(key)
    if not str(key).isdecimal() or int(key) >= len(node):
        raise ConfigError(f"there is no {key!r} in a list of {len(node)}")
    return int(key), node[int(key)]


def leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value), parents first. The value of a mapping is the mapping; lists are leaves."""
    for key in node:
        yield f"{prefix}{key}", node[key]
        if isinstance(node[key], dict):
            yield from leaves(node[key], f"{prefix}{key}.")


def similar(name: str, tree: dict[str, Any], without: str = "") -> list[str]:
    """The dotted key `name`, or up to three that end in it, or the closest one. `without` is left out."""
    keys = [key for key, _ in leaves(tree) if not f"{key}.".startswith(f"{without}.")]
    same = [key for key in keys if name and f".{key}".endswith(f".{name}")]
    return [name] if name in same else same[:3] or difflib.get_close_matches(name, keys, n=1, cutoff=0.75)
