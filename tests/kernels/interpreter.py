"""Triton's interpreter where there is no GPU. Imported before any of Triton's kernels, which look for it then."""

import inspect
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
with pytest.MonkeyPatch.context() as patch:
    if DEVICE == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    for name in ("blocks", "codec", "elements", "lowrank", "quantize"):
        import_module(f"dgc.kernels.triton_{name}")
    from dgc.kernels.triton_selection import INTERPRETED

assert INTERPRETED == (DEVICE == "cpu"), "Triton was imported before this file could ask for its interpreter"
# Of programs: the interpreter runs them one after the other. In the opposite order, a race would give other bits.
# Loops in a kernel have three bounds.
ORDERS: tuple[Any, ...] = (range,)
if INTERPRETED:
    ORDERS = (lambda *n: range(*n)[::-1] if len(n) == 1 else range(*n),)


@cache
def builtins_of(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if triton.language.core.is_builtin(member)]


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's own, which searches all members at every call of a function: a third of its time."""
    for name in builtins_of(package):
        if triton.language.core.is_builtin(member := getattr(package, name)):
            triton.runtime.interpreter._patch_attr(package, name, member, builder, scope)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tests that import it alone."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr("triton.runtime.interpreter._patch_builtin", patch_builtin)
