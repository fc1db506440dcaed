"""The hot loops, in three tiers of one meaning: `reference` (plain torch), `native` (C++), `triton` (GPU).

The tier follows the device of the tensor, unless DGC_KERNELS or `use` names one.
"""

import os
import warnings
from functools import cache

import torch
from torch import Tensor

from dgc.kernels.codec import Codec as Codec
from dgc.kernels.lowrank import LowRank as LowRank
from dgc.kernels.protocol import Accumulation as Accumulation
from dgc.kernels.protocol import Chosen as Chosen
from dgc.kernels.protocol import Kernels as Kernels
from dgc.kernels.protocol import Moments as Moments
from dgc.kernels.protocol import Quotas as Quotas
from dgc.kernels.protocol import Selection as Selection
from dgc.kernels.protocol import Tail as Tail
from dgc.kernels.quantizers import Quantizers as Quantizers

Tier = tuple[Kernels, Codec, Quantizers, LowRank]
TIERS = ("auto", "reference", "native", "triton")
_asked = os.environ.get("DGC_KERNELS", "auto")


class KernelsUnavailable(ValueError):
    """A tier was asked for that this machine, or this device, cannot run."""


def use(name: str) -> None:
    """Let every bucket from now on be handled by this tier: auto, reference, native or triton.

    auto: native on a CPU, triton on a GPU, and where that is missing reference, with a warning.
    """
    global _asked
    if name not in TIERS:
        raise ValueError(f"kernels must be one of {', '.join(TIERS)}, not {name!r}")
    _asked = name


def of(tensor: Tensor) -> Kernels:
    """The kernels for tensors on this one's device."""
    return _tier(_asked, tensor.device)[0]


def codec_of(tensor: Tensor) -> Codec:
    """The payload codec for tensors on this one's device."""
    return _tier(_asked, tensor.device)[1]


def quantizers_of(tensor: Tensor) -> Quantizers:
    """The quantizers for tensors on this one's device."""
    return _tier(_asked, tensor.device)[2]


def lowrank_of(tensor: Tensor) -> LowRank:
    """The products of low-rank methods for tensors on this one's device."""
    return _tier(_asked, tensor.device)[3]


def describe(device: torch.device) -> str:
    """The tier that serves this device, in words for a log."""
    return str(_tier(_asked, device)[0])


@cache
def _tier(asked: str, device: torch.device) -> Tier:
    if asked not in TIERS:
        raise ValueError(f"DGC_KERNELS must be one of {', '.join(TIERS)}, not {asked!r}")
    kind = device.type
    wanted = asked if asked != "auto" else ("native" if kind == "cpu" else "triton")
    try:
        if wanted == "native":
            return _native(kind)
        if wanted == "triton":
            return _triton(kind)
    except KernelsUnavailable as missing:
        if asked != "auto":
            raise
        warnings.warn(f"{missing}. Until then plain PyTorch does the work, more slowly", stacklevel=3)
    from dgc.kernels.bits import TorchCodec
    from dgc.kernels.lowrank import TorchLowRank
    from dgc.kernels.reference import Reference
    from dgc.kernels.torch_quantizers import TorchQuantizers

    plain = Reference()
    return plain, TorchCodec(), TorchQuantizers(), TorchLowRank(plain)


def _native(device: str) -> Tier:
    if device != "cpu":
        raise KernelsUnavailable(f"the native kernels run on a CPU, not on {device}")
    from dgc.kernels.library import KernelsMissing
    from dgc.kernels.native import Native
    from dgc.kernels.native_codec import NativeCodec
    from dgc.kernels.native_lowrank import NativeLowRank
    from dgc.kernels.native_quantizers import NativeQuantizers

    try:
        native = Native()
        return native, NativeCodec(), NativeQuantizers(), NativeLowRank(native)
    except KernelsMissing as error:
        raise KernelsUnavailable(str(error)) from error


def _triton(device: str) -> Tier:
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise KernelsUnavailable("the triton kernels run on a GPU (on a CPU only with TRITON_INTERPRET=1)")
    try:
        from dgc.kernels.triton import Triton
        from dgc.kernels.triton_quantizers import TritonQuantizers
    except ImportError as error:
        raise KernelsUnavailable(f"triton cannot be imported ({error}); install it: pip install triton") from error
    from dgc.kernels.bits import TorchCodec
    from dgc.kernels.lowrank import TorchLowRank

    triton = Triton()
    return triton, TorchCodec(), TritonQuantizers(), TorchLowRank(triton)
