"""Constructors that a config tree names: their import paths, and the objects that they build.

Configs may name torchvision's models and data sets, even if torchvision was built for another version of torch.
"""

import importlib
import inspect
import sys
from functools import partial, reduce
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

import dgc_datasets.torchvision_compat  # noqa: F401
from dgc_training.errors import ConfigError, closest

SPECIAL = ("_target_", "_partial_")  # keys of a node that are not its constructor's keywords


def import_path(target: Any) -> str:
    """The shortest public path: torch.nn.modules.loss.CrossEntropyLoss -> 'torch.nn.CrossEntropyLoss'.

    Raises ValueError for objects that have no import path: lambdas, partials, instances, local classes.
    """
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not module or not name or not callable(target):
        raise ValueError(f"Config takes a class or a function (or its import path), not {target!r}")
    parts = module.split(".") if module != "__main__" else []
    for prefix in (".".join(parts[:n]) for n in range(1, len(parts) + 1)):
        if reduce(lambda at, part: getattr(at, part, None), name.split("."), sys.modules.get(prefix)) is target:
            return f"{prefix}.{name}"
    raise ValueError(
        f"{module}.{name} cannot be imported by that path; define it at the top of a module of its own"
    )


def import_target(path: str) -> Any:
    """The object behind an import path. Raises ConfigError with the closest names."""
    names = path.split(".")
    if len(names) == 1 or not all(names):
        raise ConfigError(f"{path!r} is no import path such as torch.optim.SGD")
    found, where = None, ""
    for name in names:
        at = f"{where}.{name}" if where else name
        try:
            found = getattr(found, name) if hasattr(found, name) else importlib.import_module(at)
        except Exception as error:
            if not isinstance(error, ModuleNotFoundError) or not f"{at}.".startswith(f"{error.name}."):
                raise ConfigError(f"importing {at} failed: {type(error).__name__}: {error}") from error
            near = closest(name, (other for other in (dir(found) if where else sys.modules) if other[0] != "_"))
            missing = f"{where} has no {name!r}" if where else f"there is no module {name!r} on Python's path"
            raise ConfigError(missing + near) from None
        where = at
    if not callable(found):
        raise ConfigError(f"{path} cannot be called")
    return found


def instantiate(node: Any, *args: Any, **runtime: Any) -> Any:
    """Builds a node: its nested nodes first, then `_target_(*args, **keys, **runtime)`. None gives None.

    With `_partial_: true` it gives a function that takes further arguments. A mapping or list without `_target_`
    gives a dict or list of built values. Raises ConfigError with the name of the node, if the target raises
    ValueError or does not accept its arguments, or if `runtime` repeats a key of the node.
    """
    where = ""
    if isinstance(node, DictConfig | ListConfig):
        where, node = str(node._get_full_key(None) or ""), OmegaConf.to_container(node, resolve=True)
    return _build(node, where, args, runtime)


def _build(node: Any, where: str, args: tuple[Any, ...] = (), runtime: dict[str, Any] | None = None) -> Any:
    if isinstance(node, list):
        return [_build(item, f"{where}.{i}") for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    keys = {key: _build(value, f"{where}.{key}".lstrip(".")) for key, value in node.items() if key not in SPECIAL}
    if "_target_" not in node:
        return keys
    target, is_partial = import_target(node["_target_"]), node.get("_partial_", False)
    if twice := sorted(keys.keys() & (runtime or {}).keys()):
        raise ConfigError(f"{where}.{twice[0]} is set by the program; take it out of the config")
    call = partial(target, *args, **keys, **(runtime or {}))
    try:
        signature = inspect.signature(target)
    except (ValueError, TypeError):  # written in C, without a signature
        signature = inspect.signature(lambda *args, **keys: None)
    try:
        (signature.bind_partial if is_partial else signature.bind)(*call.args, **call.keywords)
    except TypeError as error:
        raise ConfigError(f"{where} ({node['_target_']}): {error}") from error
    try:
        return call if is_partial else call()
    except ValueError as error:
        raise ConfigError(f"{where} ({node['_target_']}): {error}") from error
