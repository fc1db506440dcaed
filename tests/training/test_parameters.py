"""The parameter group of batch norm."""

from typing import Any

import pytest
import torch
from torch import nn

from dgc_training.startup.build import parameter_groups


def test_one_group_by_default() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert [len(group["params"]) for group in parameter_groups(model, False)] == [4]


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_all_kinds_of_batch_norm(norm: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), norm(2), nn.Linear(2, 2))
    others, normalization = parameter_groups(model, True)
    assert normalization["weight_decay"] == 0.0
    assert [id(p) for p in normalization["params"]] == [id(model[1].weight), id(model[1].bias)]
    assert len(others["params"]) == 4 and "weight_decay" not in others


def test_shared_parameters_appear_once() -> None:
    norm, linear = nn.BatchNorm1d(2), nn.Linear(2, 2)
    model = nn.Sequential(linear, norm, linear, norm)
    groups = parameter_groups(model, True)
    assert [len(group["params"]) for group in groups] == [2, 2]
    torch.optim.SGD(groups, lr=0.1)


def test_no_empty_group() -> None:
    assert len(parameter_groups(nn.Linear(2, 2), True)) == 1
    assert len(parameter_groups(nn.BatchNorm1d(2), True)) == 1
    assert len(parameter_groups(nn.BatchNorm1d(2, affine=False), True)) == 0
