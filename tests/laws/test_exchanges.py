"""The laws at further numbers of ranks, for the exchanges whose way depends on it. The table has 1, 2, 3 and 5."""

import pytest
from laws.exchanges import EXCHANGES
from laws.table import Row

from dgc.testing import (
    ROUNDING,
    Fleet,
    check_dropped_step,
    check_nothing_lost,
    check_replicas,
    check_state,
    gradients,
)

pytestmark = pytest.mark.usefixtures("no_type_checks")
every_row = pytest.mark.parametrize("row", EXCHANGES, ids=lambda row: row.name)
further = pytest.mark.parametrize("size", [4, 8, pytest.param(16, marks=pytest.mark.proof)])


@every_row
@further
def test_further_numbers_of_ranks_keep_the_laws(row: Row, size: int) -> None:
    check_replicas(row.make, size)
    check_state(row.make, size)
    check_dropped_step(row.make, size, row.conserves)
    if row.conserves:
        # a sum of more ranks is rounded more often
        check_nothing_lost(row.make, size, ROUNDING * size / 4)


@every_row
@further
def test_further_numbers_of_ranks_agree_on_nan(row: Row, size: int) -> None:
    """Whichever rank has it, in whichever tensor: also in one of a single element, of which most have no part."""
    fleet = Fleet(row.make, size)
    for tensor, culprit in ((3, 0), (1, size - 1), (4, size // 2)):
        own = [gradients(rank, tensor) for rank in range(size)]
        own[culprit][tensor].view(-1)[-1] = float("nan")
        fleet.step(own)
        assert (
            fleet.nonfinite
            == [f"the gradient of p{tensor} on rank {culprit} has NaN or inf, or is 2**64 or more"] * size
        )
