"""The one check of a finished tree: keys, values, formulas, constructors with their keywords, and requirements."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dgc_training.config.layers import ROOT_BASE, Stack, bases_of, config_files, show
from dgc_training.config.tree import Config, Key, is_formula, leaves
from dgc_training.constructors import SPECIAL, import_target, keywords, types
from dgc_training.errors import ConfigError, closest, short

NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list"}
NAMES |= {dict: "a mapping", Config: "a node that names its constructor (_target_)"}


def refusal(key: Key, value: Any) -> str:
    """What the value of a key must be instead; '' if it is accepted. 100.0 is accepted as a whole number."""
    accepted, fitting = types(key.type).keys(), {type(value)}
    if isinstance(value, dict):
        fitting = {Config, dict} if "_target_" in value else {dict}
    elif type(value) is int or type(value) is float and value.is_integer():
        fitting = {int, float}
    too_small = key.least is not None and float in fitting and not value >= key.least
    # A type that no config value has, as Callable, accepts every value. NaN is no number.
    if not accepted <= {*NAMES, type(None)} or accepted & fitting and not too_small and value == value:
        return ""
    names = [name for kind, name in NAMES.items() if kind in accepted and kind is not Config] or [NAMES[Config]]
    return " or ".join(names) + (f", at least {key.least}" if key.least is not None else "")


def argument(kind: Any) -> Key:
    """What an argument accepts: its annotation, null, and a node, of which the constructor gets the object."""
    return Key((kind, Config, None) if types(kind).keys() - {type(None)} else Any)


class Check:
    """Checks the tree of a stack, of which the user named `files`."""

    def __init__(self, stack: Stack, files: Sequence[Path]) -> None:
        self.stack, self.result = stack, OmegaConf.create(stack.tree)
        self.problems: dict[str, str] = {}  # by key: the layer, the key, the mistake and its cure
        self._values: list[tuple[str, str, str]] = []  # wrong ones: key, formula or nothing, message
        self._check_requirements(files)
        self._check_experiment()
        self._check_mapping(self.result, stack.tree, "", Key(dict))
        for path, formula, message in sorted(self._values, key=lambda value: bool(value[1])):
            if not self._is_reported(*re.findall(r"[\w.]+", formula)):
                self._report(path, message)

    def _report(self, path: str, message: str) -> None:
        self.problems[path] = f"{self.stack.origin(path)}: {message}"

    def _is_reported(self, *paths: str) -> bool:
        """Whether a mistake is reported for one of these keys or for a node that contains it."""
        return any(f"{path}.".startswith(f"{wrong}.") for path in paths for wrong in self.problems)

    def _check_requirements(self, files: Sequence[Path]) -> None:
        """Checks `requires`, the values that stacked bases require: {dotted key: value}."""
        requires = self.stack.tree.get("requires")
        for key, wanted in requires.items() if isinstance(requires, dict) else ():
            if (found := OmegaConf.select(self.result, key, throw_on_resolution_failure=False)) != wanted:
                by, origin = self.stack.origin(f"requires.{key}"), self.stack.origin(key)
                late = [file for file in files if by in map(show, [*bases_of(file), file])]
                right = [file for file in files if file not in late] + late
                cure = f"leave out the one or the other: {origin}, {' '.join(map(show, late)) or by}"
                if late and right != files:
                    cure = f"the right order is --configs {' '.join(map(show, right))}"
                message = f"{key} is {found} ({origin}), but {by} needs {wanted} there; {cure}"
                self.problems[key.removesuffix("._target_")] = message

    def _check_experiment(self) -> None:
        """Checks that an experiment has set what has no default."""
        needed = [at for at, key in self.stack.keys.items() if key.default is None and refusal(key, None)]
        if not (missing := [at for at, value in leaves(self.stack.tree) if value is None and at in needed]):
            return
        files = [file for file in config_files(ROOT_BASE.parent) if "configs.model = " in file.read_text()]
        first = f"name an experiment first: --configs {' or '.join(map(show, files))}"
        self.problems |= dict.fromkeys(missing, f"no {', '.join(missing)} in this stack; {first}")

    def _check_mapping(self, node: Any, raw: dict[str, Any], path: str, accepted: Key) -> None:
        """Checks the keys of a section, of a constructor or of a mapping with free names."""
        section = {
            at.rpartition(".")[2]: key for at, key in self.stack.keys.items() if at.rpartition(".")[0] == path
        }
        keys: dict[str, Key] | None = section if path in self.stack.sections else None
        if "_target_" in raw:
            try:
                section, kinds = {}, keywords(import_target(target := str(node["_target_"])))
                keys = kinds and {name: argument(kind) for name, kind in kinds.items()}
            except ConfigError as error:
                self._report(f"{path}._target_", f"{path}._target_ is {target}: {error}")
            except OmegaConfBaseException:  # a formula without a value, which is reported
                pass
        for key in {**section, **raw}:
            at = f"{path}.{key}".lstrip(".")
            known = accepted.items or Key(Any) if keys is None else keys.get(key)
            if key not in raw:
                self._report(at, f"removes {at}; set keys one by one, or to null")
            elif known is None:
                self._report(at, self._unknown(at, keys or (), raw))
            else:
                self._check_value(node, key, raw[key], at, known)

    def _check_value(self, node: Any, key: Any, raw: Any, path: str, accepted: Key) -> None:
        """Checks one value and those below it. `key` is its key or its index in `node`."""
        if self._is_reported(path):
            return
        value, given = raw, short(repr(raw), 60)
        if is_formula(raw):
            try:
                value = OmegaConf.to_container(OmegaConf.create({"value": node[key]}))["value"]  # type: ignore
            except (OmegaConfBaseException, RecursionError) as error:
                self._values.append((path, raw, f"{path} is {short(raw)}: {short(self._reason(error), 160)}"))
                return
            given = f"{short(raw)}, which gives {short(repr(value))}"
        if must := refusal(accepted, value):
            hint = "; a text that looks like something else is written '\"5\"'" if "text" in must else ""
            message = f"{path} is {given}, but it must be {must}{hint}"
            self._values.append((path, raw if is_formula(raw) else "", message))
        elif isinstance(raw, dict):
            self._check_mapping(node[key], raw, path, accepted)
        elif isinstance(raw, list):
            items = argument(types(accepted.type).get(list, Any))
            for n, item in enumerate(raw):
                self._check_value(node[key], n, item, f"{path}.{n}", items)
        elif isinstance(raw, float) and types(accepted.type).keys() & {int, float} == {int}:
            node[key] = int(raw)

    def _reason(self, error: Exception) -> str:
        """Why a formula has no value."""
        reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
        if missing := re.fullmatch(r"Interpolation key '(.*)' not found", reason):
            return f"there is no key {missing[1]!r}{closest(missing[1], dict(leaves(self.stack.tree)))}"
        return "it refers back to itself, or is too long" if "ecursi" in reason else reason

    def _unknown(self, path: str, keys: Iterable[str], raw: dict[str, Any]) -> str:
        """The message for a key that its section or its constructor, the node `raw`, does not have."""
        (above, _, key), target = path.rpartition("."), raw.get("_target_")
        accepted = [f"{above}.{name}".lstrip(".") for name in keys if name not in SPECIAL]
        others = [at for at, _ in leaves(self.stack.tree) if not f"{at}.".startswith(f"{path}.")]
        near = closest(path, [*accepted, *others]) or closest(path, accepted)
        if target is None:
            return f"unknown key {path}{near}"
        message = f"{path}: {target} takes no keyword {key!r}{near}"
        # Shipped folders that set another constructor there, except experiments, which set all the rest as well.
        bases = {file.parent.name: file.read_text() for file in sorted(ROOT_BASE.parent.glob("*/__init__.py"))}
        wanted = [name for name, text in bases.items() if f"configs.{above} = Config(" in text]
        if folders := [f"configs/{name}/..." for name in wanted if "configs.dataset = " not in bases[name]]:
            message += f"; to have another one there, stack a file of {' or '.join(folders)} after the experiment"
        return message
