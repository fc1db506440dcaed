"""The digest of messages and models: every change is found, wherever it is."""

import numpy as np
import pytest

import dgc.kernels as kernels
from dgc.comm.digest import ROW_BYTES, digest_of

LENGTHS = [0, 1, ROW_BYTES - 1, ROW_BYTES, 3 * ROW_BYTES + 17]


def drawn(length: int) -> bytearray:
    return bytearray(np.random.default_rng(length).bytes(length))


@pytest.mark.parametrize("length", LENGTHS[1:])
def test_a_changed_byte_changes_it(length: int) -> None:
    data = drawn(length)
    before = digest_of(data)
    for place in {0, length // 2, length - 1}:
        data[place] ^= 0x80
        assert digest_of(data) != before
        data[place] ^= 0x80
    assert digest_of(data) == before


@pytest.mark.parametrize("backend", ["auto", "reference", "triton"])
def test_it_is_the_same_on_all_machines(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their versions and kernels: groups on several machines compare it."""
    monkeypatch.setattr(kernels, "_asked", backend)
    data = bytes(i * i % 251 for i in range(3 * ROW_BYTES + 7))
    assert [digest_of(data[:5]), digest_of(data)] == [3051525001, 1406231184]


def test_numbers_in_another_order_change_it() -> None:
    data = np.arange(4 * ROW_BYTES // 8)
    before = digest_of(data)
    for one, other in ((0, 1), (0, 512), (5, 1500)):  # of a row, of a column, of neither
        swapped = data.copy()
        swapped[[one, other]] = swapped[[other, one]]
        assert digest_of(swapped) != before


def test_changes_that_cancel_in_a_sum_change_it() -> None:
    """As in two floats, one of which is a bit larger and one a bit smaller."""
    data = np.arange(2 * ROW_BYTES // 4, dtype=np.int32)
    before = digest_of(data)
    data[[2, 8]] += [1, -1]
    assert digest_of(data) != before


def test_it_depends_on_what_is_before() -> None:
    data = drawn(2 * ROW_BYTES)
    assert digest_of(data, 1) != digest_of(data) != digest_of(data, 2)


def test_it_does_not_depend_on_the_place_in_memory() -> None:
    data = drawn(2 * ROW_BYTES)
    assert digest_of(memoryview(b"x" + data)[1:]) == digest_of(data)
