"""The config tree under construction. It contains only nested `Config` mappings, lists and scalars."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dgc_training.config.errors import closest
from dgc_training.config.targets import SPECIAL, import_path

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_keys, dict_values

Path = tuple[str, ...]  # ("train", "optimizer", "lr")
MISSING = object()


class Config(dict[str, Any]):
    """A node of the tree: `Config(Target, key=value, ...)` describes a later call; Config() is a mapping.

    With _partial_=True the built object is a function that takes further arguments. Keys are also attributes.
    Changing `_target_` keeps the other keys. A derived value reads as its formula, so a copy of it stays derived.

    items(), keys() and values() are the constructor's keywords, without `_target_` and `_partial_`, so that a loop
    over them copies the keywords into a node of another constructor.

    Args:
        target: an importable class or function, or its import path. It is stored as the path.
        keys: keywords of the target: None, bool, int, float, str, list or Config.

    Raises:
        ValueError: for any other value.
    """

    def __init__(self, target: Any = None, /, *args: Any, **keys: Any) -> None:
        super().__init__()
        if args:
            raise ValueError(
                f"Config({_name(target)}, ...) takes arguments by name only: Config(Target, key=value)"
            )
        if target is not None:
            self["_target_"] = target
        self.update(keys)

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str) or not key:
            raise ValueError(f"a config key must be a non-empty string, not {key!r}")
        if key == "_target_" and not isinstance(value, str):
            value = import_path(value)
        super().__setitem__(key, plain(value, key))

    def __setattr__(self, key: str, value: Any) -> None:
        if hasattr(dict, key):
            raise ValueError(f"{key!r} is also a method of a mapping: write configs[...][{key!r}]")
        self[key] = value

    def __getattr__(self, key: str) -> Any:
        if key in self:
            return self[key]
        raise AttributeError(f"no key {key!r} here" + closest(key, self))

    def __delattr__(self, key: str) -> None:
        if key not in self:
            raise AttributeError(f"no key {key!r} here" + closest(key, self))
        del self[key]

    def items(self) -> "dict_items[str, Any]":
        """A copy of all (keyword, value) pairs. The node may change during iteration."""
        return {key: value for key, value in super().items() if key not in SPECIAL}.items()

    def keys(self) -> "dict_keys[str, Any]":
        """The keywords."""
        return dict(self.items()).keys()

    def values(self) -> "dict_values[str, Any]":
        """The keywords' values."""
        return dict(self.items()).values()

    def update(self, *others: Any, **keys: Any) -> None:
        """Like dict.update, with every value checked."""
        for key, value in dict(*others, **keys).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Like dict.setdefault, with the value checked."""
        if key not in self:
            self[key] = default
        return self[key]


def entries(node: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """All of a mapping's keys and values, `_target_` and `_partial_` too."""
    return dict.items(node)


def _name(target: Any) -> str:
    return getattr(target, "__name__", str(target))


def plain(value: Any, key: str = "configs") -> Any:
    """Checks a value. Copies other mappings to Config objects, and tuples and lists to lists."""
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, Config):
        return value
    if isinstance(value, dict):
        node = Config()
        node.update(value)
        return node
    if isinstance(value, list | tuple):
        return [plain(item, f"{key}.{i}") for i, item in enumerate(value)]
    if isinstance(value, type) or callable(value):
        raise ValueError(f"{key} is {_name(value)} itself; write Config({_name(value)})")
    raise ValueError(
        f"{key} is of type {type(value).__name__}; only null, bool, int, float, str, list and Config fit"
    )


def copy(value: Any) -> Any:
    """A deep copy with all values checked. A node that occurs twice becomes two nodes."""
    if isinstance(value, dict):
        node = Config()
        node.update({key: copy(item) for key, item in entries(value)})
        return node
    return [copy(item) for item in value] if isinstance(value, list | tuple) else plain(value)


def container(value: Any) -> Any:
    """Converts to plain dicts and lists, as input for OmegaConf."""
    if isinstance(value, dict):
        return {key: container(item) for key, item in entries(value)}
    return [container(item) for item in value] if isinstance(value, list) else value


def merges(old: Any, value: Any) -> bool:
    """Whether `value` is merged into the node `old`: a mapping with the same constructor, or without one.

    Any other value replaces the node.
    """
    if not isinstance(old, Config) or not isinstance(value, dict):
        return False
    return "_target_" not in value or value["_target_"] == old.get("_target_")


def merge_(node: Config, other: dict[str, Any]) -> None:
    """Merges a mapping into a node, as for a YAML file: nested mappings key by key if `merges`, else replaced."""
    for key, value in entries(other):
        if merges(node.get(key), value):
            merge_(node[key], value)
        else:
            node[key] = value


def restore_(node: Config, before: Config, path: Path) -> None:
    """Sets `path` to its value in `before`, or removes it if it has none there."""
    for n, key in enumerate(path, 1):
        value = lookup(before, path[:n])
        if value is MISSING:
            node.pop(key, None)
            return
        if n == len(path) or not isinstance(node.get(key), Config):
            node[key] = copy(value)
            return
        node = node[key]


def leaves(node: dict[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields every (path, value), parents first. The value of a mapping is the mapping; lists are leaves."""
    for key, value in entries(node):
        yield (*prefix, key), value
        if isinstance(value, dict):
            yield from leaves(value, (*prefix, key))


def lookup(node: Any, path: Path) -> Any:
    """The value at `path`; MISSING if there is none."""
    for key in path:
        node = node.get(key, MISSING) if isinstance(node, dict) else MISSING
    return node


def suggest(key: str, siblings: dict[str, Any], tree: Config) -> str:
    """A suggestion for an unknown key: the same key elsewhere in the tree, or a similar one."""
    elsewhere = [dotted(path) for path, _ in leaves(tree) if path[-1] == key]
    return f"; there is {', '.join(elsewhere[:3])}" if elsewhere else closest(key, siblings)


def is_constructor(value: Any) -> bool:
    """Whether a node names a `_target_`."""
    return isinstance(value, Config) and "_target_" in value


def of_constructors(value: Any) -> bool:
    """Whether a mapping contains only constructors, under names of the user's choice, such as meters."""
    return isinstance(value, Config) and bool(value) and all(is_constructor(item) for _, item in entries(value))


def dotted(path: Path) -> str:
    """("train", "optimizer") -> "train.optimizer"."""
    return ".".join(path)
