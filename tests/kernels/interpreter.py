"""Triton's interpreter where there is no GPU. Imported before any of Triton's kernels, which look for it then."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from random import Random

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


def backwards(count: int) -> Sequence[int]:
    return range(count)[::-1]


@cache
def shuffled(count: int) -> Sequence[int]:
    return Random(count).sample(range(count), count)


# Of a grid's programs, which the interpreter runs one after the other and a GPU in an order of its own. In another
# order, a race would give other bits.
ORDERS: dict[str, Callable[[int], Sequence[int]]] = (
    {"in order": range, "reversed": backwards, "shuffled": shuffled} if INTERPRETED else {"any": range}
)
# than that in which another run had them
OTHER_ORDERS = [*ORDERS][1:] or [*ORDERS]


def run_programs(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each kernel's programs run in this order, one of ORDERS."""
    if INTERPRETED:
        from triton.runtime.interpreter import interpreter_builder as builder

        def set_grid_idx(*program: int) -> None:
            places = zip(program, builder.grid_dim, strict=True)
            type(builder).set_grid_idx(builder, *(ORDERS[order](count)[i] for i, count in places))

        monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tests that import it alone."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr("triton.runtime.interpreter._patch_builtin", patch_builtin)
