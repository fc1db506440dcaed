"""gather_state and load_gathered: one object on rank 0 has the states of all ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import case
from on_ranks import on_ranks
from optim.nets import train
from states import assert_equal
from torch import nn

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor, PowerSGDCompressor
from dgc.engine.gathered import on_cpu
from dgc.optim import DGCSGD, DistributedOptimizer

METHODS = (lambda: DGCCompressor(0.01), lambda: PowerSGDCompressor(rank=2))


def wrapped(transport: Any, compression: Any, hierarchical: str = "off") -> Any:
    model = nn.Linear(40, 40)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    kind = DGCSGD if isinstance(compression, DGCCompressor) else torch.optim.SGD
    inner, named = kind(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    return model, DistributedOptimizer(inner, named, compression, transport=transport, hierarchical=hierarchical)


def gathered(world: LockstepWorld, make: Any, hierarchical: str = "off") -> tuple[Any, list[Any]]:
    """What rank 0 gathers after two steps, and the state of every rank."""

    def body(transport: Any) -> Any:
        model, optimizer = wrapped(transport, make(), hierarchical)
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(transport.rank))
        train(model, optimizer, range(2), loss=lambda model, *_: model(x).square().mean())
        return optimizer.gather_state(), optimizer.compression_state_dict()

    found = world.run(body)
    assert [one is None for one, _ in found] == [False] + [True] * (len(found) - 1)
    return found[0][0], [own for _, own in found]


def test_every_rank_gets_its_own_state_back(tmp_path: Path) -> None:
    for make in METHODS:
        for size, local, hierarchical in ((3, 1, "off"), (4, 2, "on")):
            with case((size, hierarchical)):
                whole, states = gathered(LockstepWorld(size, local), make, hierarchical)
                torch.save(whole, tmp_path / "one.pt")
                read = torch.load(tmp_path / "one.pt", weights_only=True)

                def body(transport: Any, make: Any = make, read: Any = read, how: str = hierarchical) -> Any:
                    _, optimizer = wrapped(transport, make(), how)
                    optimizer.load_gathered(read if transport.rank == 0 else None)
                    return optimizer.compression_state_dict()

                assert_equal(LockstepWorld(size, local).run(body), states)


def test_another_number_of_ranks_has_the_same_mean() -> None:
    whole, states = gathered(LockstepWorld(4), METHODS[0])

    def error(transport: Any, load: Any) -> Any:
        _, optimizer = wrapped(transport, METHODS[0]())
        load(optimizer)
        return torch.cat(list(optimizer.errors())).double()

    def of_one(state: Any) -> Any:
        load = partial(DistributedOptimizer.load_compression_state_dict, state=state, allow_other_rank=True)
        return error(LockstepWorld(1).transports[0], load)

    mean = torch.stack([of_one(state) for state in states]).mean(0)
    after = LockstepWorld(2).run(partial(error, load=lambda optimizer: optimizer.load_gathered(whole)))
    assert mean.abs().max() > 0 and torch.allclose(torch.stack(after).mean(0), mean, atol=1e-7)


@on_ranks(2)
def test_a_wrong_state_is_one_error_on_every_rank(transport: Any) -> None:
    for wrong in (None, {}, {"ranks": "all"}, {"ranks": [1]}):
        _, optimizer = wrapped(transport, METHODS[0]())
        with pytest.raises(ValueError, match="load_gathered needs on rank 0 what gather_state"):
            optimizer.load_gathered(wrong)
    value = {"a": torch.ones(1), "b": [(torch.zeros(2), 3)], "c": None}  # tensors anywhere in a state are moved
    assert_equal(on_cpu(value), value)
