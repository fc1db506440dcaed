"""dgc.fsdp on the meshes of the user: replicas of HSDP and of `replicate`, and groups on several meshes."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from cases import case
from parallel import sharded
from parallel.found import refused
from parallel.mixture import mixture
from parallel.ranks import each_rank_of, over, running_group, torchrun
from parallel.sharded import (
    accumulate,
    batches,
    build,
    kept,
    loss_of,
    network,
    replicated,
    shard,
    train,
    whole,
)
from states import assert_equal
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dgc import compression as methods
from dgc.comm.collectives import all_gather_object
from dgc.core.bucket import local_part
from dgc.fsdp import compress, load_state, quantize, save_state
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD

on_ranks = each_rank_of(over(torchrun, 4))
on_two_ranks = each_rank_of(over(torchrun, 2))
Loop = Callable[..., None]


def sgd(model: Any, lr: float = 0.02) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


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


def check_equal(
    transport: Any, make: Callable[[str], Any], name: str, loop: Loop, steps: int, later: int = 0
) -> None:
    """With the dense compressor, and in later steps, after it has been closed."""
    native, model = make(name), make(name)
    exchange = compress(model, methods.DenseCompressor())
    inputs, optimizers = batches(steps + later, transport.rank), [sgd(native), sgd(model)]
    for part in (inputs[:steps], inputs[steps:]):
        for own, optimizer in zip((native, model), optimizers, strict=True):
            loop(own, optimizer, part)
        assert torch.equal(whole(model), whole(native))
        exchange.close()


@on_ranks
def test_a_dense_exchange_between_replicas_equals_hsdp_bit_for_bit(transport: Any) -> None:
    for name, loop, steps in HSDP:
        with case(name, loop):
            check_equal(transport, of_hsdp, name, loop, steps, later=4 if steps == 20 else 0)


@on_two_ranks
def test_a_dense_exchange_equals_replicate_bit_for_bit(transport: Any) -> None:
    for name, loop, steps in (("plain", train, 20), ("sums", train, 4), ("plain", NO_ALL_REDUCE, 8)):
        with case(name, loop):
            check_equal(transport, replicated, name, loop, steps, later=4)


def divided_by_tensor_parallelism(_: str) -> Any:
    def mesh() -> Any:
        return init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "shard", "tensor"))

    ranks = kept("tensor parallelism", mesh)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(sharded.FEATURES, 8), nn.Tanh(), nn.Linear(8, 1), nn.Tanh())
    parallelize_module(model, ranks["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=ranks["replica", "shard"])


@on_ranks
def test_a_dense_exchange_of_parts_of_matrices_equals_hsdp_bit_for_bit(transport: Any) -> None:
    check_equal(transport, divided_by_tensor_parallelism, "plain", train, 10, later=4)


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


@pytest.mark.parametrize("steps", [6, pytest.param(20, marks=pytest.mark.proof)])
@on_ranks
def test_experts_on_a_mesh_of_their_own_are_trained_as_without_us(transport: Any, steps: int) -> None:
    """Bit for bit, with None and with the dense compressor."""
    inputs = batches(steps, transport.rank)
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


def columns_and_rows(is_sharded: bool) -> Any:
    """Two layers under tensor parallelism, with two replicas, or with two shards."""
    mesh = kept("tensors", lambda: init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("machine", "one", "tensor")))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(sharded.FEATURES, 8), nn.Tanh(), nn.Linear(8, 1), nn.Tanh())
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["machine"] if is_sharded else mesh["machine", "one"])


@on_ranks
def test_tensor_parallelism_is_trained_as_without_us(transport: Any) -> None:
    inputs = batches(5, transport.rank // 2)  # the two ranks of a layer have the same data
    for is_sharded in (False, True):
        start: Any = quantize if is_sharded else compress
        native, model, rounded = (columns_and_rows(is_sharded) for _ in range(3))
        exchanges = [start(model, None), start(rounded, 8 if is_sharded else methods.TwoPhaseCompressor())]
        for own in (native, model, rounded):
            train(own, torch.optim.SGD(own.parameters(), lr=0.02, momentum=0.9, foreach=False), inputs)
        with case(is_sharded):
            assert all(map(torch.equal, parts(model), parts(native)))
            bias = all_gather_object(transport, parts(rounded)[-1])  # which both ranks of a layer have
            assert bias[0].equal(bias[1]) and bias[2].equal(bias[3])
            assert not all(map(torch.equal, parts(rounded), parts(native)))
        for exchange in exchanges:
            exchange.close()


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
    differences: Any = partial(quantize, weights=4)
    for kind, start in [*KINDS, ("alone", quantize), ("sharded", differences), ("replicas", differences)]:
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


def gathered(model: Any) -> list[Tensor]:
    """What the modules of HSDP, or of a mixture, compute with on this rank."""
    modules: tuple[Any, ...] = (
        (model[0], model[2], model) if isinstance(model, nn.Sequential) else (model.block, model)
    )
    for module in modules:
        module.unshard()
    found = [local_part(p).detach().clone() for p in model.parameters()]
    for module in modules:
        module.reshard()
    return found


DIFFERENCES: dict[str, Callable[[], Any]] = {
    "hsdp": partial(of_hsdp, "plain"),
    **{kind: partial(mixture, kind) for kind in ("sharded", "replicas", "mixed")},
}


@pytest.mark.parametrize("name", DIFFERENCES)
@on_ranks
def test_gathered_weights_follow_on_several_meshes(transport: Any, name: str) -> None:
    """Within half a level of the difference. Ranks that have the same part of the model gather the same bits."""
    model = DIFFERENCES[name]()
    quantizer, before = quantize(model, 8, 4), list[Tensor]()
    optimizer = sgd(model)
    for batch in batches(4, transport.rank):
        train(model, optimizer, [batch])
        before, now = gathered(model), before
        assert not now or not all(map(torch.equal, before, now))
    train(model, optimizer, batches(1, transport.rank + 4))
    found = gathered(model)
    quantizer.close()
    exact, are_exact = gathered(model), list[bool]()
    for last, own, right in zip(before, found, exact, strict=True):
        limit = float((right - last).abs().max()) * (1 + 2**-7) / 14 + 1e-7
        assert float((own - right).abs().max()) <= limit
        are_exact.append(own.equal(right))
    names = [name for name, _ in model.named_parameters()]
    whole_ones = {"block.experts.weight"} if name == "replicas" else set()
    assert {n for n, is_exact in zip(names, are_exact, strict=True) if is_exact} == whole_ones
    others = all_gather_object(transport, found)
    same = (0, 1, 2, 3) if name == "hsdp" else (transport.rank % 2, transport.rank % 2 + 2)
    assert all(all(map(torch.equal, found, others[rank])) for rank in same)


def of_shape(replicas: int) -> Any:
    """All ranks in as many replicas."""
    shape = replicas, dist.get_world_size() // replicas
    names = ("replica", "shard")
    return shard(network(), kept(f"shape {shape}", lambda: init_device_mesh("cpu", shape, mesh_dim_names=names)))


def content(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, whole, by table and parameter. Collective.

    The second phase of two has errors of its own, in place of which a rank may have errors of the first.
    """
    found = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {key: torch.zeros(entry.size) for key, entry in found.items() if hasattr(entry, "size")}
    checkpoint.load(tensors, checkpoint_id=folder)
    sums: dict[str, Tensor] = {}
    for key, rows in tensors.items():
        key = key.replace(".server_errors.", ".errors.")
        sums[key] = sums[key] + rows if key in sums else rows
    return sums


@pytest.mark.parametrize("name", ["dgc", "powersgd", "4 bits"])
@on_ranks
def test_the_mean_error_stays_on_other_shards_and_replicas(transport: Any, tmp_path: Path, name: str) -> None:
    inputs = batches(4, transport.rank)
    for i, replicas in enumerate((2, 4, 1, 2)):
        model = of_shape(replicas)
        exchange = compress(model, METHODS[name]())
        first, own = tmp_path / "first", tmp_path / f"{i}"
        if i == 0:
            train(model, dgc_sgd(model), inputs[:3])
            save_state(exchange, first)
        load_state(exchange, first)
        save_state(exchange, own)
        saved, again = content(first), content(own)
        assert again.keys() == saved.keys() and any(rows.any() for rows in saved.values())
        for key, rows in again.items():
            with case(replicas, key):
                assert len(rows) == replicas and (replicas != 2 or rows.equal(saved[key]))
                torch.testing.assert_close(rows.mean(0), saved[key].mean(0), rtol=1e-5, atol=1e-7)
        train(model, dgc_sgd(model), inputs[3:])
        assert exchange.compression_state_dict()["identity"]["step"] == 4
        exchange.close()


@sharded.on_machines
def test_machines_keep_what_they_have_not_sent_in_a_checkpoint(transport: Any, tmp_path: Path) -> None:
    """Their meshes do not know each other."""
    states = []
    for i in range(2):
        model = shard(network(), sharded.machine(transport))
        exchange = compress(model, METHODS["powersgd"](), transport=transport)
        if i == 0:
            train(model, dgc_sgd(model), batches(3, transport.rank))
            save_state(exchange, tmp_path)
        load_state(exchange, tmp_path)
        states.append(exchange.compression_state_dict())
        exchange.close()
    assert_equal(states[0], states[1])


def saved_by(transport: Any, folder: Path) -> None:
    model = of_shape(2)
    exchange = compress(model, METHODS["powersgd"]())
    train(model, dgc_sgd(model), batches(3, transport.rank))
    save_state(exchange, folder)
    exchange.close()


def loaded_by(transport: Any, folder: Path) -> None:
    for replicas in (1, 2):
        exchange = compress(of_shape(replicas), METHODS["powersgd"]())
        load_state(exchange, folder)
        save_state(exchange, folder / f"{replicas}")
        saved, again = content(folder), content(folder / f"{replicas}")
        assert saved.keys() == again.keys()
        for key, rows in again.items():
            torch.testing.assert_close(rows.mean(0), saved[key].mean(0), rtol=1e-6, atol=1e-8)
        exchange.close()


def test_the_mean_error_stays_on_half_as_many_ranks(tmp_path: Path) -> None:
    running_group(torchrun, 4).run(saved_by, tmp_path)
    running_group(torchrun, 2).run(loaded_by, tmp_path)


def compressed(method: str) -> Callable[[Any], Any]:
    return lambda model: compress(model, METHODS[method]())


CONTINUED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "hsdp, dgc": (partial(of_hsdp, "plain"), compressed("dgc")),
    "hsdp, powersgd": (partial(of_hsdp, "plain"), compressed("powersgd")),
    "hsdp, differences of weights": (partial(of_hsdp, "plain"), partial(quantize, gradients=4, weights=4)),
    "replicate": (replicated, compressed("4 bits")),
    "experts": (partial(mixture, "replicas"), compressed("dgc")),
    "experts, sharded": (partial(mixture, "mixed"), compressed("4 bits")),
    "experts, quantized": (partial(mixture, "sharded"), partial(quantize, gradients=4)),
    "experts, differences of weights": (partial(mixture, "replicas"), partial(quantize, gradients=4, weights=4)),
}


class Continued:
    """A run of a case, with what a checkpoint of it has."""

    def __init__(self, name: str):
        build_model, compression = CONTINUED[name]
        self.model = build_model()
        self.exchange, self.optimizer = compression(self.model), dgc_sgd(self.model)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "exchange": self.exchange.state_dict()}

    def load(self, state: Any) -> None:
        parts: dict[str, Any] = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)
        self.exchange.load_state_dict(state["exchange"])

    def end(self, inputs: list[Tensor]) -> list[Tensor]:
        train(self.model, self.optimizer, inputs)
        self.exchange.close()
        return parts(self.model)


@on_ranks
def test_a_loaded_run_continues_bit_for_bit(transport: Any, tmp_path: Path) -> None:
    """All of them in one checkpoint, since most of the time goes into files."""
    inputs = batches(6, transport.rank)
    runs = {name: Continued(name) for name in CONTINUED}
    for run in runs.values():
        train(run.model, run.optimizer, inputs[:3])
    checkpoint.save({name: run.state() for name, run in runs.items()}, checkpoint_id=tmp_path)
    ends = {name: run.end(inputs[3:]) for name, run in runs.items()}
    runs = {name: Continued(name) for name in CONTINUED}
    loaded: Any = {name: run.state() for name, run in runs.items()}
    checkpoint.load(loaded, checkpoint_id=tmp_path)
    for name, run in runs.items():
        with case(name):
            run.load(loaded[name])
            assert all(map(torch.equal, run.end(inputs[3:]), ends[name]))
