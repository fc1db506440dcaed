"""The backends of kernels and the codecs that this machine can run, for tests that hold for each of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from dgc.kernels.library import supported_isas
from dgc.kernels.payload import Codec
from dgc.kernels.payload.native import NativeCodec
from dgc.kernels.selection import SelectionKernels
from dgc.kernels.selection.native import NativeSelection

CODECS: dict[str, Codec] = {"reference": Codec(), "native": NativeCodec()}
# every instruction set, with one, two and three threads, and the best of them with one and with three
ISAS = supported_isas()
CHOICES = {f"native-{isa}-{n}": (isa, n) for n, isa in [*enumerate(ISAS, 1), (1, ISAS[-1]), (3, ISAS[-1])]}
NAMES = ("reference", *CHOICES)


@contextmanager
def backend(name: str) -> Iterator[SelectionKernels]:
    if name == "reference":
        yield SelectionKernels()
        return
    (isa, threads), before = CHOICES[name], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with patch.dict(os.environ, {"DGC_KERNELS_ISA": isa}):
            yield NativeSelection()
    finally:
        torch.set_num_threads(before)


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Iterator[SelectionKernels]:
    with backend(request.param) as chosen:
        yield chosen


@pytest.fixture(params=NAMES[1:])
def native(request: pytest.FixtureRequest) -> Iterator[SelectionKernels]:
    with backend(request.param) as chosen:
        yield chosen
