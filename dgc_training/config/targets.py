"""Constructors: their import paths, the values that their keywords accept, and their call.

Configs may name torchvision's models and data sets, even if torchvision was built for another version of torch.
"""

import importlib
import inspect
import re
import sys
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

import dgc_datasets.torchvision_compat  # noqa: F401
from dgc_training.config.errors import ConfigError, closest

SPECIAL = ("_target_", "_partial_")  # keys of a node that are not its constructor's keywords
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
        section: whether only declared keys are accepted in a mapping.
    """

    type: Any
    default: Any = None
    least: float | None = None
    items: "Key | None" = None
    section: bool = False

    def kinds(self) -> set[str]:
        """The kinds of accepted values; empty: every value."""
        words = re.findall(r"\w+", inspect.formatannotation(self.type))
        return {_WORDS[word] for word in words} - {""} if _WORDS.keys() >= set(words) else set()

    @property
    def must_be_set(self) -> bool:
        """Whether an experiment must set the key."""
        return self.default is None and not self.section and bool(self.wanted(None))

    def wanted(self, value: Any) -> str:
        """What the value must be instead; '' if it is accepted. 100.0 is accepted as a whole number."""
        kinds, kind = self.kinds(), kind_of(value)
        if kind == "float" and "float" not in kinds and value.is_integer():
            kind = "int"
        elif kind not in kinds:
            kind = {"int": "float", "Config": "dict"}.get(kind, kind)
        too_small = self.least is not None and kind in ("int", "float") and not value >= self.least
        if not kinds or kind in kinds and not too_small:
            return ""
        names = [name for kind, name in _KINDS.items() if kind in kinds and (kind != "Config" or kinds <= _NODES)]
        return " or ".join(names) + (f", at least {self.least}" if self.least is not None else "")


ANYTHING = Key(Any)


def key_of(kinds: set[str]) -> Key:
    """Accepts these kinds, null and a node, of which the constructor gets the object. Without kinds: anything."""
    return Key(" | ".join({*kinds, *_NODES})) if kinds - _NODES else ANYTHING


def kind_of(value: Any) -> str:
    """The kind of a value: "None", or a key of `_KINDS`."""
    if isinstance(value, dict):
        return "Config" if "_target_" in value else "dict"
    return "None" if value is None else type(value).__name__


def import_path(target: Any) -> str:
    """The shortest public path: torch.nn.modules.loss.CrossEntropyLoss -> 'torch.nn.CrossEntropyLoss'.

    Raises ValueError for objects that have no import path: lambdas, partials, instances, local classes.
    """
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not module or not name or not callable(target):
        raise ValueError(f"Config takes a class or a function (or its import path), not {target!r}")
    parts = module.split(".") if module != "__main__" else []
    for prefix in (".".join(parts[:n]) for n in range(1, len(parts) + 1)):
        found = reduce(lambda at, part: getattr(at, part, None), name.split("."), sys.modules.get(prefix))
        if found is target:
            return f"{prefix}.{name}"
    raise ValueError(
        f"{module}.{name} cannot be imported by that path; define it at the top of a module of its own"
    )


def import_target(path: str) -> Any:
    """The object behind an import path. Raises ConfigError with the closest names."""
    where, *names = path.split(".")
    if not where or not names or not all(names):
        raise ConfigError(f"{path!r} is no import path such as torch.optim.SGD")
    found = _import_module(where)
    if found is None:
        near = closest(where, [name for name in sys.modules if "." not in name and not name.startswith("_")])
        raise ConfigError(f"there is no module {where!r} on Python's path{near}")
    for name in names:
        if not hasattr(found, name) and _import_module(f"{where}.{name}") is None:
            near = closest(name, [other for other in dir(found) if not other.startswith("_")])
            raise ConfigError(f"{where} has no {name!r}{near}")
        found, where = getattr(found, name), f"{where}.{name}"
    if not callable(found):
        raise ConfigError(f"{path} cannot be called")
    return found


def _import_module(name: str) -> Any:
    """The module, or None if there is none of this name. Raises ConfigError if it fails."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            return None
        raise ConfigError(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _signature(target: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(target)
    except (ValueError, TypeError):
        return None  # written in C, without a signature


def keywords(target: Any) -> dict[str, inspect.Parameter] | None:
    """The keywords that `target` accepts; None if it accepts any keyword or has no signature."""
    signature = _signature(target)
    if signature is None or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return None
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in signature.parameters.items() if p.kind in kinds}


def instantiate(node: Any, *args: Any, **runtime: Any) -> Any:
    """Builds a node: its nested nodes first, then `_target_(*args, **keys, **runtime)`. None gives None.

    With `_partial_: true` it gives a function that takes further arguments. A mapping or list without `_target_`
    gives a dict or list of built values. Raises ConfigError with the name of the node, if the target raises
    ValueError or does not accept its arguments, or if `runtime` repeats a key of the node.
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
    keys = {key: _build(value, f"{where}.{key}".lstrip(".")) for key, value in node.items() if key not in SPECIAL}
    if "_target_" not in node:
        return keys
    target, is_partial = import_target(node["_target_"]), node.get("_partial_", False)
    if twice := sorted(keys.keys() & (runtime or {}).keys()):
        raise ConfigError(f"{where}.{twice[0]} is set by the program; take it out of the config")
    call = partial(target, *args, **keys, **(runtime or {}))
    try:
        if known := _signature(target):
            (known.bind_partial if is_partial else known.bind)(*call.args, **call.keywords)
    except TypeError as error:
        raise ConfigError(f"{where} ({node['_target_']}): {error}") from error
    try:
        return call if is_partial else call()
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where} ({node['_target_']}): {error}") from error
