"""Groups of ranks: a function that fails or hangs ends them with the reason, and the next one gets others."""

import pytest
from parallel import failing_functions as functions
from parallel.ranks import Group, alone, over

pytestmark = pytest.mark.parametrize("group", [over(alone, 1)], indirect=True)


def test_functions_share_the_ranks_until_one_fails(group: Group) -> None:
    first = group.run(functions.rank_and_process)
    assert first[0][0] == 0 and group.run(functions.rank_and_process) == first
    with pytest.raises(
        AssertionError, match="fails failed\\n--- rank 0: Traceback(.|\\n)*KeyError: 'of the function'"
    ):
        group.run(functions.fails)
    assert group.run(functions.rank_and_process) != first


def test_a_time_out_shows_where_the_ranks_are(group: Group) -> None:
    with pytest.raises(AssertionError, match="rank 0: no answer in time(.|\\n)*failing_functions.py.* in hangs"):
        group.run(functions.hangs, within=1)
