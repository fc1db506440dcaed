"""The hot loops in three equivalent backends: `reference` (plain torch), `native` (C++) and `triton` (GPU).

The device of the tensor selects the backend, unless DGC_KERNELS or `use` names one.
"""

import os
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dgc.kernels.codes import Quantizers as Quantizers
from dgc.kernels.codes import seed_word as seed_word
from dgc.kernels.codes.blocks import BlockCode as BlockCode
from dgc.kernels.codes.blocks import Blocks as Blocks
from dgc.kernels.codes.elements import ElementCode as ElementCode
from dgc.kernels.codes.elements import ElementCoder as ElementCoder
from dgc.kernels.codes.elements import Form as Form
from dgc.kernels.codes.elements import Measured as Measured
from dgc.kernels.codes.elements import Scale as Scale
from dgc.kernels.codes.halves import HalfCode as HalfCode
from dgc.kernels.codes.halves import Halves as Halves
from dgc.kernels.codes.halves import code_of as code_of
from dgc.kernels.codes.native import NativeBlocks, NativeElementCoder, NativeHalves, NativeQuantizers
from dgc.kernels.digest import RowSums as RowSums
from dgc.kernels.digest.native import NativeRowSums
from dgc.kernels.library import KernelsUnavailable as KernelsUnavailable
from dgc.kernels.lowrank import LowRank as LowRank
from dgc.kernels.lowrank.native import NativeLowRank
from dgc.kernels.payload import Codec as Codec
from dgc.kernels.payload import MeanDecoder as MeanDecoder
from dgc.kernels.payload.native import NativeCodec, NativeMeanDecoder
from dgc.kernels.selection import Budget as Budget
from dgc.kernels.selection import Merged as Merged
from dgc.kernels.selection import Moments as Moments
from dgc.kernels.selection import PassInputs as PassInputs
from dgc.kernels.selection import Prediction as Prediction
from dgc.kernels.selection import SelectionKernels as SelectionKernels
from dgc.kernels.selection import SparseVector as SparseVector
from dgc.kernels.selection import Tail as Tail
from dgc.kernels.selection import TopKResult as TopKResult
from dgc.kernels.selection import usable as usable
from dgc.kernels.selection.native import NativeSelection
from dgc.launch import started_by
from dgc.warn import warn

BACKENDS = ("auto", "reference", "native", "triton")
_asked = os.environ.get("DGC_KERNELS", "auto")


@dataclass(frozen=True)
class Backend:
    """One implementation of every family of kernels.

    decoder: decodes and adds the payloads of all ranks in one call. None: the codec decodes each payload, and
    `selection.merge_mean` adds them, with the same bits. coder: takes the steps of methods with a code for every
    element. None: they use the other kernels.
    """

    selection: SelectionKernels
    codec: Codec
    quantize: Quantizers
    lowrank: LowRank
    blocks: Blocks
    halves: Halves
    sums: RowSums
    decoder: MeanDecoder | None = None
    coder: ElementCoder | None = None


def use(name: str) -> None:
    """Select the backend for all later calls.

    Args:
        name: "auto", "reference", "native" or "triton". "auto" uses native on a CPU and triton on a GPU, or
            reference with a warning if that backend is missing.

    Raises:
        ValueError: `name` is none of these.
    """
    global _asked
    if name not in BACKENDS:
        raise ValueError(f"kernels must be one of {', '.join(BACKENDS)}, not {name!r}")
    _asked = name


def of(tensor: Tensor) -> Backend:
    """Return the kernels for the tensor's device, for example `kernels.of(v).codec`."""
    return _backend(_asked, tensor.device)


def on_host() -> Backend:
    """Return the kernels for bytes in the host's memory, whatever the device of the model."""
    return _backend("auto" if _asked == "triton" else _asked, torch.device("cpu"))


def of_code(code: BlockCode, tensor: Tensor) -> Blocks:
    """Return the kernels of a code in rows, for the tensor's device."""
    backend = of(tensor)
    return backend.halves if isinstance(code, HalfCode) else backend.blocks


def describe(device: torch.device) -> str:
    """Return a text for logs that names the device's backend."""
    return str(_backend(_asked, device).selection)


@cache
def _backend(asked: str, device: torch.device) -> Backend:
    if asked not in BACKENDS:
        raise ValueError(f"DGC_KERNELS must be one of {', '.join(BACKENDS)}, not {asked!r}")
    kind = device.type
    name = asked if asked != "auto" else ("native" if kind == "cpu" else "triton")
    try:
        if name == "native" and kind != "cpu":
            raise KernelsUnavailable(f"the native kernels run on a CPU, not on {kind}")
        if name == "native":
            native = NativeSelection()
            families = (
                NativeCodec(),
                NativeQuantizers(),
                NativeLowRank(native),
                NativeBlocks(native),
                NativeHalves(),
                NativeRowSums(),
            )
            return Backend(native, *families, NativeMeanDecoder(), NativeElementCoder())
        if name == "triton":
            return _triton(kind)
    except KernelsUnavailable as missing:
        if asked != "auto":
            raise
        started = started_by(os.environ)
        # all ranks of a machine have the same files
        if started is None or os.environ.get(started.launcher.local_rank, "0") == "0":
            warn(f"{missing}. Plain PyTorch is used instead, which is slower")
    plain = SelectionKernels()
    return Backend(plain, Codec(), Quantizers(), LowRank(plain), Blocks(plain), Halves(plain), RowSums())


def _triton(device: str) -> Backend:
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise KernelsUnavailable("the triton kernels run on a GPU (on a CPU only with TRITON_INTERPRET=1)")
    try:
        from dgc.kernels.codes.triton import TritonQuantizers
        from dgc.kernels.codes.triton_blocks import TritonBlocks
        from dgc.kernels.codes.triton_elements import TritonElementCoder
        from dgc.kernels.codes.triton_halves import TritonHalves
        from dgc.kernels.lowrank.triton import TritonLowRank
        from dgc.kernels.payload.triton import TritonCodec, TritonMeanDecoder
        from dgc.kernels.selection.triton import TritonSelection
    except ImportError as error:
        raise KernelsUnavailable(f"triton cannot be imported ({error}); install it: pip install triton") from error
    triton = TritonSelection()
    families = TritonCodec(), TritonQuantizers(), TritonLowRank(triton)
    rows = TritonBlocks(selection=triton), TritonHalves(triton)
    return Backend(triton, *families, *rows, RowSums(), TritonMeanDecoder(), TritonElementCoder())
