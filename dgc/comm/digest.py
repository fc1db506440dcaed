"""A digest of bytes that costs little beside sending them: of messages, and of models that must be equal.

Rows of 512 whole numbers of 64 bits are multiplied by fixed odd numbers, powers of one, and summed modulo
2**64. The digest is the crc32 of these sums and of the rest. It depends on no version of NumPy, because
machines compare it. A change of one number changes the sum of its row. It does not protect against someone who
wants to change a message.
"""

from typing import Any
from zlib import crc32

import numpy as np

import dgc.kernels as kernels

COLUMNS = kernels.RowSums.COLUMNS
_POWERS = [pow(0x9E3779B97F4A7C15, i, 2**64) for i in range(1, COLUMNS + 1)]
_ODD = np.array(_POWERS, np.uint64).view(np.int64)
ROW_BYTES = 8 * COLUMNS


def digest_of(data: Any, start: int = 0) -> int:
    """A number of 32 bits that depends on contiguous bytes, and on `start`, the digest of what is before them."""
    view = memoryview(data).cast("B")
    whole = len(view) - len(view) % ROW_BYTES
    if whole:
        rows = np.frombuffer(view[:whole], "<i8").reshape(-1, COLUMNS)
        start = crc32(kernels.on_host().sums.of(rows, _ODD).tobytes(), start)
    return crc32(view[whole:], start)
