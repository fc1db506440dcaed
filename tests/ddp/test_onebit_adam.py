"""1-bit Adam, and DGC for Adam, as a communication hook: the same as in DistributedOptimizer, on one rank."""

import copy
from typing import Any

import pytest
import torch
from optim.nets import alone, loss_of, net, values
from torch.nn.parallel import DistributedDataParallel

from dgc.compression import DGCAdamCompressor, OneBitAdamCompressor
from dgc.ddp import compress
from dgc.optim import DGCAdam, DistributedOptimizer, OneBitAdam

METHODS: dict[str, tuple[Any, Any]] = {
    "OneBitAdam": (OneBitAdam, OneBitAdamCompressor),
    "DGCAdam": (DGCAdam, lambda: DGCAdamCompressor(0.2)),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore:.*has NaN or inf")
def test_the_hook_exchanges_momentum(name: str) -> None:
    make, compression = METHODS[name]

    def adam(model: Any) -> Any:
        return make(model.parameters(), lr=0.01, freeze_step=3)

    model = net()
    other = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model)
    inner = adam(model)
    exchange = compress(wrapped, compression(), inner, transport=alone())
    optimizer = DistributedOptimizer(adam(other), other.named_parameters(), compression(), transport=alone())
    for step in range(8):
        factor = float("nan") if step in (1, 5) else 1.0
        for m, o in ((wrapped, inner), (other, optimizer)):
            o.zero_grad()
            (loss_of(m, step) * factor).backward()
            o.step()
        assert exchange.dropped_steps == optimizer.dropped_steps
        theirs = values(other)
        assert all(torch.equal(value, theirs[name]) for name, value in values(model).items()), step
    assert inner.exchanges_momentum and inner.param_groups[0]["steps"] == 6
    assert exchange.error_norm() == optimizer.error_norm() > 0


def test_without_the_optimizer() -> None:
    with pytest.raises(ValueError, match=r"and has none: .*pass it to dgc.ddp.compress"):
        compress(DistributedDataParallel(net()), OneBitAdamCompressor(), transport=alone())
    with pytest.raises(ValueError, match="AdamW does not share its own"):
        model = DistributedDataParallel(net())
        optimizer = torch.optim.AdamW(model.parameters())
        compress(model, OneBitAdamCompressor(), optimizer, transport=alone())
