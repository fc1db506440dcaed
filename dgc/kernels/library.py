"""The shared library of native kernels, loaded once per process, and how its functions are called."""

import ctypes
import os
from array import array
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from dgc.kernels.build import LIBRARY, sources_digest, stamp

CURE = "run `python -m dgc.kernels.build`"

FP32, FP64, INT32, INT64, UINT8 = torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8

Signatures = Mapping[str, tuple[type | None, tuple[type, ...]]]  # of functions, by name: result and arguments


class KernelsMissing(RuntimeError):
    """The native kernels cannot be used here; the message names the cure."""


ISAS = ("portable", "avx2", "avx512")


def load() -> ctypes.CDLL:
    """The library, using the instructions that DGC_KERNELS_ISA names (default: the best that the CPU has).

    KernelsMissing: it was never built, was built from other sources, does not load on this machine, or
    DGC_KERNELS_ISA asks for instructions that the CPU lacks.
    """
    library = _open()
    refusal = library.dgc_choose_isa(os.environ.get("DGC_KERNELS_ISA", "").encode())
    if refusal is not None:
        raise KernelsMissing(refusal.decode())
    return library


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that this CPU can run, the plainest first. KernelsMissing as in `load`."""
    return ISAS[: _open().dgc_best_isa() + 1]


@cache
def _open() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise KernelsMissing(f"the native kernels are not built: {CURE}")
    try:
        library = ctypes.CDLL(str(LIBRARY))
        built_from = library.dgc_stamp
    except (OSError, AttributeError) as error:
        raise KernelsMissing(f"the native kernels do not load ({error}): {CURE}") from error
    built_from.restype = ctypes.c_char_p
    if not built_from().decode().startswith(stamp(sources_digest())):
        raise KernelsMissing(f"the native kernels were built from other sources: {CURE}")
    library.dgc_choose_isa.restype, library.dgc_choose_isa.argtypes = ctypes.c_char_p, (ctypes.c_char_p,)
    return library


def declare(library: ctypes.CDLL, signatures: Signatures) -> None:
    """Without this ctypes would pass and return every number as a C int, too short for addresses."""
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def pointer(tensor: Tensor, dtype: torch.dtype) -> int:
    """Where the elements lie, for native code, which cannot check what it is given.

    TypeError unless the tensor is of this dtype, on the CPU and contiguous.
    """
    if tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous():
        return tensor.data_ptr()
    raise TypeError(refusal(tensor, dtype, "cpu"))


def pointer_or_none(tensor: Tensor | None, dtype: torch.dtype) -> int | None:
    """For an argument that may be null."""
    return None if tensor is None else pointer(tensor, dtype)


def pointers(tensors: Sequence[Tensor], dtype: torch.dtype) -> bytes:
    """For an argument that is an array of pointers. As bytes, because ctypes fills arrays of its own slowly."""
    return array("Q", [pointer(tensor, dtype) for tensor in tensors]).tobytes()


def refusal(tensor: Tensor, dtype: torch.dtype, device: str) -> str:
    """What a kernel takes, and what this tensor is."""
    layout = "contiguous" if tensor.is_contiguous() else f"non-contiguous (stride {tensor.stride()})"
    return (
        f"a kernel takes a contiguous {dtype} tensor on {device}, not a {layout} {tensor.dtype} tensor of shape "
        f"{tuple(tensor.shape)} on {tensor.device}"
    )
