"""Weighted sums of rows of whole numbers, with which `dgc.comm.digest` reads all bytes of a message or a model.

They are of bytes in the host's memory, and NumPy defines them: a message may be in memory that only reads.
"""

import numpy as np
from numpy.typing import NDArray


class RowSums:
    """Sums rows of COLUMNS numbers."""

    COLUMNS = 512

    def of(self, rows: NDArray[np.int64], weights: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sum of each row's numbers times `weights`, modulo 2**64. Both are contiguous."""
        found: NDArray[np.int64] = rows @ weights
        return found
