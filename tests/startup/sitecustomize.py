"""Lets the processes that tests start do without torch._dynamo, whose import takes as long as that of torch.

The first optimizer that a process makes imports it, so that torch.compile leaves the optimizer's methods alone. No
process that a test starts compiles anything. Python imports this file at its start, since conftest.py has put its
folder on PYTHONPATH.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any


def as_it_is(function: Any = None, recursive: bool = True) -> Any:
    """In place of torch._compile._disable_dynamo, with or without arguments: a decorator that changes nothing."""
    return (lambda decorated: decorated) if function is None else function


class Finder(MetaPathFinder):
    """Finds torch._compile alone, and replaces its decorator once it has been executed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "torch._compile":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                module._disable_dynamo = as_it_is

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
