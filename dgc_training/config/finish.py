"""Checks the finished tree: every value can be computed and is valid, every constructor takes its keywords."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dgc_training.config.changes import History, fitted, is_formula, keyword_types
from dgc_training.config.derive import keys_of
from dgc_training.config.errors import ConfigError, closest, short
from dgc_training.config.files import REPOSITORY, SUFFIXES
from dgc_training.config.targets import SPECIAL, import_target, keywords
from dgc_training.config.tree import Config, Path, container, dotted, entries, lookup

# key: (smallest value, whether it must be a whole number, whether it may be null)
LIMITS: dict[str, tuple[float, bool, bool]] = {
    "seed": (0, True, False),
    "data.num_threads_per_worker": (1, True, False),
    "data.num_workers": (0, True, False),
    "train.num_epochs": (1, True, False),
    "train.batch_size": (1, True, False),
    "train.num_batches_per_step": (1, True, False),
    "train.warmup_lr_epochs": (0, True, False),
    "train.bucket_mb": (0.001, False, False),
    "train.timeout": (1, False, False),
    "train.log_every": (1, True, False),
    "train.checkpoint_every": (1, True, True),
    "train.check_replicas_every": (0, True, False),
}
# key: whether it may be null instead of a constructor
CONSTRUCTORS = {
    "dataset": False,
    "model": False,
    "train.compression": False,
    "train.criterion": False,
    "train.optimizer": False,
    "train.scheduler": True,
    "train.gossip": True,
}


def check_finished(tree: Config, history: History, problems: list[str]) -> DictConfig:
    """Returns the tree as a read-only OmegaConf object with its formulas, and adds its errors to `problems`.

    Raises RequirementError if a layer contradicts what a base requires.
    """
    _check_required(
        tree, history
    )  # checked first: formulas may name keys of a node that was replaced
    result = OmegaConf.create(container(tree))
    assert isinstance(result, DictConfig)
    wrong = list(_check_formulas(result, tree, history))
    # If a formula has no value, the rest of the tree is checked with unresolved formulas.
    resolved = OmegaConf.to_container(result, resolve=not wrong)
    assert isinstance(resolved, dict)
    _check_required(resolved, history)
    problems += [*wrong, *_check_targets(resolved, (), history), *_check_values(resolved, history)]
    OmegaConf.set_readonly(result, True)
    OmegaConf.set_struct(result, True)
    return result


def _check_values(resolved: dict[Any, Any], history: History) -> Iterator[str]:
    """Checks the values against the tables CONSTRUCTORS and LIMITS."""
    for key, nullable in CONSTRUCTORS.items():
        value = _at(resolved, key)
        fits = isinstance(value, dict) and "_target_" in value or is_formula(value)
        if not fits and not (value is None and nullable):
            origin = history.origin(tuple(key.split(".")))
            yield f"{key} is {short(repr(value))} ({origin}); it must name its constructor (_target_)"
    for key, (least, whole, nullable) in LIMITS.items():
        value = _at(resolved, key)
        number = isinstance(value, int) or isinstance(value, float) and not whole
        fits = number and not isinstance(value, bool) and value >= least or is_formula(value)
        if not fits and not (value is None and nullable):
            kind = "a whole number" if whole else "a number"
            origin = history.origin(tuple(key.split(".")))
            yield f"{key} is {short(repr(value))} ({origin}); it must be {kind}, at least {least}"


def _check_formulas(result: DictConfig, tree: Config, history: History) -> Iterator[str]:
    """Checks that every formula, also in lists, has a value of its key's type."""
    for path, raw, node, key in _scalars(result, tree, ()):
        where = f"{dotted(path)} ({history.origin(path)})"
        if raw == "???":
            yield f"{where} has no value yet; set it"
        elif is_formula(raw):
            value = None
            try:
                value = node[key]
                plain = _plain_type(value)
                fitted(plain, history.types.get(path), *keyword_types(lookup(tree, path[:-1]), path[-1], plain))
            except (OmegaConfBaseException, RecursionError) as error:
                yield f"{dotted(path)} is {short(raw)} ({history.origin(path)}): {_reason(error, result)}"
            except TypeError as error:
                yield f"{where} gives {short(repr(value))}, but {error}"


def _reason(error: Exception, result: DictConfig) -> str:
    """The reason why a formula has no value."""
    reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
    if "ecursi" in reason:
        return "it refers back to itself"
    if missing := re.fullmatch(r"Interpolation key '(.*)' not found", reason):
        return f"there is no key {missing[1]!r}{closest(missing[1], keys_of(result))}"
    return short(reason, 160)


def _plain_type(value: Any) -> Any:
    """Replaces an OmegaConf node or list by an empty one of the tree's own types."""
    if isinstance(value, DictConfig | ListConfig):
        return Config() if isinstance(value, DictConfig) else []
    return value


def _scalars(node: DictConfig | ListConfig, raw: Any, path: Path) -> Iterator[tuple[Path, Any, Any, Any]]:
    """Yields (path, raw value, OmegaConf node that contains it, key in that node) of all scalars."""
    keyed: Iterable[tuple[Any, Any]] = entries(raw) if isinstance(raw, dict) else enumerate(raw)
    for key, value in keyed:
        if isinstance(value, dict | list):
            yield from _scalars(node[key], value, (*path, str(key)))
        else:
            yield (*path, str(key)), value, node, key


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if isinstance(tree, list):
            tree = tree[int(part)] if part.isdigit() and int(part) < len(tree) else None
        else:
            tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _check_required(tree: dict[Any, Any], history: History) -> None:
    """Checks `requires`, the values that stacked bases require: {dotted key: value}.

    An unresolved formula is skipped.
    """
    for key, wanted in (tree.get("requires") or {}).items():
        found = _at(tree, key)
        if found != wanted and not is_formula(found):
            path = tuple(key.split("."))
            raise RequirementError(
                key, wanted, found, history.origin(("requires", key)), history.origin(path)
            )


class RequirementError(ConfigError):
    """A layer contradicts what a base requires. `wanted_by` and `found_in` are the names of both layers."""

    def __init__(self, key: str, wanted: Any, found: Any, wanted_by: str, found_in: str) -> None:
        super().__init__(f"{key} is {found} ({found_in}), but {wanted_by} needs {wanted} there")
        self.wanted_by, self.found_in = wanted_by, found_in


def _check_targets(node: Any, path: Path, history: History) -> Iterator[str]:
    """Checks that every `_target_` can be imported and takes the other keys of its node."""
    for key, value in enumerate(node) if isinstance(node, list) else node.items():
        if isinstance(value, dict | list):
            yield from _check_targets(value, (*path, str(key)), history)
    if isinstance(node, list) or "_target_" not in node or is_formula(name := node["_target_"]):
        return
    if not isinstance(name, str):
        yield f"{dotted((*path, '_target_'))} is {name!r}; it must be an import path"
        return
    try:
        known = keywords(import_target(name))
    except ConfigError as error:
        origin = history.origin((*path, "_target_"))
        yield f"{dotted((*path, '_target_'))} is {name} ({origin}): {error}"
        return
    if known is None:
        return
    for key in node:
        if key not in known and key not in SPECIAL:
            origin = history.origin((*path, key))
            yield (
                f"{dotted((*path, key))} ({origin}): {name} takes no keyword {key!r}"
                f"{closest(key, known)}{_folders_that_replace(path)}{_anew(path, name, origin, history)}"
            )


def _anew(path: Path, name: str, origin: str, history: History) -> str:
    """A hint for the case that the command line changed only `_target_`, so that the old keywords remain."""
    by = history.origin((*path, "_target_"))
    if by == origin or not by.startswith("command line"):
        return ""
    return f"; to set all of it anew: --configs.{dotted(path)} '{{_target_: {name}, ...}}'"


def _folders_that_replace(path: Path) -> str:
    """A hint with the shipped folders that set another constructor at `path`.

    Folders of experiments, which set a data set, are left out: they set everything else as well.
    """
    assignment = f"configs.{dotted(path)} = Config("
    bases = [file for suffix in SUFFIXES for file in (REPOSITORY / "configs").glob(f"*/__init__{suffix}")]
    texts = {f"configs/{file.parent.name}/...": file.read_text() for file in bases}
    folders = sorted(
        folder for folder, text in texts.items() if assignment in text and "configs.dataset = " not in text
    )
    return (
        f"; to have another one there, stack a file of {' or '.join(folders)} after the experiment"
        if folders
        else ""
    )
