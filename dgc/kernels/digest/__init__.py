"""Weighted sums of rows of whole numbers, with which `dgc.comm.digest` reads all bytes of a message or a model.

They are of bytes in the host's memory, and NumPy defines them: a message may be in memory that only reads.
"""

from typing import Any, TypeAlias

Numbers: TypeAlias = Any  # a NumPy array of int64. Training does without NumPy, and does not import it


class RowSums:
    """Sums rows of COLUMNS numbers."""

    COLUMNS = 512

    def of(self, rows: Numbers, weights: Numbers) -> Numbers:
        """The sum of each row's numbers times `weights`, modulo 2**64. Both are contiguous."""
        return rows @ weights
