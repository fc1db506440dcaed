"""The layers of a load: config files, and overrides of the command line, which are never code."""

import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dgc_training.config.tree import Config, assign_, copied, declare_, leaves, merge_
from dgc_training.config_files import ROOT_BASE, bases_of, show
from dgc_training.errors import ConfigError, closest, collecting, short

UNDER_CONSTRUCTION: ContextVar[Config | None] = ContextVar("configs", default=None)
PREFIX = "--configs."
# The flags of train.py. They are only used to suggest the spelling of an unknown flag.
FLAGS = "--configs --devices --evaluate --suffix --run-dir --no-resume --print-config --help".split()


class Stack:
    """The tree of all layers so far. The shipped root base is the first layer of every stack."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}  # nested dicts and lists, with formulas as text
        self.declared: dict[str, Any] = {}  # the keys of every section: nested dicts of Key
        self.origins: dict[str, str] = {}  # the layer that last set, changed or removed each key
        self._bases: set[Path] = set()  # those that have been applied
        self.add(ROOT_BASE)

    def origin(self, path: str) -> str:
        """The layer that set the value at `path`, or the closest node that contains it."""
        while path and path not in self.origins:
            path = path.rpartition(".")[0]
        return self.origins.get(path, "nobody")

    def words(self) -> list[str]:
        """What may stand on the command line: flags and overrides."""
        return [*FLAGS, *(PREFIX + key for key in leaves(self.tree))]

    def add(self, file: Path) -> None:
        """Applies a file, after its bases that have not been applied yet."""
        bases = bases_of(file)
        is_first = {*self.origins.values()} == {show(ROOT_BASE)}
        for layer in dict.fromkeys([*bases, file]):
            if layer.resolve() in self._bases:
                continue
            if layer in bases:
                self._bases.add(layer.resolve())
            if layer.suffix == ".py":
                self.apply(show(layer), execute, layer, declares=layer in bases[:1])
            elif is_first and not bases:
                content = parse_yaml(layer)
                # A first file with all declared keys is the config.yaml of a run. It replaces the tree, and may
                # have further keys, which its own stack declared.
                is_saved = leaves(self.declared).keys() <= leaves(content).keys()
                self.apply(show(layer), Config.update if is_saved else merge_, content, declares=is_saved)
            else:
                self.apply(show(layer), merge_, parse_yaml(layer), declares=layer in bases[:1])

    def override(self, words: Sequence[str], problems: list[str]) -> None:
        """Applies the words of a command line. Each that is no override, or cannot be applied, is a problem."""
        rest = list(words)
        while rest:
            word = rest.pop(0)
            flag, equals, text = word.partition("=")
            if word.startswith("--") and not equals and rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            key = flag.removeprefix(PREFIX)
            with collecting(problems):
                if key in ("", flag):
                    near = closest(flag, self.words()) or f"; overrides are written {PREFIX}KEY VALUE"
                    raise ConfigError(f"unexpected {word!r} on the command line{near}")
                if not text.strip():
                    raise ConfigError(f"{flag} has no value; write null for none, '\"\"' for the empty string")
                self.apply(f"command line, {flag}", assign_, key, literal(text.strip(), flag))

    def apply(self, origin: str, change: Callable[..., None], *args: Any, declares: bool = False) -> None:
        """Applies one layer: `change` edits a copy of the tree. `declares`: whether it adds keys to sections."""
        node = copied(self.tree)
        try:
            change(node, *args)
            if declares:
                declare_(self.declared, node)
            before, after = leaves(self.tree), leaves(tree := copied(node, mapping=dict))
            changed = [at for at in before | after if repr(before.get(at, ...)) != repr(after.get(at, ...))]
        except RecursionError as error:
            raise ConfigError(f"{origin}: it is nested too deeply, or contains itself") from error
        except ValueError as error:
            raise ConfigError(str(error) if origin in str(error) else f"{origin}: {error}") from error
        for at in changed:
            try:
                OmegaConf.create([value] if isinstance(value := after.get(at), str | list) else [])
            except (OmegaConfBaseException, RecursionError) as error:  # a formula that cannot be read
                reason = short(str(error).splitlines()[0], 160)
                raise ConfigError(f"{origin}: {at} is no value or formula: {reason}") from error
            if at.startswith("requires.") and at in before and at in after:  # layers disagree
                needs = f"{origin} needs {at.removeprefix('requires.')} to be {after[at]}"
                other = f"{self.origin(at)} needs {before[at]}"
                raise ConfigError(f"{needs}, but {other}; leave out the one or the other")
        self.origins |= dict.fromkeys(changed, origin)
        self.tree = tree


def execute(tree: Config, file: Path) -> None:
    """Runs a Python file that changes `tree`. Raises ConfigError with file, line and reason."""
    # The file is compiled and run, not imported: an import would run only once per process and keep its state.
    token = UNDER_CONSTRUCTION.set(tree)
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), {"__name__": f"config {file}", "__file__": str(file)})
    except (Exception, SystemExit) as error:
        lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(file)]
        line = error.lineno if isinstance(error, SyntaxError) and not lines else lines[-1]
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{show(file)}, line {line}: {reason}") from error
    finally:
        UNDER_CONSTRUCTION.reset(token)


def parse_yaml(file: Path) -> dict[Any, Any]:
    """Reads one YAML file, without its bases. Raises ConfigError with file and reason, which has the line."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(file))
    except RecursionError as error:
        raise ConfigError(f"{show(file)}: it is nested too deeply") from error
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(f"{show(file)}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{show(file)}: a config file is a mapping of keys, not a list")
    return content


def literal(text: str, key: str) -> Any:
    """The value of a word: null, true, 5, 1e-4, [1, 2], {k: 1}, "quoted", otherwise the word itself."""
    if "${" in text or text == "nan":
        return text
    text = "null" if text.lower() in ("none", "~") else text
    try:
        tree = OmegaConf.create({"value": "${oc.decode:${.text}}", "text": text})
        return OmegaConf.to_container(tree, resolve=True)["value"]  # type: ignore[call-overload,index]
    except OmegaConfBaseException as error:
        if text[0] not in "[{":
            return text
        raise ConfigError(
            f"{key}: {short(text)} is no list or mapping: {short(' '.join(str(error).split()), 160)}"
        ) from error
