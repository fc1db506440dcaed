"""Weighted sums of rows in C++: one pass at the speed of memory."""

from ctypes import c_int64, c_void_p

import numpy as np
from numpy.typing import NDArray

from dgc.kernels.digest import RowSums
from dgc.kernels.library import Native, Signatures

SIGNATURES: Signatures = {"dgc_row_sums": (None, (c_void_p, c_int64, c_void_p, c_void_p))}


class NativeRowSums(Native, RowSums):
    """The sums of NumPy, whatever the instructions of the CPU."""

    signatures = SIGNATURES

    def of(self, rows: NDArray[np.int64], weights: NDArray[np.int64]) -> NDArray[np.int64]:
        assert rows.shape[1:] == weights.shape == (self.COLUMNS,)
        assert rows.flags.c_contiguous and weights.flags.c_contiguous
        sums = np.empty(len(rows), np.int64)
        where = (array.__array_interface__["data"][0] for array in (rows, weights, sums))
        given, factors, made = where
        self._library.dgc_row_sums(given, len(rows), factors, made)
        return sums
