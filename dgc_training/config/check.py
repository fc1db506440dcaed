"""The one check of a finished tree: keys, values, formulas, constructors with their keywords, and requirements."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dgc_training.config.formulas import is_formula
from dgc_training.config.layers import ROOT_BASE, Stack, bases_of, config_files, show
from dgc_training.config.tree import ANYTHING, Key, key_of, keywords, similar
from dgc_training.constructors import SPECIAL, import_target
from dgc_training.errors import ConfigError, closest, short


class Check:
    """Checks the tree of a stack. `files` are those that the user named. If a layer could not be applied, the tree
    is not complete: keys that an experiment must set may be missing.

    Attributes:
        result: the tree as an OmegaConf object, with its formulas.
        problems: one message for each mistake: the layer, the key, the mistake and its cure.
    """

    def __init__(self, stack: Stack, files: Sequence[Path], is_complete: bool) -> None:
        self.stack = stack
        self.result = OmegaConf.create(stack.tree)
        self.problems: list[str] = []
        self._wrong: set[str] = set()  # keys with a mistake. What follows from them is not reported again.
        self._missing: list[str] = []  # keys without a value that an experiment must set
        self._formulas: list[tuple[Any, Any, str, str, Key]] = []
        self._check_requirements(stack.tree.get("requires"), files)
        self._check_mapping(self.result, stack.tree, "", ANYTHING)
        for formula in self._formulas:  # when all wrong values are known
            self._check_formula(*formula)
        if self._missing and is_complete:
            files = [file for file in config_files(ROOT_BASE.parent) if "configs.model = " in file.read_text()]
            first = f"name an experiment first: --configs {' or '.join(map(show, files))}"
            self.problems.append(f"no {', '.join(self._missing)} in this stack; {first}")

    def _report(self, path: str, message: str) -> None:
        self._wrong.add(path)
        self.problems.append(f"{self.stack.origin(path)}: {message}")

    def _is_reported(self, *paths: str) -> bool:
        """Whether a mistake is reported for one of these keys or for a node that contains it."""
        return any(f"{path}.".startswith(f"{wrong}.") for path in paths for wrong in self._wrong)

    def _check_requirements(self, requires: Any, files: Sequence[Path]) -> None:
        """Checks `requires`, the values that stacked bases require: {dotted key: value}."""
        for key, wanted in requires.items() if isinstance(requires, dict) else ():
            found = OmegaConf.select(self.result, key, throw_on_resolution_failure=False)
            if found != wanted:
                by, origin = self.stack.origin(f"requires.{key}"), self.stack.origin(key)
                late = [file for file in files if by in map(show, [*bases_of(file), file])]
                right = [file for file in files if file not in late] + late
                cure = f"leave out the one or the other: {origin}, {' '.join(map(show, late)) or by}"
                if late and right != files:
                    cure = f"the right order is --configs {' '.join(map(show, right))}"
                self._wrong.add(key.removesuffix("._target_"))
                self.problems.append(f"{key} is {found} ({origin}), but {by} needs {wanted} there; {cure}")

    def _check_mapping(self, node: Any, raw: dict[str, Any], path: str, accepted: Key) -> None:
        """Checks the keys of a section, of a constructor or of a mapping with free names."""
        section = self.stack.sections.get(path, {}) if "_target_" not in raw else {}
        keys = self._keywords(node, path) if "_target_" in raw else section or None
        for key in {**section, **raw}:
            at, value = f"{path}.{key}".lstrip("."), raw.get(key)
            known = accepted.items or ANYTHING if keys is None else keys.get(key)
            if key not in raw:
                self._report(at, f"removes {at}; set keys one by one, or to null")
            elif known is None:
                self._report(at, self._unknown(at, keys or (), raw))
            elif value is None and key in section and known.default is None and known.wanted(None):
                self._missing.append(at)
                self._wrong.add(at)
            else:
                near = closest(key, (name for name in raw if name != key), 0) if known is accepted.items else ""
                self._check_value(node, key, value, at, known, near)

    def _keywords(self, node: Any, path: str) -> dict[str, Key] | None:
        """What the keywords of a node's constructor accept. None: every keyword, or the constructor is wrong."""
        try:
            return keywords(import_target(target := str(node["_target_"])))
        except ConfigError as error:
            self._report(f"{path}._target_", f"{path}._target_ is {target}: {error}")
        except OmegaConfBaseException:  # a formula without a value, which is reported
            pass
        return None

    def _takes(self, value: Any, keyword: str) -> bool:
        """Whether a value is a constructor that takes this keyword."""
        try:
            return isinstance(value, dict) and keyword in (keywords(import_target(str(value["_target_"]))) or ())
        except (ConfigError, KeyError):
            return False

    def _check_value(self, node: Any, key: Any, raw: Any, path: str, accepted: Key, near: str = "") -> None:
        """Checks one value and those below it. `key` is its key or its index in `node`."""
        if self._is_reported(path):
            return
        if is_formula(raw):
            self._formulas.append((node, key, raw, path, accepted))
        elif wanted := accepted.wanted(raw):
            hint = "; a text that looks like something else is written '\"5\"'" if "text" in wanted else near
            self._report(path, f"{path} is {short(repr(raw), 60)}, but it must be {wanted}{hint}")
        elif isinstance(raw, dict):
            self._check_mapping(node[key], raw, path, accepted)
        elif isinstance(raw, list):
            for n, item in enumerate(raw):
                self._check_value(node[key], n, item, f"{path}.{n}", key_of(accepted.kinds() - {"list"}))
        elif isinstance(raw, float) and accepted.kinds() & {"int", "float"} == {"int"}:
            node[key] = int(raw)

    def _check_formula(self, node: Any, key: Any, raw: str, path: str, accepted: Key) -> None:
        if self._is_reported(*re.findall(r"[\w.]+", raw)):
            return
        try:
            value = node[key]
        except (OmegaConfBaseException, RecursionError) as error:
            self._report(path, f"{path} is {short(raw)}: {short(self._reason(error), 160)}")
            return
        value = OmegaConf.to_container(value) if isinstance(value, Container) else value
        if wanted := accepted.wanted(value):
            given = f"{short(raw)}, which gives {short(repr(value))}"
            self._report(path, f"{path} is {given}, but it must be {wanted}")

    def _reason(self, error: Exception) -> str:
        """Why a formula has no value."""
        reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
        if missing := re.fullmatch(r"Interpolation key '(.*)' not found", reason):
            near = [f"; closest: {key}" for key in similar(missing[1], self.stack.tree)]
            return f"there is no key {missing[1]!r}{''.join(near[:1])}"
        return "it refers back to itself, or is too long" if "ecursi" in reason else reason

    def _unknown(self, path: str, keys: Iterable[str], raw: dict[str, Any]) -> str:
        """The message for a key that its section or its constructor, the node `raw`, does not have."""
        above, _, key = path.rpartition(".")
        near = closest(key, (name for name in keys if name not in SPECIAL))
        if (target := raw.get("_target_")) is None:
            elsewhere = "" if "closest" in near else ", ".join(similar(key, self.stack.tree, without=path))
            return f"unknown key {path}{f'; there is {elsewhere}' if elsewhere else near}"
        inner = [f"{above}.{name}.{key}" for name, value in raw.items() if self._takes(value, key)]
        hint = f"; there is {', '.join(inner)}" if inner else near
        message = f"{path}: {target} takes no keyword {key!r}{hint}"
        # Shipped folders that set another constructor there, except experiments, which set all the rest as well.
        bases = {file.parent.name: file.read_text() for file in sorted(ROOT_BASE.parent.glob("*/__init__.py"))}
        wanted = [name for name, text in bases.items() if f"configs.{above} = Config(" in text]
        if folders := [f"configs/{name}/..." for name in wanted if "configs.dataset = " not in bases[name]]:
            message += f"; to have another one there, stack a file of {' or '.join(folders)} after the experiment"
        by = self.stack.origin(f"{above}._target_")
        if by.startswith("command line") and by != self.stack.origin(path):  # a keyword of another constructor
            message += f"; to set all of it anew: --configs.{above} '{{_target_: {target}, ...}}'"
        return message
