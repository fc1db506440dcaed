"""dgc.fsdp on the meshes of the user: replicas of HSDP and of `replicate`, and groups on several meshes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import case
from parallel import sharded
from parallel.found import refused
from parallel.ranks import each_rank_of, over, torchrun
from parallel.sharded import accumulate, batches, build, kept, loss_of, network, shard, train, whole
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh

from dgc import compression as methods
from dgc.fsdp import compress
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD

on_ranks = each_rank_of(over(torchrun, 4))
on_two_ranks = each_rank_of(over(torchrun, 2))
Loop = Callable[..., None]


def sgd(model: Any, lr: float = 0.02) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def replicated(name: str = "plain") -> Any:
    """The groups of `sharded.shard`, without shards."""
    mesh, model = kept("replicas", lambda: init_device_mesh("cpu", (dist.get_world_size(),))), network()
    for module in (model[0], model[2], model[3], model):
        replicate(module, mesh=mesh)
    if name == "sums":
        sharded.divide(model, 1.0)
    return model


def of_hsdp(name: str) -> Any:
    model = build(sharded.of_hsdp(), "plain" if name == "sums" else name)
    if name == "sums":  # as torchtitan has them
        sharded.divide(model, 1.0)
    return model


NO_ALL_REDUCE = partial(accumulate, switch="set_requires_all_reduce")
NO_SYNC = partial(accumulate, switch="set_requires_gradient_sync")
HSDP: list[tuple[str, Loop, int]] = [
    ("plain", train, 20),
    *((name, train, 4) for name in "repeated,tied,columns,frozen,bf16,checkpointed,resharded,sums".split(",")),
    *(("plain", loop, 8) for loop in (accumulate, NO_SYNC, NO_ALL_REDUCE)),
    ("sums", NO_ALL_REDUCE, 8),
]


def check_equal(transport: Any, make: Callable[[str], Any], name: str, loop: Loop, steps: int) -> None:
    """With the dense compressor, and after it has been closed."""
    native, model = make(name), make(name)
    exchange = compress(model, methods.DenseCompressor())
    inputs, optimizers = batches(steps + 4, transport.rank), [sgd(native), sgd(model)]
    for part in (inputs[:steps], inputs[steps:]):
        for own, optimizer in zip((native, model), optimizers, strict=True):
            loop(own, optimizer, part)
        assert torch.equal(whole(model), whole(native))
        exchange.close()


@on_ranks
def test_a_dense_exchange_between_replicas_equals_hsdp_bit_for_bit(transport: Any) -> None:
    for name, loop, steps in HSDP:
        with case(name, loop):
            check_equal(transport, of_hsdp, name, loop, steps)


@on_two_ranks
def test_a_dense_exchange_equals_replicate_bit_for_bit(transport: Any) -> None:
    for name, loop, steps in (("plain", train, 20), ("sums", train, 4), ("plain", NO_ALL_REDUCE, 8)):
        with case(name, loop):
            check_equal(transport, replicated, name, loop, steps)


METHODS: dict[str, Callable[[], Any]] = {
    "dgc": lambda: methods.DGCCompressor(0.2, DGCSGDMemory(momentum=0.9), vectors="sparse"),
    "powersgd": lambda: methods.PowerSGDCompressor(2, min_compression_rate=0),
    "8 bits": methods.TwoPhaseCompressor,
    "4 bits": lambda: methods.TwoPhaseCompressor(4),
}


def dgc_sgd(model: Any) -> DGCSGD:
    return DGCSGD(model.parameters(), lr=0.02, momentum=0.9)


@sharded.on_machines
def test_replicas_are_exchanged_as_machines_are(transport: Any) -> None:
    """The same bits: a machine is a replica here."""
    for name, make in METHODS.items():
        models = [shard(network(), mesh) for mesh in (sharded.machine(transport), sharded.of_hsdp())]
        exchanges = [compress(models[0], make(), transport=transport), compress(models[1], make())]
        for model in models:
            train(model, dgc_sgd(model), batches(6, transport.rank))
        with case(name):
            assert torch.equal(whole(models[0]), whole(models[1]))
            assert exchanges[0].error_norm() == exchanges[1].error_norm() > 0
            wires = {(exchange.meter.wire_bytes, exchange.meter.dense_wire_bytes) for exchange in exchanges}
            assert len(wires) == 1
        for exchange in exchanges:
            exchange.close()


@pytest.mark.parametrize("make", [partial(of_hsdp, "plain"), replicated])
@on_ranks
def test_a_nonfinite_gradient_drops_the_step_everywhere(transport: Any, make: Any) -> str:
    def start(**options: Any) -> tuple[Any, Any, Any]:
        model = make()
        return model, compress(model, METHODS["dgc"](), **options), dgc_sgd(model)

    rank = 3 if make is replicated else 1
    reason = f"0.weight on rank {rank} has NaN or inf, or is 2**64 or more (the rank is the number of a replica)"
    (model,) = set(sharded.check_a_dropped_step(transport, start, reason, lambda _: None, unscales=True).values())
    return model


@on_ranks
def test_a_model_that_cannot_work_is_refused(transport: Any) -> None:
    def check(message: str, model: Any) -> None:
        refused(message, lambda: compress(model, methods.DenseCompressor()))

    check("the mesh of module 2 has no replicas, between which", shard(network(), sharded.of_all()))
    check("9 trainable parameters are not sharded, such as 0.weight", network())
    partial_sums = of_hsdp("plain")
    partial_sums.set_requires_all_reduce(False)
    loss_of(partial_sums, batches(1, transport.rank)[0]).backward()
    check("module 2 has gradients of a backward pass with set_requires_all_reduce(False)", partial_sums)
    compressed = of_hsdp("plain")
    exchange = compress(compressed, methods.DenseCompressor())
    check("has a FSDPExchange already", compressed)
    exchange.close()
    other = network()
    with torch.no_grad():
        other[4].bias += transport.rank // 2
    different = shard(other, sharded.of_hsdp())
    exchange = compress(different, methods.DenseCompressor())
    words = "4.bias differs between replicas 0 and 1 before the first step"
    refused(words, loss_of(different, batches(1, 0)[0]).backward)
    exchange.close()
