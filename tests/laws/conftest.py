"""LAWS_DEFAULT_DTYPE=float16 runs every law under that default dtype; `make proof` does for all of them."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, os.environ.get("LAWS_DEFAULT_DTYPE", "float32")))
    yield
    torch.set_default_dtype(before)
