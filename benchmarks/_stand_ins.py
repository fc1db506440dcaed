"""Replacements for jaxtyping and pytest on a machine that has only PyTorch and Triton, and for a slow function of
Triton's interpreter.

For jaxtyping there are annotations: `Float32[Tensor, "n"]` is Tensor, and nothing is checked. For pytest there is
what test files with plain functions need: parameters, fixtures and `raises`. An installed jaxtyping is used. Tests
always run without pytest, so that there is only one way.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

ANNOTATIONS = ("Bool", "Float", "Float32", "Float64", "Int8", "Int16", "Int32", "Int64", "Shaped", "UInt8")


class Annotation:
    def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
        return item[0]


def provide_jaxtyping() -> bool:
    """Make `import jaxtyping` work. Returns whether it is the replacement."""
    if sys.modules.get("jaxtyping") is not None or find_spec("jaxtyping") is not None:
        return False
    module = ModuleType("jaxtyping")
    module.__dict__.update(dict.fromkeys(ANNOTATIONS, Annotation))
    sys.modules["jaxtyping"] = module
    return True


class MonkeyPatch(ExitStack):
    """Changes during one test."""

    undo = ExitStack.close

    @classmethod
    def context(cls) -> "MonkeyPatch":
        return cls()

    def setenv(self, name: str, value: str) -> None:
        self.enter_context(patch.dict(os.environ, {name: value}))

    def setattr(self, target: Any, *rest: Any, raising: bool = True) -> None:
        make: Any = patch if isinstance(target, str) else patch.object
        self.enter_context(make(target, *rest, create=not raising))


@contextmanager
def raises(error: type[BaseException], match: str = "") -> Iterator[SimpleNamespace]:
    found = SimpleNamespace()
    try:
        yield found
    except error as raised:
        found.value = raised
        assert re.search(match, str(raised)), f"{match!r} is not in {str(raised)!r}"
    else:
        raise AssertionError(f"no {error.__name__} was raised")


class Row(tuple[Any, ...]):
    """Values for all names of a `parametrize`, from `pytest.param`."""


def parametrize(names: str | tuple[str, ...], values: Any, ids: Any = None) -> Callable[[Any], Any]:
    """`ids` is for pytest's names alone."""
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else names

    def mark(test: Any) -> Any:
        rows = [
            dict(zip(keys, value if len(keys) > 1 or isinstance(value, Row) else (value,), strict=True))
            for value in values
        ]
        test.rows = [*getattr(test, "rows", []), rows]
        return test

    return mark


def skipif(condition: bool, reason: str) -> Callable[[Any], Any]:
    def mark(test: Any) -> Any:
        test.is_skipped = condition
        return test

    return mark


def usefixtures(*names: str) -> Callable[[Any], Any]:
    def mark(test: Any) -> Any:
        test.used = [*names, *getattr(test, "used", [])]
        return test

    return mark


def fixture(function: Any = None, **options: Any) -> Any:
    if function is None:
        return lambda marked: fixture(marked, **options)
    function.fixture_options = options
    return function


def _pytest() -> ModuleType:
    module = ModuleType("pytest")
    mark = SimpleNamespace(
        parametrize=parametrize,
        proof=lambda test: test,
        skipif=skipif,
        usefixtures=usefixtures,
        filterwarnings=lambda warning: lambda test: test,
    )
    parts: dict[str, Any] = {"MonkeyPatch": MonkeyPatch, "FixtureRequest": SimpleNamespace, "mark": mark}
    parts |= {"raises": raises, "fixture": fixture}
    module.__dict__.update(
        parts, param=lambda *values, marks: Row(values), importorskip=lambda name, reason="": import_module(name)
    )
    return module


def load_tests(path: Path) -> ModuleType:
    """Import a test file without pytest. It may import helpers from the folder above its own, as with pytest."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    folders = [*sys.path, str(path.parents[1])]
    installed = {name: found for name, found in sys.modules.items() if name == "pytest"}
    # `patch.dict` would also forget the modules that the file imports, and the next file would have copies of them
    sys.modules["pytest"] = _pytest()
    try:
        with patch.object(sys, "path", folders):
            spec.loader.exec_module(module)
    finally:
        del sys.modules["pytest"]
        sys.modules.update(installed)
    return module


def cases(module: ModuleType, left_out: Mapping[str, str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield name and body of every test and combination of parameters. left_out: skipped tests, and reasons."""
    found = {name: test for name, test in vars(module).items() if name.startswith("test_")}
    unknown = left_out.keys() - found.keys()
    assert not unknown, f"no tests of these names: {sorted(unknown)}"
    fixtures = {name: f for name, f in vars(module).items() if hasattr(f, "fixture_options")}
    params = {name: f.fixture_options["params"] for name, f in fixtures.items() if "params" in f.fixture_options}
    kept: dict[str, Any] = {}
    for name, test in found.items():
        if name in left_out or getattr(test, "is_skipped", False):
            continue
        rows_of_test = getattr(test, "rows", [])
        wanted = [*inspect.signature(test).parameters, *getattr(test, "used", [])]
        rows_of_fixtures = [[{key: value} for value in params[key]] for key in wanted if key in params]
        for rows in product(*rows_of_test, *rows_of_fixtures):
            values = {key: value for row in rows for key, value in row.items()}
            label = ", ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in values.items())
            yield f"{name}({label})", _Case(test, values, fixtures, kept)


class _Case:
    """A test with its values.

    values: of the test's parameters, and the `request.param` of its fixtures. kept: of fixtures of module scope.
    """

    def __init__(self, test: Any, values: dict[str, Any], fixtures: dict[str, Any], kept: dict[str, Any]):
        self._test, self._values, self._fixtures, self._kept = test, values, fixtures, kept

    def __call__(self) -> None:
        with MonkeyPatch.context() as changes:
            made = {"monkeypatch": changes}
            for name, function in self._fixtures.items():
                if function.fixture_options.get("autouse"):
                    self._value(name, made)
            for name in getattr(self._test, "used", []):
                self._value(name, made)
            given = {name: value for name, value in self._values.items() if name not in self._fixtures}
            wanted = inspect.signature(self._test).parameters
            self._test(**{n: given[n] if n in given else self._value(n, made) for n in wanted})

    def _value(self, name: str, made: dict[str, Any]) -> Any:
        if name in made or name in self._kept:
            return made[name] if name in made else self._kept[name]
        if name not in self._fixtures:
            raise LookupError(f"the test needs the fixture {name!r}, which its file does not define")
        function = self._fixtures[name]
        where = self._kept if function.fixture_options.get("scope") == "module" else made
        request = SimpleNamespace(
            param=self._values.get(name), getfixturevalue=lambda wanted: self._value(wanted, made)
        )
        where[name] = function(
            **{
                n: request if n == "request" else self._value(n, made)
                for n in inspect.signature(function).parameters
            }
        )
        return where[name]


@cache
def builtins_of(package: Any) -> list[str]:
    from triton.language.core import is_builtin

    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's own, which searches all members at every call of a function: a third of its time."""
    from triton.language.core import is_builtin
    from triton.runtime.interpreter import _patch_attr

    for name in builtins_of(package):
        if is_builtin(member := getattr(package, name)):
            _patch_attr(package, name, member, builder, scope)
