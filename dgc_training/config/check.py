"""The one check of a finished tree: keys, values, formulas, constructors with their keywords, and requirements."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from dgc_training.config.layers import Stack
from dgc_training.config.tree import Config, Key, leaves
from dgc_training.config_files import ROOT_BASE, bases_of, config_files, show
from dgc_training.constructors import SPECIAL, import_target, keywords, types
from dgc_training.errors import ConfigError, closest, short
from dgc_training.formulas import is_formula

Problem = tuple[str, Any, str]  # key, its value as it is written, message
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
    """Checks the tree of a stack, of which the user named `files`. `problems` are the messages by key."""

    def __init__(self, stack: Stack, files: Sequence[Path]) -> None:
        self.stack, self.result = stack, OmegaConf.create(stack.tree)
        self.problems = {**dict(self._unmet_requirements(files)), **self._missing()}
        found = self._mapping(self.result, stack.tree, "", stack.declared)
        # What is inside of a wrong node, and a formula of wrong values, is not reported again.
        for path, raw, message in sorted(found, key=lambda problem: is_formula(problem[1])):
            causes = [path, *(re.findall(r"[\w.]+", raw) if is_formula(raw) else ())]
            if not any(f"{cause}.".startswith(f"{wrong}.") for cause in causes for wrong in self.problems):
                self.problems[path] = f"{stack.origin(path)}: {message}"

    def _unmet_requirements(self, files: Sequence[Path]) -> Iterator[tuple[str, str]]:
        """Checks `requires`, the values that stacked bases require: {dotted key: value}."""
        requires = self.stack.tree.get("requires")
        for key, wanted in requires.items() if isinstance(requires, dict) else ():
            if (found := OmegaConf.select(self.result, key, throw_on_resolution_failure=False)) == wanted:
                continue
            by, origin = self.stack.origin(f"requires.{key}"), self.stack.origin(key)
            late = [file for file in files if by in map(show, [*bases_of(file), file])]
            right = [file for file in files if file not in late] + late
            cure = f"leave out the one or the other: {origin}, {' '.join(map(show, late)) or by}"
            if late and right != files:
                cure = f"the right order is --configs {' '.join(map(show, right))}"
            message = f"{key} is {found} ({origin}), but {by} needs {wanted} there; {cure}"
            yield key.removesuffix("._target_"), message

    def _missing(self) -> dict[str, str]:
        """Checks that an experiment has set what has no default."""
        keys = leaves(self.stack.declared).items()
        needed = {at for at, key in keys if isinstance(key, Key) and key.default is None and refusal(key, None)}
        missing = [at for at, value in leaves(self.stack.tree).items() if value is None and at in needed]
        if not missing:
            return {}
        files = [file for file in config_files(ROOT_BASE.parent) if "configs.model = " in file.read_text()]
        first = f"name an experiment first: --configs {' or '.join(map(show, files))}"
        return dict.fromkeys(missing, f"no {', '.join(missing)} in this stack; {first}")

    def _mapping(self, node: Any, raw: dict[str, Any], path: str, accepted: Any) -> Iterator[Problem]:
        """Checks the keys of a section, of a constructor or of a mapping with free names."""
        keys, others = (accepted, None) if isinstance(accepted, dict) else ({}, accepted.items or Key(Any))
        if "_target_" in raw:
            keys, others = {}, Key(Any)
            try:
                if kinds := keywords(import_target(target := str(node["_target_"]))):
                    keys, others = {name: argument(kind) for name, kind in kinds.items()}, None
            except ConfigError as error:
                yield f"{path}._target_", None, f"{path}._target_ is {target}: {error}"
            except OmegaConfBaseException:  # a formula without a value, which is reported
                pass
        for key in raw if "_target_" in raw else {**keys, **raw}:
            at = f"{path}.{key}".lstrip(".")
            if key not in raw:
                yield at, None, f"removes {at}; set keys one by one, or to null"
            elif (known := keys.get(key, others)) is None:
                yield at, None, self._unknown(at, keys, raw)
            else:
                yield from self._value(node, key, raw[key], at, known)

    def _value(self, node: Any, key: Any, raw: Any, path: str, accepted: Any) -> Iterator[Problem]:
        """Checks the value of a key of `node`, or of an index of a list, and those inside of it."""
        value, given = raw, short(repr(raw), 60)
        if is_formula(raw):
            try:
                value = OmegaConf.to_container(OmegaConf.create({"value": node[key]}))["value"]  # type: ignore
            except (OmegaConfBaseException, RecursionError) as error:
                yield path, raw, f"{path} is {short(raw)}: {short(self._reason(error), 160)}"
                return
            given = f"{short(raw)}, which gives {short(repr(value))}"
        declared = Key(dict) if isinstance(accepted, dict) else accepted
        if must := refusal(declared, value):
            hint = "; a text that looks like something else is written '\"5\"'" if "text" in must else ""
            yield path, raw, f"{path} is {given}, but it must be {must}{hint}"
        elif isinstance(raw, dict):
            yield from self._mapping(node[key], raw, path, accepted)
        elif isinstance(raw, list):
            items = argument(types(declared.type).get(list, Any))
            for n, item in enumerate(raw):
                yield from self._value(node[key], n, item, f"{path}.{n}", items)
        elif isinstance(raw, float) and types(declared.type).keys() & {int, float} == {int}:
            node[key] = int(raw)

    def _reason(self, error: Exception) -> str:
        """Why a formula has no value."""
        reason = str(error).splitlines()[0].rpartition(" raised while resolving interpolation: ")[2]
        if isinstance(error, InterpolationKeyError):
            name = reason.split("'")[1]
            return f"there is no key {name!r}{closest(name, leaves(self.stack.tree))}"
        return "it refers back to itself, or is too long" if "ecursi" in reason else reason

    def _unknown(self, path: str, keys: Iterable[str], raw: dict[str, Any]) -> str:
        """The message for a key that its section or its constructor, the node `raw`, does not have."""
        (above, _, key), target = path.rpartition("."), raw.get("_target_")
        accepted = [f"{above}.{name}".lstrip(".") for name in keys if name not in SPECIAL]
        others = [at for at in leaves(self.stack.tree) if not f"{at}.".startswith(f"{path}.")]
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
