"""The one check of a finished tree: keys, values, formulas, constructors with their keywords, and requirements."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dgc_training.config.errors import ConfigError, closest, short
from dgc_training.config.formulas import is_formula
from dgc_training.config.layers import ROOT_BASE, bases_of, config_files, show
from dgc_training.config.stack import Stack
from dgc_training.config.targets import ANYTHING, SPECIAL, Key, import_target, key_of, keywords
from dgc_training.config.tree import Keys, dotted, similar


class Check:
    """Checks the tree of a stack. `files` are those that the user named. If a layer could not be applied, the tree
    is not complete: keys that an experiment must set may be missing.

    Attributes:
        result: the tree as an OmegaConf object, with its formulas.
        problems: one message for each mistake: the layer, the key, the mistake and its cure.
    """

    def __init__(self, stack: Stack, files: Sequence[Path], is_complete: bool) -> None:
        self.stack, self.files = stack, files
        self.result = OmegaConf.create(stack.tree)
        self.problems: list[str] = []
        self._wrong: set[str] = set()  # keys with a mistake. What follows from them is not reported again.
        self._missing: list[str] = []  # keys without a value that an experiment must set
        self._formulas: list[tuple[Any, Any, str, Keys, Key]] = []
        self._check_requirements(stack.tree.get("requires"))
        self._check_mapping(self.result, stack.tree, (), Key(dict, section=True))
        for formula in self._formulas:
            self._check_formula(*formula)
        if self._missing and is_complete:
            files = [file for file in config_files(ROOT_BASE.parent) if "configs.model = " in file.read_text()]
            first = f"name an experiment first: --configs {' or '.join(map(show, files))}"
            self.problems.append(f"no {', '.join(self._missing)} in this stack; {first}")

    def _report(self, path: Keys, message: str) -> None:
        self._wrong.add(dotted(path))
        self.problems.append(f"{self.stack.origin(path)}: {message}")

    def _is_reported(self, *names: str) -> bool:
        """Whether a mistake is reported for one of these keys or for a node that contains it."""
        return any(f"{name}.".startswith(f"{wrong}.") for name in names for wrong in self._wrong)

    def _check_requirements(self, requires: Any) -> None:
        """Checks `requires`, the values that stacked bases require: {dotted key: value}."""
        for key, wanted in requires.items() if isinstance(requires, dict) else ():
            try:
                found = OmegaConf.select(self.result, key)
            except OmegaConfBaseException:  # a formula without a value, which is reported, or no node
                found = None
            if found != wanted:
                by, origin = self.stack.origin(("requires", key)), self.stack.origin(tuple(key.split(".")))
                late = [file for file in self.files if by in map(show, [*bases_of(file), file])]
                right = [*dict.fromkeys(file for file in self.files if file not in late), *dict.fromkeys(late)]
                cure = f"leave out the one or the other: {origin}, {' '.join(map(show, late)) or by}"
                if late and right != self.files:
                    cure = f"the right order is --configs {' '.join(map(show, right))}"
                self._wrong.add(key.removesuffix("._target_"))
                self.problems.append(f"{key} is {found} ({origin}), but {by} needs {wanted} there; {cure}")

    def _check_mapping(self, node: Any, raw: dict[str, Any], path: Keys, accepted: Key) -> None:
        """Checks the keys of a section, of a constructor or of a mapping with free names."""
        keys = None
        if "_target_" in raw:
            keys = self._keywords(node, path)
        elif accepted.section:
            keys = {name[-1]: key for name, key in self.stack.keys.items() if name[:-1] == path}
            for key in (key for key in keys if key not in raw):
                self._report((*path, key), f"removes {dotted((*path, key))}; set keys one by one, or to null")
        for key, value in raw.items():
            known = keys.get(key) if keys is not None else accepted.items or ANYTHING
            if known is None:
                self._report((*path, key), self._unknown((*path, key), keys or (), raw.get("_target_")))
            elif value is None and accepted.section and known.must_be_set:
                self._missing.append(dotted((*path, key)))
                self._wrong.add(dotted((*path, key)))
            else:
                self._check_value(node, key, value, (*path, key), known)

    def _keywords(self, node: Any, path: Keys) -> dict[str, Key] | None:
        """What the keywords of a node's constructor accept. None: every keyword, or the constructor is wrong."""
        name = ""
        try:
            known = keywords(import_target(name := str(node["_target_"])))
        except (OmegaConfBaseException, ConfigError) as error:
            if isinstance(error, ConfigError):  # otherwise a formula without a value, which is reported
                self._report((*path, "_target_"), f"{dotted((*path, '_target_'))} is {name}: {error}")
            return None
        if known is None:
            return None
        kinds = {key: Key(parameter.annotation).kinds() for key, parameter in known.items()}
        return {key: key_of(kinds[key]) for key in kinds} | {"_target_": Key(str), "_partial_": Key(bool)}

    def _check_value(self, node: Any, key: Any, raw: Any, path: Keys, accepted: Key) -> None:
        """Checks one value and those below it. `key` is its key or its index in `node`."""
        if self._is_reported(dotted(path)):
            return
        if is_formula(raw):  # checked last, when all wrong values are known
            self._formulas.append((node, key, raw, path, accepted))
        elif wanted := accepted.wanted(raw):
            hint = "; a text that looks like something else is written '\"5\"'" if "text" in wanted else ""
            self._report(path, f"{dotted(path)} is {short(repr(raw), 60)}, but it must be {wanted}{hint}")
        elif isinstance(raw, dict):
            self._check_mapping(node[key], raw, path, accepted)
        elif isinstance(raw, list):
            for n, item in enumerate(raw):
                self._check_value(node[key], n, item, (*path, str(n)), key_of(accepted.kinds() - {"list"}))
        elif isinstance(raw, float) and accepted.kinds() & {"int", "float"} == {"int"}:
            node[key] = int(raw)

    def _check_formula(self, node: Any, key: Any, raw: str, path: Keys, accepted: Key) -> None:
        if self._is_reported(*re.findall(r"[\w.]+", raw)):
            return
        try:
            value = node[key]
        except (OmegaConfBaseException, RecursionError) as error:
            self._report(path, f"{dotted(path)} is {short(raw)}: {self._reason(error)}")
            return
        value = OmegaConf.to_container(value) if isinstance(value, Container) else value
        if wanted := accepted.wanted(value):
            given = f"{short(raw)}, which gives {short(repr(value))}"
            self._report(path, f"{dotted(path)} is {given}, but it must be {wanted}")

    def _reason(self, error: Exception) -> str:
        """The reason why a formula has no value."""
        reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
        if "ecursi" in reason:
            return "it refers back to itself, or is too long"
        if missing := re.fullmatch(r"Interpolation key '(.*)' not found", reason):
            near = similar(missing[1], self.stack.tree)
            return f"there is no key {missing[1]!r}{f'; closest: {near[0]}' if near else ''}"
        return short(reason, 160)

    def _unknown(self, path: Keys, keys: Iterable[str], target: str | None) -> str:
        """The message for a key that its section or its constructor does not have."""
        key, above = path[-1], dotted(path[:-1])
        if target is None:
            elsewhere = [] if closest(key, keys, 0) else similar(key, self.stack.tree, without=dotted(path))
            near = f"; there is {', '.join(elsewhere)}" if elsewhere else closest(key, keys)
            return f"unknown key {dotted(path)}{near}"
        near = closest(key, (name for name in keys if name not in SPECIAL))
        message = f"{dotted(path)}: {target} takes no keyword {key!r}{near}"
        # Shipped folders that set another constructor there, except experiments, which set all the rest as well.
        texts = {file.parent.name: file.read_text() for file in sorted(ROOT_BASE.parent.glob("*/__init__.py"))}
        texts = {name: text for name, text in texts.items() if "configs.dataset = " not in text}
        if folders := [f"configs/{name}/..." for name in texts if f"configs.{above} = Config(" in texts[name]]:
            message += f"; to have another one there, stack a file of {' or '.join(folders)} after the experiment"
        by = self.stack.origin((*path[:-1], "_target_"))
        if by.startswith("command line") and by != self.stack.origin(path):  # a keyword of another constructor
            message += f"; to set all of it anew: --configs.{above} '{{_target_: {target}, ...}}'"
        return message
