"""Groups of ranks: a function that fails or hangs ends them with the reason, and the next one gets others."""

import os
import time
from typing import Any

import pytest
from parallel.ranks import Group, alone, over

pytestmark = pytest.mark.parametrize("group", [over(alone, 1)], indirect=True)


def rank_and_process(transport: Any) -> tuple[int, int]:
    return transport.rank, os.getpid()


def fails(transport: Any) -> None:
    raise KeyError("of the function")


def hangs(transport: Any) -> None:
    time.sleep(10_000)


def test_functions_share_the_ranks_until_one_fails(group: Group) -> None:
    first = group.run(rank_and_process)
    assert first[0][0] == 0 and group.run(rank_and_process) == first
    told = "fails failed\\n--- rank 0: Traceback(.|\\n)*KeyError: 'of the function'"
    with pytest.raises(AssertionError, match=told):
        group.run(fails)
    assert group.run(rank_and_process) != first


def test_a_time_out_shows_where_the_ranks_are(group: Group) -> None:
    with pytest.raises(AssertionError, match="rank 0: no answer in time(.|\\n)*test_groups.py.* in hangs"):
        group.run(hangs, within=1)
