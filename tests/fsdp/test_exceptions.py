"""Exceptions in the backward pass of a model that FSDP2 shards, on one machine of one rank, in this process."""

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from ddp.failing_net import Net
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from dgc.comm.transport import Transport
from dgc.compression import DGCCompressor, SparseCompressor
from dgc.fsdp import ShardedLocalOptimizer, compress, local_mesh
from dgc.local import OuterSteps
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DGCSGD

LAYERS, SIZE = 4, 8
RESET = r"an exception has ended a backward pass, and FSDP2 has not been reset: call reset_iter_state\(\)"
BROKEN = "an earlier step ended with an exception, in backward"


def shard(transport: Transport) -> Any:
    model, mesh = Net(LAYERS, SIZE), local_mesh(transport)
    for layer in model.layers[1:]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Trainer:
    def __init__(self, transport: Transport):
        self.model = shard(transport)
        self.optimizer = DGCSGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.exchange = compress(self.model, DGCCompressor(0.2, DGCSGDMemory(momentum=0.9)), transport=transport)

    def backward(self, scale: float = 1.0) -> None:
        self.model(torch.full((2, SIZE), scale)).backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def fail(self, at: int) -> None:
        self.optimizer.zero_grad()
        self.model.fail(at, lambda: self.backward(3.0))

    @property
    def weights(self) -> list[Tensor]:
        return [p.full_tensor().clone() for p in self.model.parameters()]


@pytest.mark.parametrize("at", [LAYERS, LAYERS - 1, 1])
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("steps", [0, 3])
def test_after_an_exception_the_exchange_is_clean_or_refuses(
    transport: Transport, at: int, reset: bool, steps: int
) -> None:
    """Before any group, after one, and after all but the outermost. The first pass starts none until its end."""
    one, other = both = Trainer(transport), Trainer(transport)
    for trainer in steps * both:
        trainer.step()
    one.fail(at)
    if reset:
        one.model.reset_iter_state()
    if has_started := steps > 0 and at < LAYERS:
        with pytest.raises(RuntimeError, match=BROKEN):
            one.exchange.compression_state_dict()
    if reset and not has_started:
        for trainer in 3 * both:
            trainer.step()
    else:
        for act in 2 * (one.step, one.optimizer.step):
            with pytest.raises(RuntimeError, match=BROKEN if has_started else RESET):
                act()
        one.model.reset_iter_state()
    assert all(map(torch.equal, one.weights, other.weights))
    assert not reset or has_started or one.exchange.error_norm() == other.exchange.error_norm() > 0


def test_a_call_that_is_refused_while_gradients_are_exchanged_changes_nothing(transport: Transport) -> None:
    one, other = both = Trainer(transport), Trainer(transport)
    for trainer in 2 * both:
        trainer.step()
    state, told = one.exchange.compression_state_dict(), []

    def call(gradient: Tensor) -> None:
        for act in (
            one.exchange.compression_state_dict,
            lambda: one.exchange.load_compression_state_dict(state),
            one.optimizer.step,
        ):
            with pytest.raises(RuntimeError, match="while gradients are exchanged: some buckets") as raised:
                act()
            told.append(str(raised.value))

    def hook(module: Any, inputs: Any, output: Tensor) -> None:
        output.register_hook(call)

    handle = one.model.layers[0].register_forward_hook(hook)
    for trainer in both:
        trainer.step()
    handle.remove()
    assert len(told) == 3
    for trainer in both:
        trainer.step()
    assert all(map(torch.equal, one.weights, other.weights))


def test_an_exception_in_forward_changes_nothing(transport: Transport) -> None:
    one, other = Trainer(transport), Trainer(transport)
    for layer in (0, LAYERS - 1, 0):
        handle = one.model.layers[layer].register_forward_hook(Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            one.step()
        handle.remove()
        for trainer in (one, other):
            trainer.step()
    assert all(map(torch.equal, one.weights, other.weights))
    with pytest.raises(TypeError, match="a FSDPExchange cannot be copied or pickled"):
        copy.deepcopy(one.exchange)
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(one.model)


def test_gradients_that_were_accumulated_before_an_exception_are_dropped(transport: Transport) -> None:
    """As reset_iter_state() does with the sums of HSDP: the sequence of passes begins again."""
    one, other = Trainer(transport), Trainer(transport)
    for trainer in (one, other):
        for step in range(3):
            trainer.model.set_requires_all_reduce(False)
            trainer.optimizer.zero_grad()
            if trainer is one and step == 1:
                trainer.backward(2.0)
                trainer.fail(1)
                trainer.model.reset_iter_state()
            trainer.backward()
            trainer.model.set_requires_all_reduce(True)
            trainer.backward()
            trainer.optimizer.step()
    assert all(map(torch.equal, one.weights, other.weights))


def test_outer_steps_need_a_reset_too(transport: Transport) -> None:
    model = shard(transport)
    steps = OuterSteps(2, compression=SparseCompressor(0.2, ResidualMemory()))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ShardedLocalOptimizer(sgd, model, steps, transport=transport)
    model.fail(1, lambda: model(torch.ones(2, SIZE)).backward())
    model(torch.ones(2, SIZE)).backward()
    with pytest.raises(RuntimeError, match=RESET):
        optimizer.step()
    model.reset_iter_state()
    optimizer.zero_grad()
    model(torch.ones(2, SIZE)).backward()
    optimizer.step()
