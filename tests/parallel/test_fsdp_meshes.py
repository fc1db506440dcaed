"""dgc.fsdp on the meshes of the user: replicas of HSDP and of `replicate`, and groups on several meshes."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import case
from parallel import sharded
from parallel.found import refused
from parallel.mixture import mixture
from parallel.ranks import each_rank_of, over, torchrun
from parallel.sharded import accumulate, batches, build, kept, loss_of, network, shard, train, whole
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh

from dgc import compression as methods
from dgc.core.bucket import local_part
from dgc.fsdp import compress, quantize
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


def parts(model: nn.Module) -> list[Tensor]:
    """This rank's part of each parameter."""
    return [local_part(p).detach().clone() for p in model.parameters()]


KINDS: list[tuple[str, Any]] = [
    *((kind, quantize) for kind in ("sharded", "replicas", "mixed")),
    *((kind, compress) for kind in ("replicas", "mixed")),
]


@on_ranks
def test_experts_on_a_mesh_of_their_own_are_trained_as_without_us(transport: Any) -> None:
    """Bit for bit, with None and with the dense compressor."""
    inputs = batches(20, transport.rank)
    native = {kind: mixture(kind) for kind in ("sharded", "replicas", "mixed")}
    for model in native.values():
        train(model, sgd(model), inputs)
    for kind, start in KINDS:
        model = mixture(kind)
        exchange = start(model, None)
        train(model, sgd(model), inputs)
        exchange.close()
        with case(kind, start):
            assert all(map(torch.equal, parts(model), parts(native[kind])))


@on_ranks
def test_groups_have_different_numbers_of_replicas(transport: Any) -> None:
    """Gloo adds four numbers in an order that depends on the number of elements."""
    models = [mixture("whole"), mixture("whole")]
    exchange = compress(models[0], methods.DenseCompressor())
    for model in models:
        train(model, sgd(model), batches(5, transport.rank))
    for own, native in zip(*map(parts, models), strict=True):
        torch.testing.assert_close(own, native, rtol=1e-5, atol=1e-7)
    state = exchange.compression_state_dict()
    assert "[[0, 1, 2, 3]]" in str(state["identity"]) and "[[0, 2], [1, 3]]" in str(state["identity"])
    exchange.close()


@on_ranks
def test_what_experts_send_plus_the_error_is_the_gradient(transport: Any) -> None:
    (batch,) = batches(1, transport.rank)
    for kind in ("sharded", "replicas", "mixed"):
        native, model = mixture(kind), mixture(kind)
        quantizer = quantize(model, 4, error="float32")
        for own in (native, model):
            loss_of(own, batch).backward()
        errors = quantizer.state_dict()["errors"]
        for (name, p), q in zip(model.named_parameters(), native.parameters(), strict=True):
            sent, error, expected = (local_part(t) for t in (p.grad, errors[name], q.grad))
            with case(kind, name):
                torch.testing.assert_close(sent + error, expected, rtol=1e-5, atol=1e-7)
                has_one_shard = (kind, name) == ("replicas", "block.experts.weight")
                assert not error.numel() or error.any() == (not has_one_shard)
        quantizer.close()


@on_ranks
def test_nan_in_the_gradient_of_one_expert_drops_the_step_everywhere(transport: Any) -> None:
    """Two ranks have the other experts."""
    for kind, start in KINDS:
        model = mixture(kind)
        exchange = start(model, methods.TwoPhaseCompressor() if start is compress else 8)
        optimizer, inputs = sgd(model), batches(3, transport.rank)
        train(model, optimizer, inputs[:1])
        before, expert = parts(model), model.block.experts
        expert.factor = float("nan") if transport.rank == 3 else 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the dropped step
            train(model, optimizer, inputs[1:2])
        with case(kind, start):
            assert exchange.dropped_steps == 1 and all(p.grad is None for p in model.parameters())
            assert all(map(torch.equal, parts(model), before))
        expert.factor = 1.0
        train(model, optimizer, inputs[2:])
        with case(kind, start, "later"):
            assert exchange.dropped_steps == 1
            assert all(p.isfinite().all() for p in parts(model))
            assert not all(map(torch.equal, parts(model), before))
        exchange.close()
