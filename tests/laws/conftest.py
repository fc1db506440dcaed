"""LAWS_DEFAULT_DTYPE=float16 runs every law under that default dtype; `make proof` does for all of them."""

import os
from collections.abc import Iterator

import pytest
import torch
from laws.default_dtype import default


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    with default(getattr(torch, os.environ.get("LAWS_DEFAULT_DTYPE", "float32"))):
        yield
