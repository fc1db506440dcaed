"""Loading of the native library, once per process, and helpers to call its functions."""

import ctypes
import os
import shutil
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import repeat
from typing import overload

import torch
from torch import Tensor

FP32, FP64, INT32, INT64, UINT8 = torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8

Signatures = Mapping[str, tuple[type | None, tuple[type, ...]]]  # by function name: types of result and arguments


class KernelsMissing(RuntimeError):
    """The native kernels cannot be used. The message names the fix."""


ISAS = ("portable", "avx2", "avx512")


def load() -> ctypes.CDLL:
    """Load the library. DGC_KERNELS_ISA names the instruction set; the default is the best that the CPU supports.

    Raises:
        KernelsMissing: The library is not built, was built from other sources, does not load on this machine, or
            the CPU does not support DGC_KERNELS_ISA.
    """
    library = _open()
    refusal = library.dgc_choose_isa(os.environ.get("DGC_KERNELS_ISA", "").encode())
    if refusal is not None:
        raise KernelsMissing(refusal.decode())
    return library


def supported_isas() -> tuple[str, ...]:
    """Return the instruction sets that this CPU supports, simplest first. Raises KernelsMissing like `load`."""
    return ISAS[: _open().dgc_best_isa() + 1]


@cache
def _open() -> ctypes.CDLL:
    from dgc.kernels import build  # not with the package, since `python -m dgc.kernels.build` imports that first

    cure = "run `python -m dgc.kernels.build`"
    if shutil.which(build.compiler()[0]) is None:
        cure = f"install a C++ compiler (Debian, Ubuntu: apt install g++) or set CXX, then {cure}"
    if not build.LIBRARY.exists():
        raise KernelsMissing(f"the native kernels are not built: {cure}")
    try:
        library = ctypes.CDLL(str(build.LIBRARY))
        built_from = library.dgc_stamp
    except (OSError, AttributeError) as error:
        raise KernelsMissing(f"the native kernels do not load ({error}): {cure}") from error
    built_from.restype = ctypes.c_char_p
    if not built_from().decode().startswith(build.stamp(build.sources_digest())):
        raise KernelsMissing(f"the native kernels were built from other sources: {cure}")
    library.dgc_choose_isa.restype, library.dgc_choose_isa.argtypes = ctypes.c_char_p, (ctypes.c_char_p,)
    return library


def declare(library: ctypes.CDLL, signatures: Signatures) -> None:
    """Declare argument and result types. By default ctypes uses C int, which is too short for addresses."""
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


@overload
def pointer(tensor: Tensor, dtype: torch.dtype) -> int: ...
@overload
def pointer(tensor: Tensor | None, dtype: torch.dtype) -> int | None: ...
def pointer(tensor: Tensor | None, dtype: torch.dtype) -> int | None:
    """Return the address of the tensor's elements, for native code, which cannot check its arguments.

    None gives None, a null pointer.

    Raises:
        TypeError: The tensor has another dtype, is not on the CPU, or is not contiguous.
    """
    if tensor is None:
        return None
    if tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous():
        return tensor.data_ptr()
    raise TypeError(refusal(tensor, dtype, "cpu"))


def pointers(tensors: Sequence[Tensor], dtype: torch.dtype) -> bytes:
    """Return an array of addresses, as bytes because ctypes fills its own arrays slowly."""
    return array("Q", map(pointer, tensors, repeat(dtype))).tobytes()


def refusal(tensor: Tensor, dtype: torch.dtype, device: str) -> str:
    """Return an error text: what a kernel accepts, and what this tensor is."""
    layout = "contiguous" if tensor.is_contiguous() else f"non-contiguous (stride {tensor.stride()})"
    return (
        f"a kernel takes a contiguous {dtype} tensor on {device}, not a {layout} {tensor.dtype} tensor of shape "
        f"{tuple(tensor.shape)} on {tensor.device}"
    )
