"""The layers of a load: config files, found by name, and overrides of the command line, which are never code."""

import os
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dgc_training.config.earlier import converted, key_now
from dgc_training.config.tree import Config, Key, assign_, copied, is_formula, leaves, merge_
from dgc_training.errors import ConfigError, closest, collecting, short

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT_BASE = REPOSITORY / "configs" / "__init__.py"
SUFFIXES = (".py", ".yaml", ".yml")
UNDER_CONSTRUCTION: ContextVar[Config | None] = ContextVar("configs", default=None)
PREFIX = "--configs."
# The flags of train.py. They are only used to suggest the spelling of an unknown flag.
FLAGS = "--configs --devices --evaluate --suffix --run-dir --no-resume --print-config --help".split()


class Stack:
    """The tree of all layers so far. The shipped root base is the first layer of every stack."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}  # nested dicts and lists, with formulas as text
        self.keys: dict[str, Key] = {}  # the declared keys, by dotted name
        self.sections = {""}  # the mappings that accept only declared keys
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
        return [*FLAGS, *(PREFIX + key for key, _ in leaves(self.tree))]

    def add(self, file: Path) -> None:
        """Applies a file, after its bases that have not been applied yet."""
        bases = bases_of(file)
        is_first = {*self.origins.values()} == {show(ROOT_BASE)}
        for layer in dict.fromkeys([*bases, file]):
            if layer.resolve() in self._bases:
                continue
            self._bases |= {layer.resolve()} if layer in bases else set()
            if layer.suffix == ".py":
                self.apply(show(layer), execute, layer, declares=layer in bases[:1])
                continue
            content = parse_yaml(layer)
            content = converted(content) if is_first and not bases else content
            # A first file with all declared keys is the config.yaml of a run. It replaces the tree, and may have
            # further keys, which its own stack declared.
            is_saved = is_first and not bases and self.keys.keys() <= dict(leaves(content)).keys()
            change = Config.update if is_saved else merge_
            self.apply(show(layer), change, content, declares=is_saved or layer in bases[:1])

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
                if now := key_now(key, self.tree):
                    raise ConfigError(f"{flag}: local steps are not gossip; write {PREFIX}{now}")
                self.apply(f"command line, {flag}", assign_, key, literal(text.strip(), flag))

    def apply(self, origin: str, change: Callable[..., None], *args: Any, declares: bool = False) -> None:
        """Applies one layer: `change` edits a copy of the tree. `declares`: whether it adds keys to sections."""
        node = copied(self.tree)
        try:
            change(node, *args)
            for path, key in self.keys.items() if declares else ():  # `configs.train = Config()` leaves them out
                section, _, name = path.rpartition(".")
                if isinstance(parent := dict(leaves(node)).get(section), Config):
                    parent.setdefault(name, key)
            tree = copied(node, mapping=dict)
            OmegaConf.create(tree)
        except OmegaConfBaseException as error:  # a formula that cannot be read
            reason = short(str(error).splitlines()[0], 160)
            raise ConfigError(f"{origin}: {error.full_key} is no value or formula: {reason}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(str(error) if origin in str(error) else f"{origin}: {error}") from error
        before, after = dict(leaves(self.tree)), dict(leaves(tree))
        changed = [at for at in {**before, **after} if repr(before.get(at, ...)) != repr(after.get(at, ...))]
        for at in changed:  # two layers may not require different values, as two compression methods do
            if at.startswith("requires.") and at in before and at in after:
                needs = f"{origin} needs {at.removeprefix('requires.')} to be {after[at]}"
                other = f"{self.origin(at)} needs {before[at]}"
                raise ConfigError(f"{needs}, but {other}; leave out the one or the other")
        self.origins |= dict.fromkeys(changed, origin)
        self.tree = tree
        for path, value in leaves(node) if declares else ():
            if path.rpartition(".")[0] in self.sections and path not in self.keys:
                key = Key(Any if value is None or is_formula(value) else type(value) | None)
                if isinstance(value, dict) and "_target_" not in value:
                    key = Key(dict, {}) if value else Key(dict | None)
                    self.sections |= {path} if value else set()  # a mapping with keys becomes a section
                self.keys[path] = value if isinstance(value, Key) else key


def _existing(*paths: Path) -> Path | None:
    """The config file at one of these paths, with or without its suffix. Raises ConfigError if there are two."""
    files = [file for path in paths for end in ("", *SUFFIXES) if (file := Path(f"{path}{end}")).is_file()]
    found = [file for file in files if file.suffix in SUFFIXES]
    if len(found) > 1:
        raise ConfigError(f"{show(paths[0])} may mean {' or '.join(map(show, found))}; write which, or keep one")
    return found[0] if found else None


def bases_of(file: Path) -> list[Path]:
    """The bases of the folders of `file`, topmost first, up to the first folder without a base."""
    base = _existing(file.parent / "__init__")
    return [*bases_of(file.parent), base] if base else []


def find(name: str | os.PathLike[str], words: Sequence[str]) -> Path:
    """The absolute path of config file `name`, searched in the working directory and then in the repository.

    The suffix may be left out. A folder stands for its base. Raises ConfigError unless exactly one file matches.
    """
    paths = [Path(os.path.abspath(root / Path(name).expanduser())) for root in (Path.cwd(), REPOSITORY)]
    for path in paths:
        if found := _existing(path, path / "__init__"):
            return found
    folder = next(filter(Path.is_dir, paths), ROOT_BASE.parent)
    near = closest(str(name).partition("=")[0], [*map(show, config_files(folder)), *words])
    raise ConfigError(f"there is no config file {name}{near}")


def config_files(folder: Path) -> list[Path]:
    """All config files below `folder` except bases, sorted."""
    files = [file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
    return sorted(file for file in files if not file.stem.startswith((".", "__")))


def show(path: Path) -> str:
    """A path relative to the working directory or the repository, if it is below one of them."""
    roots = [root for root in (Path.cwd(), REPOSITORY) if path.is_relative_to(root)]
    return str(path.relative_to(roots[0]) if roots else path)


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
        raise ConfigError(f"{key}: {short(text)} is no list or mapping: {short(error, 160)}") from error
