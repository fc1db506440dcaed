"""Checks the changes of one file or one override: only declared keys, and only values of the key's type."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dgc_training.config.errors import ConfigError, short
from dgc_training.config.targets import declared_types
from dgc_training.config.tree import (
    MISSING,
    Config,
    Path,
    container,
    copy,
    dotted,
    entries,
    is_constructor,
    leaves,
    lookup,
    of_constructors,
    restore_,
    suggest,
)

_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    Config: "a node",
}


@dataclass
class History:
    """State of earlier layers: the keys that root bases declare, and the origin and the type of each key."""

    declared: Config = field(default_factory=Config)
    origins: dict[Path, str] = field(default_factory=dict)
    # Type of the last value that was neither null nor a formula. The type of a list's items is under (..., "*").
    types: dict[Path, type | None] = field(default_factory=dict)

    def origin(self, path: Path) -> str:
        """The layer that set the value at `path`, or the closest node that contains it."""
        known = [path[:n] for n in range(len(path), 0, -1) if path[:n] in self.origins]
        return self.origins[known[0]] if known else "nobody"


def is_formula(value: Any) -> bool:
    """Whether a value is computed when it is read. `???` is a value that is not set yet."""
    return isinstance(value, str) and ("${" in value or value == "???")


def check_layer(history: History, before: Config, after: Config, origin: str, declares: bool) -> list[str]:
    """Returns the errors in a layer's changes and undoes these changes in `after`. Records the other changes.

    A float may become a whole number in `after`: 1e2 becomes 100.

    Args:
        history: state of earlier layers, which is updated.
        before: the tree before the layer.
        after: the tree after the layer.
        origin: name of the layer for messages.
        declares: True for a root base, which declares keys. In other layers an undeclared key is an error.
    """
    problems = []
    for path, _ in leaves(before):
        if lookup(after, path) is MISSING and is_declared(history.declared, path):
            problems.append(f"{origin} takes the key {dotted(path)} away; set keys one by one, or to null")
            restore_(after, before, path)
    targets = [path for path, _ in leaves(after) if path[-1] == "_target_"]
    new_nodes = {path[:-1] for path in targets if lookup(before, path) != lookup(after, path)}
    for path, _ in list(leaves(after)):
        if lookup(after, path) is MISSING:
            continue  # already undone with a node that contains it
        of_new_node = any(path[:n] in new_nodes for n in range(1, len(path)))
        try:
            if _check_change(history, before, after, path, of_new_node, declares):
                history.origins[path] = origin
        except ConfigError as error:
            problems.append(f"{origin}: {error}")
            restore_(after, before, path)
    history.origins = {path: o for path, o in history.origins.items() if lookup(after, path) is not MISSING}
    if declares:
        _declare(history.declared, after)
    return problems


def _check_change(
    history: History, before: Config, after: Config, path: Path, of_new_node: bool, declares: bool
) -> bool:
    """Whether the value at `path` changed. Raises ConfigError if it may not change or does not fit its key."""
    old, value = lookup(before, path), lookup(after, path)
    changed = type(old) is not type(value) or (not isinstance(value, Config) and repr(old) != repr(value))
    if changed and not declares:
        _check_known(history.declared, path, old, value)
    if of_new_node:  # the keywords of another constructor have other types
        history.types.pop(path, None)
        history.types.pop((*path, "*"), None)
    elif changed and is_formula(old) and path not in history.types:
        if (given := _type_of_formula(before, path)) is not None:
            history.types[path] = given
    if changed or of_new_node:
        _check_type(history, after, path)
    return changed


def keep_declared_(before: Config, read: dict[Path, Any], after: Config, declared: Config) -> None:
    """Restores declared keys in a mapping that a root base has replaced, as in `configs.train = Config()`.

    Declared keys that the base did not set keep their values.

    Args:
        before: the tree without this base.
        read: all nodes, by path, of the copy of the tree before the base changed it.
        after: this copy after the base changed it.
        declared: the declared keys.
    """
    for path, node in read.items():
        anew = lookup(after, path)
        if isinstance(anew, Config) and anew is not node and is_declared(declared, path):
            mapping = lookup(declared, path)
            for key in mapping if _closed(mapping) else ():
                anew.setdefault(key, lookup(before, (*path, key)))


def fitted(
    value: Any, old: type | None, also: Collection[type] = (), first: Collection[type] = ()
) -> tuple[Any, type | None]:
    """Returns the value to store and the new type of the key.

    Args:
        value: the new value.
        old: the key's type so far; None if it is not known.
        also: types that the constructor declares for the key. They are allowed in addition to `old`.
        first: allowed types if `old` is None; empty: any type.

    Raises:
        TypeError: if the value does not fit.
    """
    new = type(value)
    if value is None or is_formula(value):
        return value, old
    if old is None and first:
        wanted = [kind for kind in _KINDS if kind in first]
        for kind in wanted:
            with suppress(TypeError):
                return fitted(value, kind)
        raise TypeError(f"it must be {' or '.join(_KINDS[kind] for kind in wanted)}")
    if old is float and new is int:
        return value, float
    if old is None or old is new or new in also:
        return value, new
    if old is int and new is float and value.is_integer():
        return int(value), int
    raise TypeError(f"it must be {_KINDS[old]}")


def keyword_types(node: Any, key: str, value: Any) -> tuple[set[type], set[type]]:
    """The arguments `also` and `first` of `fitted` for a value of `node`. A node as value is always allowed."""
    if not isinstance(node, Config):
        return set(), set()
    declared, complete = declared_types(node.get("_target_"), key)
    return declared, declared if complete and not isinstance(value, Config) else set()


def _closed(node: Any) -> bool:
    """Whether a declared mapping takes no other keys.

    Not closed are constructors (their signatures define the keys), an empty mapping, and a mapping of constructors
    with names of the user's choice.
    """
    return isinstance(node, Config) and bool(node) and "_target_" not in node and not of_constructors(node)


def is_declared(declared: Config, path: Path) -> bool:
    """Whether a root base declares this key, so that it cannot be removed."""
    closed = all(_closed(lookup(declared, path[:n])) for n in range(len(path)))
    return closed and lookup(declared, path) is not MISSING


def _declare(declared: Config, tree: Config) -> None:
    for key, value in entries(tree):
        if key not in declared:
            declared[key] = copy(value)
        elif _closed(declared[key]) and isinstance(value, Config):
            _declare(declared[key], value)


def _check_known(declared: Config, path: Path, old: Any, value: Any) -> None:
    for n, key in enumerate(path):
        siblings = lookup(declared, path[:n])
        if not _closed(siblings):
            break
        if key not in siblings:
            near = suggest(key, siblings, declared)
            raise ConfigError(f"unknown key {dotted(path[: n + 1])}{near}")
    named_by_user = of_constructors(lookup(declared, path[:-1]))
    was_constructor = old is None or is_constructor(old)
    becomes_mapping = isinstance(value, Config) and was_constructor and is_declared(declared, path)
    if (named_by_user and value is not None or becomes_mapping) and not is_constructor(value):
        raise ConfigError(f"{dotted(path)} must name its constructor (_target_), or be null")


def _type_of_formula(tree: Config, path: Path) -> type | None:
    """The type of a formula's current value; None if it has no value yet."""
    try:
        value: Any = OmegaConf.create(container(tree))
        for key in path:
            value = value[key]
    except OmegaConfBaseException:
        return None
    return type(value) if type(value) in _KINDS else None


def _check_type(history: History, after: Config, path: Path) -> None:
    node, key, items = lookup(after, path[:-1]), path[-1], (*path, "*")
    value, old = node[key], history.types.get(path)
    fits = type(value) is old and old is not list
    also, first = (set(), set()) if fits else keyword_types(node, key, value)
    try:
        for formula in value if isinstance(value, list) else [value]:
            if is_formula(formula):
                OmegaConf.create({key: formula})  # raises if it cannot be parsed
        node[key], known = fitted(value, old, also, first)
        if isinstance(value, list):
            common = history.types.get(items)
            node[key] = [fitted(item, common, also, first - {list})[0] for item in value]
            history.types[items] = _common_type(node[key])
        if known is not None:
            history.types[path] = known
    except OmegaConfBaseException as error:
        reason = short(str(error).splitlines()[0], 160)
        raise ConfigError(f"{dotted(path)} is {short(repr(value))}: {reason}") from error
    except TypeError as error:
        hint = "; a text that looks like something else is written '\"5\"'" if "be text" in str(error) else ""
        raise ConfigError(f"{dotted(path)} is {short(repr(value), 60)}, but {error}{hint}") from None


def _common_type(items: list[Any]) -> type | None:
    """The common type of all items (float for ints and floats); None if the types differ."""
    types = {type(item) for item in items if item is not None and not is_formula(item)}
    if types == {int, float}:
        return float
    return types.pop() if len(types) == 1 else None
