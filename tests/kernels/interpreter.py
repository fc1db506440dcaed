"""Triton's interpreter where there is no GPU. Imported before any of Triton's kernels, which look for it then."""

from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from benchmarks._stand_ins import patch_builtin
from dgc import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
with pytest.MonkeyPatch.context() as patch:
    if DEVICE == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    ROOT = Path(kernels.__file__).parent
    FILES = [path.relative_to(ROOT).with_suffix("") for path in sorted(ROOT.glob("*/triton*.py"))]
    MODULES = [import_module(f"dgc.kernels.{file.parent}.{file.name}") for file in FILES]
    from dgc.kernels.selection.triton import INTERPRETED

assert INTERPRETED == (DEVICE == "cpu"), "Triton was imported before this file could ask for its interpreter"


def backwards(*bounds: int) -> Any:
    """A grid has one bound, a loop in a kernel three."""
    return range(*bounds)[::-1] if len(bounds) == 1 else range(*bounds)


def shuffled(*bounds: int) -> Any:
    return Random(bounds[0]).sample(range(*bounds), len(range(*bounds))) if len(bounds) == 1 else range(*bounds)


# Of programs: the interpreter runs them one after the other. In another order, a race would give other bits.
ORDERS: tuple[Any, ...] = (backwards, shuffled) if INTERPRETED else (range,)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tests that import it alone."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr("triton.runtime.interpreter._patch_builtin", patch_builtin)
        # the interpreter copies its names into the modules of kernels, also a `range` that was patched for a test
        for module in MODULES:
            vars(module).pop("range", None)
