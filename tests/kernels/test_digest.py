"""The sums of a digest: the same whole numbers by every instruction set, at any place in memory."""

import numpy as np
import pytest
from kernels.backends import CHOICES, backend

from dgc.kernels.digest import RowSums
from dgc.kernels.digest.native import NativeRowSums

COLUMNS = RowSums.COLUMNS
WEIGHTS = np.random.default_rng(1).integers(-(2**63), 2**63, COLUMNS)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_native_sums_of_rows_are_those_of_plain_numpy(name: str, count: int, shift: int) -> None:
    data = np.random.default_rng(count).bytes(8 * COLUMNS * count + shift)
    rows = np.frombuffer(memoryview(data)[shift:], "<i8").reshape(-1, COLUMNS)
    with backend(name):
        found = NativeRowSums().of(rows, WEIGHTS)
    assert found.dtype == np.int64 and found.tolist() == RowSums().of(rows, WEIGHTS).tolist()


def test_sums_are_modulo_two_to_the_64() -> None:
    rows = np.full((1, COLUMNS), 2**63 - 1)
    expected = (COLUMNS * (2**63 - 1) * 3 + 2**63) % 2**64 - 2**63
    for kernels in (RowSums(), NativeRowSums()):
        assert kernels.of(rows, np.full(COLUMNS, 3)).tolist() == [expected]
