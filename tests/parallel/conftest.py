"""The groups of ranks that the tests of this folder share."""

import pytest
from parallel.ranks import Group, end_groups, running_group

HERE = __file__.rpartition("/")[0]


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Group:
    """The ranks of `over(launcher, number)`, the parameter of the test."""
    return running_group(*request.param)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the ranks after the last test of this folder."""
    if nextitem is None or not str(nextitem.path).startswith(HERE):
        end_groups()
