"""Loading of the native library, once per process, the types of its arguments, and the base of its classes.

The kernels are C++ behind a C interface, for contiguous CPU tensors. The bits are the same as in plain torch.
Kernels run on torch.get_num_threads() threads; the codec of payloads runs on one, but for the encoding of two-bit
values. The number of threads does not change the result.
"""

import ctypes
import os
import shutil
from array import array
from collections.abc import Mapping
from functools import cache
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

as_pointer = ctypes.c_void_p.from_param  # faster than the construction of a c_void_p


def address(tensor: Tensor | None, dtype: torch.dtype) -> int:
    if tensor is None:
        return 0
    if tensor.dtype is dtype and tensor.is_cpu and tensor.is_contiguous():
        return tensor.data_ptr()
    raise TypeError(refusal(tensor, dtype, "cpu"))


class Address:
    """Type of an argument: the address of a contiguous CPU tensor of one dtype. None is a null pointer.

    Native code cannot check its arguments. Another tensor is a ctypes.ArgumentError, which says what it is.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def from_param(self, tensor: Any) -> Any:
        if tensor is None:
            return None
        # `address` inline: a call for each argument would take more time than the check
        if tensor.dtype is self.dtype and tensor.is_cpu and tensor.is_contiguous():
            return as_pointer(tensor.data_ptr())
        raise TypeError(refusal(tensor, self.dtype, "cpu"))


class Addresses(Address):
    """Type of an argument: an array of addresses of tensors. None is a null pointer, also in the array."""

    def from_param(self, tensors: Any) -> Any:
        # as bytes, because ctypes fills its own arrays slowly
        return None if tensors is None else array("Q", map(address, tensors, repeat(self.dtype))).tobytes()


FP32, FP64, INT32, INT64, UINT8 = torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8
F32, F64, I32, I64, U8 = map(Address, (FP32, FP64, INT32, INT64, UINT8))
EACH_F32, EACH_I32, EACH_U8 = map(Addresses, (FP32, INT32, UINT8))
Signatures = Mapping[str, tuple[Any, tuple[Any, ...]]]


class KernelsUnavailable(ValueError):
    """A backend cannot run on this machine or device. The message names the fix."""


ISAS = ("portable", "avx2", "avx512")


def load(signatures: Signatures) -> ctypes.CDLL:
    """Load the library. DGC_KERNELS_ISA names the instruction set; the default is the best that the CPU supports.

    Args:
        signatures: Types of the result and the arguments, by function name. By default ctypes uses C int, which is
            too short for addresses.

    Raises:
        KernelsUnavailable: The library is not built, was built from other sources, does not load on this machine,
            or the CPU does not support DGC_KERNELS_ISA.
    """
    library = _open()
    choose_isa(os.environ.get("DGC_KERNELS_ISA", ""))
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def choose_isa(name: str) -> None:
    """Use this instruction set in all later calls, or the best that the CPU supports if `name` is empty.

    Raises:
        KernelsUnavailable: The library is not available, or the CPU does not support `name`.
    """
    refusal = _open().dgc_choose_isa(name.encode())
    if refusal is not None:
        raise KernelsUnavailable(refusal.decode())


def supported_isas() -> tuple[str, ...]:
    """Return the instruction sets that this CPU supports, simplest first. Raises the errors of `load`."""
    return ISAS[: _open().dgc_best_isa() + 1]


def _cure() -> str:
    from dgc.kernels import build

    words = "run `python -m dgc.kernels.build`"
    try:
        is_found = shutil.which(build.compiler()[0]) is not None
    except RuntimeError:  # CXX is no command
        is_found = False
    if not is_found:
        words = f"install a C++ compiler (Debian, Ubuntu: apt install g++) or set CXX, then {words}"
    return f"install a wheel of dgc-torch (Linux, x86-64 or aarch64), or {words}"


@cache
def _open() -> ctypes.CDLL:
    from dgc.kernels import build  # not with the package, since `python -m dgc.kernels.build` imports that first

    if not build.LIBRARY.exists():
        raise KernelsUnavailable(f"the native kernels are not built: {_cure()}")
    try:
        if not build.is_whole(build.LIBRARY):
            raise OSError(f"{build.LIBRARY} is cut off")
        library = ctypes.CDLL(str(build.LIBRARY))
        built_from = library.dgc_stamp
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"the native kernels do not load ({error}): {_cure()}") from error
    built_from.restype = ctypes.c_char_p
    if not built_from().decode().startswith(build.stamp(build.sources_digest())):
        raise KernelsUnavailable(f"the native kernels were built from other sources: {_cure()}")
    library.dgc_choose_isa.restype, library.dgc_choose_isa.argtypes = ctypes.c_char_p, (ctypes.c_char_p,)
    return library


def refusal(tensor: Tensor, dtype: torch.dtype, device: str) -> str:
    """Return an error text: what a kernel accepts, and what this tensor is."""
    layout = "contiguous" if tensor.is_contiguous() else f"non-contiguous (stride {tensor.stride()})"
    return (
        f"a kernel takes a contiguous {dtype} tensor on {device}, not a {layout} {tensor.dtype} tensor of shape "
        f"{tuple(tensor.shape)} on {tensor.device}"
    )


class Native:
    """Base of the native classes: loads the library. Raises `KernelsUnavailable` if it cannot be used."""

    signatures: Signatures = {}

    def __init__(self) -> None:
        self._library = load(self.signatures)
