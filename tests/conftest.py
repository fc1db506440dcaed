"""Order and environment for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PARALLEL = Path(__file__).parent / "parallel"

# before torch is imported: more threads than cores make small tests slower, not faster
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start ranks run last: a fault that one process shows is found before them."""
    items.sort(key=lambda item: PARALLEL in item.path.parents)
