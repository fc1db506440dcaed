"""What exchanges know of optimizers: their parameters, their steps, and the epochs of these."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from dgc.engine.state import EpochCount
from dgc.engine.steps import ParametersOf, _Observers


@pytest.fixture
def asked() -> list[int]:
    """The numbers of parameters that were looked up."""
    return []


@pytest.fixture
def count(asked: list[int]) -> Any:
    def find(parameters: list[torch.Tensor]) -> int:
        asked.append(len(parameters))
        return len(parameters)

    return ParametersOf(find)


def parameters(n: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(n)]


def test_parameters_are_looked_up_once(count: Any, asked: list[int]) -> None:
    one, other = (torch.optim.SGD(parameters(n), lr=1.0) for n in (3, 5))
    assert [count(one), count(other), count(one), count(other)] == [3, 5, 3, 5]
    assert asked == [3, 5]


def test_an_added_parameter_is_looked_up(count: Any, asked: list[int]) -> None:
    optimizer = torch.optim.SGD(parameters(3), lr=1.0)
    count(optimizer)
    optimizer.add_param_group({"params": parameters(1)})
    assert count(optimizer) == 4 and asked == [3, 4]


def test_a_replaced_parameter_is_looked_up(count: Any, asked: list[int]) -> None:
    """Also one that has the values of the one before."""
    optimizer = torch.optim.SGD(parameters(3), lr=1.0)
    count(optimizer)
    optimizer.param_groups[0]["params"][1] = parameters(1)[0]
    assert count(optimizer) == 3 and asked == [3, 3]


def test_what_is_known_keeps_no_parameter_alive(count: Any) -> None:
    optimizer = torch.optim.SGD(parameters(3), lr=1.0)
    count(optimizer)
    last = ref(optimizer.param_groups[0]["params"][2])
    optimizer.param_groups[0]["params"].pop()
    gc.collect()
    assert last() is None


class Observer:
    def observe(self, optimizer: Any) -> None:
        """It is called at each step."""


def test_an_observer_that_is_gone_is_forgotten() -> None:
    observers = _Observers(lambda hook: hook, has_parts=True)
    observers.add(Observer().observe)
    gc.collect()
    assert not observers._methods


def test_an_epoch_begins_with_its_first_step_alone() -> None:
    begun: list[float] = []
    count = EpochCount(3, begun.append)
    for _ in range(7):
        count.begin_step()
    assert begun == [0, 1, 2]
