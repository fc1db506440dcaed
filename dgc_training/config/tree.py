"""The tree that config files change: nested `Config` mappings, lists, scalars, and formulas as text."""

from dataclasses import dataclass
from typing import Any

from dgc_training.constructors import SPECIAL, import_path
from dgc_training.errors import ConfigError, closest, short
from dgc_training.formulas import is_formula

DEEPEST = 40  # levels of nested mappings and lists: OmegaConf recurses, and Python ends that at twice as many


class Config(dict[str, Any]):
    """A node of the tree: `Config(Target, key=value, ...)` describes a later call; Config() is a mapping.

    Keys are also attributes. items(), keys() and values() leave out `_target_` and `_partial_`: a loop over them
    copies the keywords into another node. A derived value reads as its formula, so a copy stays derived.

    Args:
        target: an importable class or function, or its import path, which is what the node has.
        keys: keywords of the target: None, bool, int, float, str, list or Config. ValueError for any other value.
    """

    def __init__(self, target: Any = None, /, **keys: Any) -> None:
        self.update({} if target is None else {"_target_": target}, **keys)

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str) or not key:
            raise ValueError(f"a config key must be a non-empty string, not {key!r}")
        if key == "_target_" and not isinstance(value, str):
            value = import_path(value)
        super().__setitem__(key, value if isinstance(value, Config | Key) else copied(value, key))

    def __getattribute__(self, key: str) -> Any:
        return self[key] if key == "values" and key in self else super().__getattribute__(key)

    def __getattr__(self, key: str) -> Any:
        if key in self:
            return self[key]
        raise AttributeError(f"no key {key!r} here{closest(key, self)}")

    def __setattr__(self, key: str, value: Any) -> None:
        if hasattr(dict, key) and key != "values":
            raise ValueError(f"{key!r} is also a method of a mapping: write configs[...][{key!r}]")
        self[key] = value

    __delattr__ = dict.__delitem__

    def items(self) -> Any:
        return {key: self[key] for key in self if key not in SPECIAL}.items()

    def keys(self) -> Any:
        return dict(self.items()).keys()

    def values(self) -> Any:
        return dict(self.items()).values()

    def update(self, *others: Any, **keys: Any) -> None:
        for key, value in dict(*others, **keys).items():
            self[key] = value


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


def declare_(section: dict[str, Any], node: dict[str, Any]) -> None:
    """Declares the keys of a root base, and those that `configs.train = Config()` leaves out stay."""
    for name in node:
        value = node[name]
        is_section = isinstance(value, dict) and value and "_target_" not in value
        kind = Any if value is None or is_formula(value) else dict if value == {} else type(value)
        key: Any = value if isinstance(value, Key) else {} if is_section else Key((kind, None))
        if isinstance(known := section.setdefault(name, key), dict) and isinstance(value, dict):
            for inner in known:
                value.setdefault(inner, known[inner])
            declare_(known, value)


def copied(value: Any, key: str = "configs", mapping: Any = Config, levels: int = DEEPEST) -> Any:
    """A copy with mappings of one class, lists for tuples, and defaults for keys.

    Raises:
        ValueError: A value is of another type, or inside of more than `levels` mappings and lists.
    """
    if not levels:
        raise ValueError(f"{key} is nested deeper than {DEEPEST} levels, or contains itself")
    if isinstance(value, dict):
        node = mapping()
        for name in value:
            node[name] = copied(value[name], name, mapping, levels - 1)
        return node
    if isinstance(value, list | tuple):
        return [copied(item, key, mapping, levels - 1) for item in value]
    if isinstance(value, Key):
        return copied(value.default, key, mapping)
    if type(value) in (bool, int, float, str, type(None)):
        return value
    accepted = "null, bool, int, float, str, list or Config(Class, ...)"
    raise ValueError(f"{key} is {short(repr(value))}, but it must be {accepted}")


def merge_(node: Any, other: dict[Any, Any]) -> None:
    """Merges a mapping into a mapping or a list. Mappings with one constructor, or none, merge; others replace."""
    for key, value in other.items():
        if isinstance(node, list):
            if not (str(key).isdecimal() and int(key) < len(node)):
                raise ConfigError(f"there is no {key!r} in a list of {len(node)}")
            key = int(key)
        old = node[key] if isinstance(node, list) else node.get(key)
        target = old.get("_target_") if isinstance(old, dict) else None
        if isinstance(old, dict | list) and isinstance(value, dict) and value.get("_target_", target) == target:
            merge_(old, value)
        else:
            node[key] = value


def assign_(node: Any, key: str, value: Any) -> None:
    """Sets a dotted key. Mappings that do not exist are created. A mapping is merged, but {} empties the node."""
    *above, last = key.split(".")
    for name in above:
        merge_(node, {name: {}})
        node = node[int(name) if isinstance(node, list) else name]
    if value == {}:
        merge_(node, {last: None})
    merge_(node, {last: value})


def leaves(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted key: value}, parents first. The value of a mapping is the mapping; lists are leaves."""
    found = {}
    for key in node:
        found[f"{prefix}{key}"] = node[key]
        if isinstance(node[key], dict):
            found |= leaves(node[key], f"{prefix}{key}.")
    return found
