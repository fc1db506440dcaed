"""Constructors as import paths: conversion between path and object, accepted keywords, and the call.

Configs may name torchvision's models and data sets, even if torchvision was built for another version of torch.
"""

import importlib
import inspect
import re
import sys
from functools import partial
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

import dgc_datasets.torchvision_compat  # noqa: F401
from dgc_training.config.errors import ConfigError, closest

_ANNOTATIONS: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
_ANNOTATIONS |= dict.fromkeys(("list", "List", "tuple", "Tuple", "Sequence", "Iterable", "Collection"), list)
SPECIAL = ("_target_", "_partial_")  # keys of a node that are not its constructor's keywords
# Words of an annotation that do not correspond to a config value.
_OTHER_WORDS = {"None", "NoneType", "Optional", "Union", "Tensor", "torch", "typing", "collections", "abc"}
_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def import_path(target: Any) -> str:
    """The shortest public path: torch.nn.modules.loss.CrossEntropyLoss -> 'torch.nn.CrossEntropyLoss'.

    Raises ValueError for objects that have no import path: lambdas, partials, instances, local classes.
    """
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not module or not name or not callable(target):
        raise ValueError(f"Config takes a class or a function (or its import path), not {target!r}")
    parts = module.split(".")
    public = [
        ".".join(parts[:n]) for n in range(1, len(parts)) if not any(p.startswith("_") for p in parts[:n])
    ]
    for prefix in [*public, module]:
        found: Any = sys.modules.get(prefix)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is target and prefix != "__main__":
            return f"{prefix}.{name}"
    raise ValueError(
        f"{module}.{name} cannot be imported by that path; define it at the top of a module of its own"
    )


def import_target(path: str) -> Any:
    """The object behind an import path. Raises ConfigError with the closest names."""
    parts = path.split(".")
    if len(parts) < 2 or not all(parts):
        raise ConfigError(f"{path!r} is no import path such as torch.optim.SGD")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                continue  # this prefix is not a module; a shorter one may be
            raise ConfigError(f"importing {name} failed: {error}") from error
        except Exception as error:
            raise ConfigError(f"importing {name} failed: {type(error).__name__}: {error}") from error
        for i in range(cut, len(parts)):
            if not hasattr(found, parts[i]):
                where = ".".join(parts[:i])
                near = closest(parts[i], [n for n in dir(found) if not n.startswith("_")])
                raise ConfigError(f"{where} has no {parts[i]!r}{near}")
            found = getattr(found, parts[i])
        if not callable(found):
            raise ConfigError(f"{path} cannot be called")
        return found
    near = closest(parts[0], [name for name in sys.modules if "." not in name and not name.startswith("_")])
    raise ConfigError(f"there is no module {parts[0]!r} on Python's path{near}")


def _signature(target: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(target)
    except (ValueError, TypeError):
        return None  # written in C, without a signature


def keywords(target: Any) -> dict[str, inspect.Parameter] | None:
    """The keywords that `target` accepts; None if it accepts any keyword or has no signature."""
    signature = _signature(target)
    parameters = signature.parameters if signature else {}
    if signature is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return {name: p for name, p in parameters.items() if p.kind in _KEYWORD_KINDS}


def declared_types(path: Any, keyword: str) -> tuple[set[type], bool]:
    """The plain types in a constructor's annotation of this keyword, and whether they are all that it accepts.

    `float | Sequence[float]` gives {float, list}. Returns (set(), False) if there is no annotation, or if the
    constructor cannot be imported.
    """
    try:
        parameter = (keywords(import_target(path)) or {}).get(keyword) if isinstance(path, str) else None
    except ConfigError:
        return set(), False  # reported later, when the finished tree is checked
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return set(), False
    annotation = parameter.annotation
    words = re.findall(r"\w+", annotation.__name__ if isinstance(annotation, type) else str(annotation))
    types = {kind for word, kind in _ANNOTATIONS.items() if word in words}
    return types, bool(types) and set(words) <= _ANNOTATIONS.keys() | _OTHER_WORDS


def instantiate(node: Any, *args: Any, **runtime: Any) -> Any:
    """Builds a node: its nested nodes first, then `_target_(*args, **keys, **runtime)`. None gives None.

    A node with `_partial_: true` gives a function that calls `_target_` with the node's keys and further
    arguments. A mapping or list without `_target_` gives a dict or list of built values.

    Raises:
        ConfigError: with the name of the node, if the target raises ValueError or does not accept its arguments,
        or
            if `runtime` repeats a key of the node.
    """
    where = ""
    if isinstance(node, DictConfig | ListConfig):
        where = str(node._get_full_key(None) or "")
        node = OmegaConf.to_container(node, resolve=True)
    return _build(node, where, args, runtime)


def _build(node: Any, where: str, args: tuple[Any, ...] = (), runtime: dict[str, Any] | None = None) -> Any:
    if isinstance(node, list):
        return [_build(item, f"{where}.{i}") for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    keys = {
        str(key): _build(value, f"{where}.{key}".lstrip("."))
        for key, value in node.items()
        if key not in SPECIAL
    }
    if "_target_" not in node:
        return keys
    target = import_target(node["_target_"])
    if twice := sorted(keys.keys() & (runtime or {}).keys()):
        raise ConfigError(f"{where}.{twice[0]} is set by the program; take it out of the config")
    keys |= runtime or {}
    is_partial = node.get("_partial_", False)
    try:
        if known := _signature(target):
            (known.bind_partial if is_partial else known.bind)(*args, **keys)
    except TypeError as error:
        raise ConfigError(f"{where} ({node['_target_']}): {error}") from error
    if is_partial:
        return partial(target, *args, **keys)
    try:
        return target(*args, **keys)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where} ({node['_target_']}): {error}") from error
