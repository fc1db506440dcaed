"""Constructors that a config tree names: their import paths, and the objects that they build.

Configs may name torchvision's models and data sets, even if torchvision was built for another version of torch.
"""

import importlib
import inspect
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial, reduce
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from omegaconf import DictConfig, ListConfig
from torch import Tensor

import dgc_datasets.torchvision_compat  # noqa: F401
from dgc_training.errors import ConfigError, closest, short

SPECIAL = ("_target_", "_partial_")  # keys of a node that are not its constructor's keywords


def import_path(target: Any) -> str:
    """The shortest public path: torch.nn.modules.loss.CrossEntropyLoss -> 'torch.nn.CrossEntropyLoss'.

    It is in a package around the module, or in a module of the same project that has the name in its `__all__`.

    Raises ValueError for objects that have no import path: lambdas, partials, instances, local classes.
    """
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__qualname__", "")
    parts = module.split(".") if module not in ("", "__main__") else []
    for prefix in (".".join(parts[:n]) for n in range(1, len(parts) + 1)):
        # not getattr(module, ...): names that a package loads when they are used have the path of their module
        first, *rest = name.split(".")
        if reduce(lambda at, part: getattr(at, part, None), rest, _globals(prefix).get(first)) is target:
            return f"{(prefix if prefix != module else _collected(target, module, name)) or prefix}.{name}"
    raise ValueError(
        f"Config takes a class or a function, or its import path, but {short(repr(target))} cannot be imported by "
        "that path; define it at the top of a module of its own"
    )


def _collected(target: Any, module: str, name: str) -> str | None:
    """The module that collects `target`, as `name`, for the users of its project. None: there is none."""
    project = module.split(".")[0] + "."
    loaded = [(key, vars(value)) for key, value in list(sys.modules.items()) if key.startswith(project)]
    found = [key for key, own in loaded if name in own.get("__all__", ()) and own.get(name) is target]
    return min(found, default=None, key=lambda key: (key.count("."), key))


def _globals(module: str) -> dict[str, Any]:
    return vars(sys.modules[module]) if module in sys.modules else {}


def import_target(path: str) -> Any:
    """The object behind an import path. Raises ConfigError with the closest names."""
    names = path.split(".")
    if len(names) == 1 or not all(names):
        raise ConfigError(f"{path!r} is no import path such as torch.optim.SGD")
    found = None
    for n, name in enumerate(names):
        where, at = ".".join(names[:n]), ".".join(names[: n + 1])
        try:
            found = getattr(found, name) if hasattr(found, name) else importlib.import_module(at)
        except Exception as error:
            if not isinstance(error, ModuleNotFoundError) or not f"{at}.".startswith(f"{error.name}."):
                raise ConfigError(f"importing {at} failed: {type(error).__name__}: {error}") from error
            near = closest(name, (other for other in (dir(found) if where else sys.modules) if other[0] != "_"))
            missing = f"{where} has no {name!r}" if where else f"there is no module {name!r} on Python's path"
            raise ConfigError(missing + near) from None
    if not callable(found):
        raise ConfigError(f"{path} cannot be called")
    return found


def signature(target: Any) -> inspect.Signature:
    """The signature of a constructor. One that is written in C may have none: it accepts all arguments."""
    for is_evaluated in (True, False):  # annotations that are text may name what is not imported
        with suppress(Exception):
            return inspect.signature(target, eval_str=is_evaluated)
    return inspect.signature(lambda *args, **keys: None)


def keywords(target: Any) -> dict[str, Any] | None:
    """The annotation of each keyword, or the type of its default. None if every keyword is accepted."""
    found: dict[str, Any] = {"_target_": str, "_partial_": bool}
    for p in signature(target).parameters.values():
        if p.kind is p.VAR_KEYWORD:
            return None
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            # A default of 0 is common where fractions are accepted.
            default = {bool: bool, int: int | float, float: float, str: str}.get(type(p.default), Any)
            found[p.name] = default if p.annotation is p.empty else p.annotation
    return found


def types(kind: Any) -> dict[Any, Any]:
    """{type of values: annotation of the items of a list} of an annotation, or of a tuple of annotations."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if isinstance(kind, tuple) or origin in (Union, UnionType):
        return {name: items for part in parts or kind for name, items in types(part).items()}
    if origin in (list, tuple, Sequence, Iterable, Collection):
        return {list: tuple(part for part in parts if part is not ...) or Any}
    return {} if origin is Tensor else {origin or NoneType: Any}  # no config has a tensor


def instantiate(node: Any, /, *args: Any, **runtime: Any) -> Any:
    """Builds a node: its nested nodes first, then `_target_(*args, **keys, **runtime)`. None gives None.

    With `_partial_: true` it gives a function that takes further arguments. A mapping or list without `_target_`
    gives a dict or list of built values. Raises ConfigError with the name of the node, if the target raises
    ValueError or does not accept its arguments, or if `runtime` repeats a key of the node.
    """
    if isinstance(node, ListConfig):
        return [instantiate(item) for item in node]
    if not isinstance(node, DictConfig):
        return node
    keys = {str(key): instantiate(value) for key, value in node.items() if key not in SPECIAL}
    if "_target_" not in node:
        return keys
    if twice := keys.keys() & runtime.keys():
        raise ConfigError(f"{node._get_full_key(min(twice))} is set by the program; take it out of the config")
    target = import_target(node["_target_"])
    if node.get("_partial_"):
        return partial(target, *args, **keys, **runtime)
    where = f"{node._get_full_key(None)} ({node['_target_']})"
    try:
        signature(target).bind(*args, **keys, **runtime)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error
    try:
        return target(*args, **keys, **runtime)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def of_kind(kind: type[Any], node: Any, value: Any) -> Any:
    """The value that a node's constructor has given. Raises ConfigError if it is not of the needed kind."""
    if isinstance(value, kind):
        return value
    names = [name for name in (*getattr(kind, "__annotations__", ()), *vars(kind)) if name[0] != "_"]
    what = f"an object with {', '.join(names)}" if getattr(kind, "_is_protocol", False) else import_path(kind)
    given = "None" if value is None else f"a {type(value).__name__}"
    where = f"{node._get_full_key(None)} ({node['_target_']})"
    raise ConfigError(f"{where}: it gives {given}, but it must give {what}")
