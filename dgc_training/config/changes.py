"""What one file, or one override, may change: keys that are declared, to values of the type they have had."""

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
    """What earlier layers said: the keys that root bases declare, who set each key, and each key's type."""

    declared: Config = field(default_factory=Config)
    origins: dict[Path, str] = field(default_factory=dict)
    # Of the last value that was not null and no formula; of a list's items under (..., "*").
    types: dict[Path, type | None] = field(default_factory=dict)

    def origin(self, path: Path) -> str:
        """Who set the value at `path`, or the nearest node around it."""
        known = [path[:n] for n in range(len(path), 0, -1) if path[:n] in self.origins]
        return self.origins[known[0]] if known else "nobody"


def is_formula(value: Any) -> bool:
    """Whether a value is computed when it is read; `???` stands for one that is still to come."""
    return isinstance(value, str) and ("${" in value or value == "???")


def check_layer(history: History, before: Config, after: Config, origin: str, declares: bool) -> list[str]:
    """Says what is wrong with a layer's changes and undoes that in `after`; records the other changes.

    A float may become a whole number in `after`, 1e2 100. declares: a root base makes keys known; everywhere
    else, keys that no root base has are errors.
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
            continue  # undone with the node around it
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
    """Whether the value at `path` changed. Raises ConfigError where it may not, or does not fit its key."""
    old, value = lookup(before, path), lookup(after, path)
    changed = type(old) is not type(value) or (not isinstance(value, Config) and repr(old) != repr(value))
    if changed and not declares:
        _check_known(history.declared, path, old, value)
    if of_new_node:  # another constructor: its keywords have types of their own
        history.types.pop(path, None)
        history.types.pop((*path, "*"), None)
    elif changed and is_formula(old) and path not in history.types:
        if (given := _type_of_formula(before, path)) is not None:
            history.types[path] = given
    if changed or of_new_node:
        _check_type(history, after, path)
    return changed


def keep_declared_(before: Config, read: dict[Path, Any], after: Config, declared: Config) -> None:
    """A mapping that a root base began anew, `configs.train = Config()`, has the declared keys it did not set.

    before: the tree without this base, whose values those keys keep. read: all nodes of the copy that the base
    changed, by path. after: that copy now.
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
    """(the value to store, the key's type from now on). Raises TypeError where the value does not fit `old`.

    also: types that the constructor declares for the key, whatever stands there now. first: where `old` is None,
    the types of which the value must have one; empty: any.
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
    """`also` and `first`, as `fitted` takes them, for a value of `node`. A node may build anything."""
    if not isinstance(node, Config):
        return set(), set()
    declared, complete = declared_types(node.get("_target_"), key)
    return declared, declared if complete and not isinstance(value, Config) else set()


def _closed(node: Any) -> bool:
    """Whether a declared mapping takes no other keys. Open are constructors (their signatures
    decide), an empty mapping, and a mapping of constructors, whose names are the user's.
    """
    return isinstance(node, Config) and bool(node) and "_target_" not in node and not of_constructors(node)


def is_declared(declared: Config, path: Path) -> bool:
    """Whether a root base has this very key, and keeps it from being taken away."""
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
    """The type that a formula has given so far; None where it gives nothing yet."""
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
                OmegaConf.create({key: formula})  # raises where it cannot be parsed
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
    """The one type of all items (float for ints and floats), None where they differ."""
    types = {type(item) for item in items if item is not None and not is_formula(item)}
    if types == {int, float}:
        return float
    return types.pop() if len(types) == 1 else None
