"""The tree that config files change: nested `Config` mappings, lists, scalars, and formulas as text."""

import ast
import math
import operator as op
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dgc_training.constructors import SPECIAL, import_path
from dgc_training.errors import ConfigError, closest, short

SCALARS = (bool, int, float, str, type(None))
FUNCTIONS: dict[Any, Any] = {ast.Add: op.add, ast.Sub: op.sub, ast.Mult: op.mul, ast.Div: op.truediv}
FUNCTIONS |= {ast.FloorDiv: op.floordiv, ast.Mod: op.mod, ast.UAdd: op.pos, ast.USub: op.neg}
FUNCTIONS |= {"min": min, "max": max, ast.Pow: math.pow}  # the integer 9**9**9 would exhaust the memory


class Config(dict[str, Any]):
    """A node of the tree: `Config(Target, key=value, ...)` describes a later call; Config() is a mapping.

    Keys are also attributes. items(), keys() and values() leave out `_target_` and `_partial_`: a loop over them
    copies the keywords into another node. A derived value reads as its formula, so a copy stays derived.

    Args:
        target: an importable class or function, or its import path, which is what the node has.
        keys: keywords of the target: None, bool, int, float, str, list or Config. ValueError for any other value.
    """

    def __init__(self, target: Any = None, /, **keys: Any) -> None:
        super().__init__()
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


def copied(value: Any, key: str = "configs", mapping: Any = Config) -> Any:
    """A copy with mappings of one class, lists for tuples, and defaults for keys. ValueError for other values."""
    if isinstance(value, dict):
        node = mapping()
        for name in value:
            node[name] = copied(value[name], name, mapping)
        return node
    if isinstance(value, list | tuple):
        return [copied(item, key, mapping) for item in value]
    if not isinstance(value, Key) and type(value) not in SCALARS:
        accepted = "null, bool, int, float, str, list or Config(Class, ...)"
        raise ValueError(f"{key} is {short(repr(value))}, but it must be {accepted}")
    return copied(value.default, key, mapping) if isinstance(value, Key) else value


def merge_(node: Any, other: dict[Any, Any]) -> None:
    """Merges a mapping into a mapping or a list: nested mappings key by key if they name the same constructor or
    none. Another value replaces the old one. Raises ConfigError for a key that is no index of a list.
    """
    for key, value in other.items():
        if isinstance(node, list) and not (str(key).isdecimal() and int(key) < len(node)):
            raise ConfigError(f"there is no {key!r} in a list of {len(node)}")
        key = int(key) if isinstance(node, list) else key
        old = node[key] if isinstance(node, list) else node.get(key)
        target = old.get("_target_") if isinstance(old, dict) else None
        if isinstance(old, dict | list) and isinstance(value, dict) and value.get("_target_", target) == target:
            merge_(old, value)
        else:
            node[key] = value


def assign_(tree: Config, key: str, value: Any) -> None:
    """Sets a dotted key. Mappings that do not exist are created. A mapping is merged, but {} empties the node."""
    *above, last = key.split(".")
    node: Any = tree
    for name in above:
        merge_(node, {name: {}})
        node = node[int(name) if isinstance(node, list) else name]
    for content in [None, value] if value == {} else [value]:
        merge_(node, {last: content})


def leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value), parents first. The value of a mapping is the mapping; lists are leaves."""
    for key in node:
        yield f"{prefix}{key}", node[key]
        if isinstance(node[key], dict):
            yield from leaves(node[key], f"{prefix}{key}.")


def derived(formula: str) -> str:
    """A value that follows later files: derived("max(1, train.num_epochs - train.warmup_lr_epochs)").

    A formula is a Python expression of numbers, keys of numbers, + - * / // % **, min(...) and max(...), as in
    YAML `${derive:"train.num_epochs - 5"}`. The value of a single key, derived("seed"), may have any type.
    """
    text = " ".join(formula.split())
    return f"${{{text}}}" if text.replace(".", "").isidentifier() else f'${{derive:"{text}"}}'


def is_formula(value: Any) -> bool:
    """Whether a value is computed when it is read. `???` is a value that is not set yet."""
    return isinstance(value, str) and ("${" in value or value == "???")


def _derive(formula: str, *, _root_: DictConfig) -> Any:
    """OmegaConf's resolver `derive`. OmegaConf reports any exception with the key of the formula."""

    def compute(node: Any) -> Any:
        match node:
            case ast.Constant(value=value) if type(value) in (int, float):
                return value
            case ast.Name() | ast.Attribute():
                if (value := OmegaConf.select(_root_, ast.unparse(node), default=_root_)) is _root_:
                    raise ValueError(f"Interpolation key '{ast.unparse(node)}' not found")  # as for ${key}
                if type(value) not in (int, float):
                    raise ValueError(f"{ast.unparse(node)} is {short(repr(value))}, not a number")
                return value
            case ast.BinOp():
                return FUNCTIONS[type(node.op)](compute(node.left), compute(node.right))
            case ast.UnaryOp():
                return FUNCTIONS[type(node.op)](compute(node.operand))
            case ast.Call(func=ast.Name(id=name), keywords=[]):
                return FUNCTIONS[name](*map(compute, node.args))
        raise TypeError

    try:
        return compute(ast.parse(formula.strip() if len(formula) <= 1000 else "", mode="eval").body)
    except (SyntaxError, TypeError, KeyError):
        known = "keys, numbers, + - * / // % **, min(...) and max(...), up to 1000 characters"
        raise ValueError(f"{short(repr(formula))} is not made of {known}") from None


OmegaConf.register_resolver("derive", _derive, replace=True, annotation_validation="off")
