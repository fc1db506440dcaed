"""Triton's interpreter where there is no GPU. Imported before any of Triton's kernels, which look for it then."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
with pytest.MonkeyPatch.context() as patch:
    if DEVICE == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="Triton is not installed")
    from dgc.kernels import (  # noqa: F401
        triton_blocks,
        triton_codec,
        triton_elements,
        triton_lowrank,
        triton_quantize,
    )
    from dgc.kernels.triton_selection import INTERPRETED

assert INTERPRETED == (DEVICE == "cpu"), "Triton was imported before this file could ask for its interpreter"


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tests that import it alone."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
