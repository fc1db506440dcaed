"""Parameters that no rank uses in a step, in one process: DDP leaves their gradient as it was."""

from typing import Any

import pytest
import torch
from optim.nets import alone
from parallel.ddp_trainer import OPTIONS, Branches, data_of, top_k
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dgc.compression import DenseCompressor, PowerSGDCompressor, TwoPhaseCompressor
from dgc.ddp import compress

MODES = ("unused", "static", "view and unused")
ALL_OPTIONS = {**OPTIONS, "view and unused": {**OPTIONS["view"], **OPTIONS["unused"]}}
METHODS: dict[str, Any] = {
    "plain DDP": None,
    "dense": DenseCompressor,
    "top-k": top_k,
    "powersgd": lambda: PowerSGDCompressor(2),
    "4 bits": lambda: TwoPhaseCompressor(4, 64),
}


def build(mode: str, method: str) -> Any:
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), **ALL_OPTIONS[mode])
    if METHODS[method] is not None:
        compress(model, METHODS[method](), transport=alone(), bucket_mb=0.001)
    return model


def backward(model: Any, step: int, used: set[int], factor: float = 1.0) -> None:
    x, y = data_of(0, step)
    model.module.used = used
    (factor * cross_entropy(model(x), y)).backward()


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified", "ignore:.*use TwoPhaseCompressor")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_a_parameter_that_no_rank_has_used_does_not_move_for_want_of_a_gradient(mode: str, method: str) -> None:
    model = build(mode, method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    weights = [p.clone() for p in model.module.branches[2].parameters()]
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step, {1})
        optimizer.step()
    branches = model.module.branches
    for of in ("weight", "bias"):
        assert [getattr(branch, of).grad is None for branch in branches] == [False, False, True]
    assert all(map(torch.equal, branches[2].parameters(), weights))


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_a_used_parameter_whose_gradient_is_zero_gets_zeros(mode: str, method: str) -> None:
    model = build(mode, method)
    for step in range(3):
        model.zero_grad()
        backward(model, step, {1}, factor=0.0)
        grads: list[Tensor] = [p.grad for p in model.module.branches[:2].parameters()]
        assert all(grad is not None and not grad.any() for grad in grads), step
