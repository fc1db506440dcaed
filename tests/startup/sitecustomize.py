"""Lets the processes that tests start begin sooner.

The first step of any optimizer imports torch._dynamo, which takes as long as the import of torch. torch.compile
needs it to leave parts of optimizers, DDP and FSDP2 alone, but no process that a test starts compiles anything. A
small module therefore takes its place, and an error is raised if torch uses more of it. These processes also
search for garbage less often, which takes a tenth of the time of imports.

Python imports this file at its start, since conftest.py has put its folder on PYTHONPATH.
"""

import gc
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "torch._dynamo"


def as_it_is(function: Any = None, *args: Any, **options: Any) -> Any:
    """In place of a decorator, with or without arguments: change nothing."""
    return (lambda decorated: decorated) if function is None else function


def optimize_ddp_mode() -> Any:
    """The setting of a caller of DDP, if it is one of the names that torch knows."""
    mode = importlib.import_module(f"{NAME}.config").optimize_ddp
    return mode if isinstance(mode, str) else "no_optimization"


class Substitute(ModuleType):
    """What torch and Lightning use in processes that do not compile, and the modules of the package by name."""

    disable = staticmethod(as_it_is)
    graph_break = staticmethod(lambda: None)
    OptimizedModule = type("OptimizedModule", (), {})  # the class of compiled modules
    eval_frame = SimpleNamespace(OptimizedModule=OptimizedModule)
    # in DDP, and at the end of torch.distributed
    utils = SimpleNamespace(get_optimize_ddp_mode=optimize_ddp_mode)
    trace_rules = SimpleNamespace(
        clear_lru_cache=lambda: None,
        LEGACY_MOD_INLINELIST=set(),
        get_legacy_mod_inlinelist=SimpleNamespace(cache_clear=lambda: None),
    )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return importlib.import_module(f"{NAME}.{name}")


class Finder(MetaPathFinder, Loader):
    """Finds the substitute."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name != NAME:
            return None
        spec = ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [f"{folder}/_dynamo" for folder in path or ()]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Substitute(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It is complete."""


sys.meta_path.insert(0, Finder())
gc.set_threshold(50_000)
