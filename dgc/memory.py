"""The memories of sparse compressors, and the limits on gradients."""

from dgc.core.clipping import ClipByGlobalNorm, ClipByNorm, ClipByValue, Clipping, ClipValueByGlobalNorm
from dgc.sparse.memories import DGCSGDMemory, Memory, NoMemory, ResidualMemory

__all__ = [
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "ClipValueByGlobalNorm",
    "Clipping",
    "DGCSGDMemory",
    "Memory",
    "NoMemory",
    "ResidualMemory",
]
