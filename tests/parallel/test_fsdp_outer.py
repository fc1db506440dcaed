"""Outer steps of two machines of two ranks each, which shard a model: the machines are workers of DiLoCo."""

import warnings
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from parallel.found import digest, refused, told
from parallel.sharded import batches, flat, loss_of, machine, network, on_machines, shard, top_k, train, whole
from parallel.sharded import with_muon as muon
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dgc.comm.lockstep import LockstepWorld
from dgc.contrib import ZeroOneSteps
from dgc.fsdp import ShardedLocalOptimizer
from dgc.gossip import SGP, HierarchicalGossip
from dgc.local import Nesterov, OuterSteps
from dgc.optim import LocalOptimizer


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def standing(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def method(make: Any) -> OuterSteps:
    return OuterSteps(3, outer=Nesterov(), average_momentum=make is muon)


def train_on(own: Any, model: Any, inputs: Sequence[Tensor], bad: bool) -> None:
    """bad: A gradient of the fourth step, or this rank's part of it, is NaN."""
    for step, batch in enumerate(inputs):
        own.zero_grad()
        loss_of(model, batch).backward()
        if bad and step == 3:
            gradient = model[0].weight.grad
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).fill_(float("nan"))
        own.step()


def on_machine(worker: Any, make: Any, steps: int = 7) -> Tensor:
    """A plain model with the batches of both ranks."""
    model, ranks = network(), (2 * worker.rank, 2 * worker.rank + 1)
    own = LocalOptimizer(make(model), None, method(make), transport=worker)
    both = [torch.cat(rows) for rows in zip(*(batches(7, rank) for rank in ranks), strict=True)]
    train_on(own, model, both[:steps], worker.rank == 1)
    return flat(model)


def outer(transport: Any, make: Any, steps: Any, **options: Any) -> tuple[Any, Any]:
    model = shard(network(), machine(transport))
    return model, ShardedLocalOptimizer(make(model), model, steps, transport=transport, **options)


each_make = pytest.mark.parametrize("make", [adam, muon])


@each_make
@on_machines
def test_machines_are_workers_of_outer_steps(transport: Any, make: Any) -> str:
    """In the fourth of seven steps one shard of rank 3 has a gradient of NaN."""
    inputs, number = batches(7, transport.rank), transport.rank // 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, own = outer(transport, make, method(make))
        train_on(own, model, inputs, transport.rank == 3)
        expected = LockstepWorld(2).run(partial(on_machine, make=make))
    message = "0.weight on rank 3 has NaN or inf: this machine drops its step"
    warned = [str(w.message) for w in caught if "this machine drops" in str(w.message)]
    assert len(warned) == (transport.rank == 3) and all(message in text for text in warned), warned
    assert own.dropped_steps == number
    torch.testing.assert_close(whole(model), expected[number], rtol=0, atol=1e-6)
    with torch.no_grad():
        before = model(inputs[0])  # after which FSDP2 keeps the outermost module's parameters
        with own.consensus():
            mean, between = digest([whole(model)]), model(inputs[0])
        assert torch.equal(before, model(inputs[0])) and not torch.equal(before, between)
        common = network()
        torch.nn.utils.vector_to_parameters((expected[0] + expected[1]) / 2, common.parameters())
        torch.testing.assert_close(between, common(inputs[0]), rtol=0, atol=1e-6)
    own.close()
    return mean


@each_make
@on_machines
def test_replicas_of_ddp_on_a_machine_take_the_same_outer_steps(transport: Any, make: Any) -> None:
    replica = DistributedDataParallel(network(), process_group=machine(transport).get_group())
    replica_groups = HierarchicalGossip(method(make), averages_gradients=False)
    own = LocalOptimizer(make(replica.module), None, replica_groups, transport=transport)
    train(replica, own, batches(7, transport.rank)[:3])
    own.synchronize_messages()
    expected = LockstepWorld(2).run(partial(on_machine, make=make, steps=3))[transport.rank // 2]
    torch.testing.assert_close(flat(replica), expected, rtol=0, atol=1e-6)
    own.close()


@each_make
@on_machines
def test_a_loaded_run_of_compressed_outer_steps_continues_bit_for_bit(transport: Any, make: Any) -> str:
    inputs, ends = batches(6, transport.rank), []
    model, own = outer(transport, make, OuterSteps(2, compression=top_k(), average_momentum=make is muon))
    train(model, own, inputs[:3])
    state = deepcopy(own.compression_state_dict())
    for resumed in (False, True):
        if resumed:
            model, own = outer(transport, make, OuterSteps(2, compression=top_k(), average_momentum=make is muon))
            own.load_compression_state_dict(state)
        train(model, own, inputs[3:])
        assert own.error_norm() > 0
        ends.append(digest([whole(model)]))
        own.close()
    assert ends[0] == ends[1]
    return ends[0]


@on_machines
def test_weights_that_are_loaded_after_the_optimizer_was_built_are_the_start(transport: Any) -> str:
    model, own = outer(transport, standing, OuterSteps(2, outer=Nesterov()))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(3.0 * p)
    expected = whole(model)
    train(model, own, batches(4, transport.rank))
    assert torch.equal(whole(model), expected)
    own.close()
    model, own = outer(transport, standing, OuterSteps(2))
    with torch.no_grad():
        model[0].weight.to_local().add_(transport.rank // 2)
    refused("rank 2 has another model at the first step than rank 0: load", own.step)
    own.close()
    return digest([expected])


@on_machines
def test_what_cannot_work_is_refused(transport: Any) -> None:
    model, own = outer(transport, adam, OuterSteps(2, compression=top_k()), nonfinite="raise")
    loss_of(model, batches(1, transport.rank)[0]).backward()
    if transport.rank == 0:
        model[0].weight.grad.to_local().fill_(float("inf"))
    where = ("the gradient of 0.weight on rank 0 has", "a gradient on another rank of this machine has", "", "")
    raised = told(own.step, RuntimeError)
    assert where[transport.rank] in raised and bool(raised) == (transport.rank < 2), raised
    own.grad_scale = torch.ones(())
    refused("train in bf16, without a GradScaler", own.step)
    own.close()
    for steps, message in (
        (HierarchicalGossip(SGP()), "HierarchicalGossip cannot exchange shards"),
        (ZeroOneSteps(1), "ZeroOneSteps cannot exchange shards"),
        (OuterSteps(2 + (transport.rank == 3)), "average_every is 2 on rank 0 and 3 on rank 3"),
    ):
        refused(message, partial(ShardedLocalOptimizer, adam(model), model, steps, transport=transport))
