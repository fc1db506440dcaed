"""The shared library of native kernels, loaded once per process, and how its functions are called."""

import ctypes
import os
from array import array
from collections.abc import Mapping, Sequence
from functools import cache

from torch import Tensor

from dgc.kernels.build import LIBRARY, sources_digest, stamp

CURE = "run `python -m dgc.kernels.build`"

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


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def addresses(tensors: Sequence[Tensor]) -> bytes:
    """For an argument that is an array of pointers. As bytes, because ctypes fills arrays of its own slowly."""
    return array("Q", map(Tensor.data_ptr, tensors)).tobytes()
