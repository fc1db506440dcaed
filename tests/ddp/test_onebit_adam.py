"""1-bit Adam, and DGC for Adam, as a communication hook: the same as in DistributedOptimizer, on one rank."""

from functools import partial
from typing import Any

import pytest
import torch
from optim.nets import alone, loss_of, net, values
from torch.nn.parallel import DistributedDataParallel

from dgc.compression import DGCAdamCompressor, OneBitAdamCompressor
from dgc.ddp import compress
from dgc.optim import DGCAdam, DistributedOptimizer, OneBitAdam

METHODS: list[tuple[Any, Any]] = [(OneBitAdam, OneBitAdamCompressor), (DGCAdam, partial(DGCAdamCompressor, 0.2))]


@pytest.mark.parametrize(("make", "compression"), METHODS, ids=["OneBitAdam", "DGCAdam"])
@pytest.mark.filterwarnings("ignore:.*has NaN or inf")
def test_the_hook_exchanges_momentum(make: Any, compression: Any) -> None:
    model, other = net(), net()
    wrapped = DistributedDataParallel(model)
    inner, adam = (make(m.parameters(), lr=0.01, freeze_step=3) for m in (model, other))
    exchange = compress(wrapped, compression(), inner, transport=alone())
    optimizer = DistributedOptimizer(adam, other.named_parameters(), compression(), transport=alone())
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
