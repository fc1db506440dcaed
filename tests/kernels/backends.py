"""The backends of kernels that this machine can run, for tests that hold for each of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dgc.kernels.library import supported_isas
from dgc.kernels.native import NativeSelection
from dgc.kernels.selection import SelectionKernels

# every instruction set, with one, two and three threads, and the best of them with one and with three
NAMES = tuple(
    dict.fromkeys(
        (
            "reference",
            *(f"native-{isa}-{threads}" for threads, isa in enumerate(supported_isas(), 1)),
            f"native-{supported_isas()[-1]}-1",
            f"native-{supported_isas()[-1]}-3",
        )
    )
)


@contextmanager
def backend(name: str) -> Iterator[SelectionKernels]:
    if name == "reference":
        yield SelectionKernels()
        return
    _, isa, threads = name.split("-")
    threads_before, isa_before = torch.get_num_threads(), os.environ.get("DGC_KERNELS_ISA")
    torch.set_num_threads(int(threads))
    os.environ["DGC_KERNELS_ISA"] = isa
    try:
        yield NativeSelection()
    finally:
        torch.set_num_threads(threads_before)
        os.environ.pop("DGC_KERNELS_ISA")
        if isa_before is not None:
            os.environ["DGC_KERNELS_ISA"] = isa_before
