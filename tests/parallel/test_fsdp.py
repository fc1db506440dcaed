"""dgc.fsdp on two machines of two ranks. Two agents of torchrun stand for the machines."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from cases import case
from integrations.titan import Decoder, chunked_backward, config_of, dims_of, parallelized
from parallel import sharded
from parallel.found import digest, refused, told
from parallel.sharded import (
    accumulate,
    batches,
    check_near,
    loss_of,
    machine,
    network,
    on_machines,
    shard,
    top_k,
    train,
    whole,
)
from states import assert_equal
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dgc import compression as methods
from dgc.comm.collectives import all_gather_object
from dgc.comm.torch_distributed import connect
from dgc.core.bucket import make_bucket
from dgc.engine.state import BucketStates
from dgc.fsdp import compress
from dgc.integrations.torchtitan import compressed, reduce_once
from dgc.memory import DGCSGDMemory
from dgc.optim import DGCSGD
from dgc.testing import Fleet


def dgc(ratio: float = 0.2, **options: Any) -> methods.DGCCompressor:
    return methods.DGCCompressor(ratio, DGCSGDMemory(momentum=0.9), **options)


def decayed(model: nn.Module) -> DGCSGD:
    return DGCSGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def check_like_hsdp(
    transport: Any, native: Any, model: Any, make: Any, bound: float = 2e-6, loop: Any = train, **options: Any
) -> None:
    inputs, start = batches(4, transport.rank), whole(model)
    loop(native, torch.optim.SGD(native.parameters(), momentum=0.9, **options), inputs)
    exchange = compress(model, make(), transport=transport)
    loop(model, DGCSGD(model.parameters(), momentum=0.9, **options), inputs)
    exchange.close()
    check_near(model, whole(native), start, bound)


@on_machines
def test_ratio_1_equals_hsdp(transport: Any) -> None:
    ratio_1, mesh = partial(dgc, 1.0), sharded.of_hsdp()
    runs: list[tuple[str, Any, Any, float]] = [
        ("no sync", partial(accumulate, switch="set_requires_gradient_sync"), ratio_1, 2e-6),
        ("no all-reduce", partial(accumulate, switch="set_requires_all_reduce"), ratio_1, 2e-6),
        *((name, train, ratio_1, 2e-6) for name in ("plain", "repeated", "frozen")),
        *((name, train, methods.DenseCompressor, 2e-6) for name in ("plain", "columns", "bf16")),
        ("bf16 reduce", train, methods.DenseCompressor, 2e-2),
        ("fp16 parameters", train, methods.DenseCompressor, 5e-3),
        ("two exchanges", accumulate, methods.DenseCompressor, 2e-6),
    ]
    for name, loop, make, bound in runs:
        native, model = sharded.build(mesh, name), sharded.build(machine(transport), name)
        with case(name, make):
            check_like_hsdp(transport, native, model, make, bound, loop, lr=0.05, weight_decay=1e-3)


@on_machines
def test_muon_steps_on_whole_matrices(transport: Any) -> None:
    """The model is the one that DDP trains on the same batches."""
    world = sharded.of_all()  # whose last rank has no row of the first matrix
    for mesh, precision in ((machine(transport), "fp32"), (machine(transport), "bf16"), (world, "fp32")):
        replica, model = DistributedDataParallel(network()), shard(network(), mesh)
        start, inputs = whole(model), batches(4, transport.rank)
        train(replica, sharded.with_muon(replica, precision), inputs)
        exchange = None if mesh is world else compress(model, methods.DenseCompressor(), transport=transport)
        other = sharded.with_muon(model, precision)
        train(model, other, inputs)
        check_near(model, sharded.flat(replica), start, 1e-5 if precision == "fp32" else 2e-2)
        states = [value for state in other.state.values() for name, value in state.items() if name != "step"]
        assert all(hasattr(state, "to_local") for state in states)
        if exchange is not None:
            exchange.close()


class SumReduceScatter(DefaultReduceScatter):
    """Gloo has no PREMUL_SUM, which FSDP2 asks for with most divide factors. Right for a factor of 1."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        return super().__call__(output_tensor, input_tensor, group, dist.ReduceOp.SUM, async_op)


@on_machines
def test_gradients_that_fsdp2_does_not_average_are_those_of_hsdp(transport: Any) -> None:
    mesh = sharded.of_hsdp()
    for factor, sums in ((1.0, True), (1.0, False), (2.0, False), (3.0, True), (None, True)):
        native, model = shard(network(), mesh), shard(network(), machine(transport))
        sharded.divide(native, factor, sums or factor != 2)
        sharded.divide(model, factor, sums)
        for module in (model[0], model[2], model) if factor == 1 and not sums else ():
            module.set_custom_reduce_scatter(SumReduceScatter())
        with case(factor, sums):
            check_like_hsdp(transport, native, model, partial(dgc, 1.0), lr=0.01)


def titan(make: Any = None, kind: Any = nn.Sequential, batch: int = -1) -> tuple[Any, Any, Any]:
    """What torchtitan does of its config until it trains: the model, its optimizer, and what holds optimizers.

    make: Makes the compressor. None: FSDP2 alone. kind: The model's class. batch: The sequences of a step.
    """

    def parallelize(model: Any, *, parallel_dims: Any, training: Any, rest: str) -> Any:
        assert rest == "rest" and parallel_dims.dp_replicate_enabled
        fully_shard(model[-1], mesh=sharded.of_hsdp())
        shard(model, sharded.of_hsdp())
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(make is None)
        return model

    config, dims = config_of(parallelize, batch), dims_of()
    if make is not None:
        config = compressed(config, make())
    with torch.device("meta"):
        model = kind(*network())
    model = parallelized(config, model, dims, rest="rest").to_empty(device="cpu")
    start = network().state_dict()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(distribute_tensor(start[name], p.device_mesh, p.placements))
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizers = SimpleNamespace(state_dict=lambda: deepcopy(inner.state_dict()))
    optimizers.load_state_dict = inner.load_state_dict
    if config.model_spec.post_optimizer_build_fn:
        config.model_spec.post_optimizer_build_fn(optimizers, [model], dims)
    return model, inner, optimizers


@on_machines
def test_the_sums_of_torchtitan_are_the_sums_of_hsdp_bit_for_bit(transport: Any) -> None:
    native, dense = titan(), titan(methods.DenseCompressor)
    for model, optimizer, _ in (native, dense):
        train(model, optimizer, batches(6, transport.rank))
    assert torch.equal(whole(dense[0]), whole(native[0]))
    dense[2].exchange.close()


def train_titan(model: Any, optimizer: Any, inputs: Sequence[Tensor], microbatches: int) -> None:
    for first in range(0, len(inputs), microbatches):
        optimizer.zero_grad()
        for batch in inputs[first : first + microbatches]:
            chunked_backward(model, batch)
        optimizer.step()


@on_machines
def test_a_step_of_torchtitan_is_one_exchange(transport: Any) -> None:
    """With a chunked loss and two microbatches: the bits of FSDP2, if it all-reduces once, and the bytes."""
    inputs, start = batches(8, transport.rank), network()
    native, dense = titan(kind=Decoder), titan(methods.DenseCompressor, kind=Decoder, batch=16)
    often, plain = titan(kind=Decoder), titan(methods.DenseCompressor)
    reduce_once(native[0], 2)
    native[0].set_reduce_scatter_unused_params(True)  # the last backward pass does not use the last layer
    for model, optimizer, _ in (native, dense, often):
        train_titan(model, optimizer, inputs, 2)
    train(*plain[:2], inputs[:4])
    assert torch.equal(whole(dense[0]), whole(native[0]))
    check_near(dense[0], whole(often[0]), sharded.flat(start))
    sent, sent_in_steps = (each[2].exchange.meter.dense_wire_bytes for each in (dense, plain))
    assert sent == sent_in_steps > 0
    for _, _, optimizers in (dense, plain):
        optimizers.exchange.close()


@on_machines
def test_validation_of_torchtitan_is_no_microbatch(transport: Any) -> None:
    inputs, runs = batches(8, transport.rank), [titan(top_k, Decoder, batch=16) for _ in range(2)]
    for (model, optimizer, _), is_validated in zip(runs, (False, True), strict=True):
        for first in range(0, 8, 2):
            train_titan(model, optimizer, inputs[first : first + 2], 2)
            if is_validated:
                with torch.no_grad():
                    model(inputs[0])
    runs[1][0].reshard()
    assert torch.equal(whole(runs[0][0]), whole(runs[1][0]))
    for _, _, optimizers in runs:
        optimizers.exchange.close()


@on_machines
def test_the_optimizers_of_torchtitan_keep_what_is_not_sent(transport: Any) -> None:
    inputs = batches(6, transport.rank)
    run, again = titan(top_k), titan(top_k)
    train(*run[:2], inputs[:3])
    saved = {name: tensor.to_local().clone() for name, tensor in run[0].state_dict().items()}
    state = deepcopy(run[2].state_dict())
    assert [key for key in state if "exchange" in key] == [f"dgc.exchange.rank{transport.rank}"]
    train(*run[:2], inputs[3:])
    assert run[2].exchange.error_norm() > 0
    with torch.no_grad():
        for name, p in again[0].named_parameters():
            p.to_local().copy_(saved[name])
    again[2].load_state_dict(state)
    train(*again[:2], inputs[3:])
    assert torch.equal(whole(again[0]), whole(run[0]))
    for _, _, optimizers in (run, again):
        optimizers.exchange.close()


METHODS: dict[str, Callable[[], Any]] = {
    "top-k": lambda: top_k(vectors="sparse"),
    "dgc": lambda: dgc(vectors="sparse"),
    "reduce_scatter": lambda: top_k(0.05, vectors="sparse", exchange="reduce_scatter"),
    "2-bit": lambda: methods.ThresholdCompressor(2, 0.05),
    "qsgd": methods.QSGDCompressor,
    "4 bits": lambda: methods.TwoPhaseCompressor(4),
    "ef21": lambda: methods.EF21Compressor(top_k(vectors="sparse")),
    "powersgd": lambda: methods.PowerSGDCompressor(2, min_compression_rate=0),
    "8 bits": methods.TwoPhaseCompressor,
    "hadamard": lambda: methods.TwoPhaseCompressor(4, 64, hadamard=True),
}


@pytest.mark.parametrize("method", METHODS)
@on_machines
def test_a_method_runs_between_machines_on_local_rows(transport: Any, method: str) -> None:
    """Gradients equal the gradients of the method among two ranks, on the rows of this one."""
    model = shard(network(), machine(transport))
    exchange = compress(model, METHODS[method](), transport=transport)
    expected = expected_gradients(METHODS[method], transport.local_rank)
    for step, want in zip(range(4), expected, strict=False):  # the residual of a step is in the next
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the dropped step
            loss_of(model, gradient_batch(step, transport.rank)).backward()
        for name, p in model.named_parameters():
            assert (p.grad is None) == (not want)
            if want and p.to_local().numel():
                assert torch.equal(p.grad.to_local(), want[name]), name
    assert exchange.dropped_steps == 1
    # of the second rows, reduce_scatter would send more bytes than the dense sum, which takes its place
    without_error = ("qsgd", "reduce_scatter") if transport.local_rank else ("qsgd",)
    assert (exchange.error_norm() > 0) == (method not in without_error)
    exchange.close()


def gradient_batch(step: int, rank: int) -> Tensor:
    """A batch. The last rank has NaN in the third step, which is dropped."""
    batch = batches(step + 1, rank)[step]
    return batch * float("nan") if (step, rank) == (2, 3) else batch


class Machines(Fleet):
    """Two, with a bucket of parameters that have these names. Random numbers depend on the names."""

    def __init__(self, make: Callable[[], Any], rows: dict[str, Tensor]) -> None:
        super().__init__(make, 2, list(rows.values()))
        self.states = [BucketStates(make()) for _ in range(2)]
        self.buckets = [make_bucket("bucket", list(rows.items())) for _ in range(2)]
        for number in range(2):
            self.states[number].add(self.buckets[number], 2, number)


def expected_gradients(make: Callable[[], Any], local_rank: int) -> Iterator[dict[str, Tensor]]:
    """The means of this rank's rows, from plain models of all ranks and two simulated machines. A drop: none."""

    def rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = {name: tensor.chunk(2) for name, tensor in tensors.items()}
        return {name: part[local_rank] for name, part in parts.items() if local_rank < len(part)}

    plain = network()
    own = rows({name: p.detach() for name, p in plain.named_parameters()})
    groups = [[name for name in own if int(name[0]) in layers] for layers in ((0,), (2, 3), (4, 5))]
    fleets = [Machines(make, {name: own[name] for name in group}) for group in groups]
    for step in count():
        of_machines = []
        for first in (0, 2):
            plain.zero_grad()
            for rank in (first, first + 1):
                (loss_of(plain, gradient_batch(step, rank)) / 2).backward()
            of_machines.append(
                rows({n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None})
            )
        found: dict[str, Tensor] = {}
        for group, fleet in zip(groups, fleets, strict=True):
            mean, _ = fleet.step([[own[name] for name in group] for own in of_machines])
            found |= {name: s.of(mean) for name, s in zip(group, fleet.buckets[0].segments, strict=True)}
        yield {} if any(fleet.nonfinite[0] for fleet in fleets) else found


@on_machines
def test_a_nonfinite_gradient_drops_the_step_everywhere(transport: Any) -> str:
    exchanges = []

    def start(**options: Any) -> tuple[Any, Any, Any]:
        model = shard(network(), machine(transport))
        exchanges.append(compress(model, dgc(), transport=transport, **options))
        return model, exchanges[-1], decayed(model)

    reason = "0.weight on rank 1 has NaN or inf, or is 2**64 or more (the rank is the number of a machine)"
    (model,) = set(sharded.check_a_dropped_step(transport, start, reason, lambda _: None, unscales=True).values())
    assert all(0 < exchange.error_norm() < 100 for exchange in exchanges)
    return model


@on_machines
def test_all_ranks_have_the_model_with_a_layer_that_one_machine_uses(transport: Any) -> str:
    """In each step another one does, and only one in the first step too."""
    model = sharded.build(machine(transport), "repeated")
    start = whole(model)
    exchange = compress(model, top_k(0.3), transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(batches(4, transport.rank)):
        # FSDP2 requires that the ranks of one machine use the same layers
        model.times = int(transport.rank // 2 == step % 2)
        train(model, optimizer, [batch])
        assert all(p.grad is not None for p in model.parameters())  # Muon gathers a matrix if it has one
    exchange.close()
    assert float(((whole(model) - start) != 0).float().mean()) > 0.9
    return digest([whole(model)])


@on_machines
def test_bytes_between_machines(transport: Any) -> None:
    rows, selected = ((26, 52), (25, 50))[transport.local_rank]
    dense = 4 * rows * 201
    for compressor, sent in ((methods.DenseCompressor(), dense), (top_k(0.01), 24 + 12 * selected + 4 * rows)):
        model: Any = fully_shard(nn.Linear(200, 51), mesh=machine(transport))
        exchange = compress(model, compressor, transport=transport)
        for _ in range(2):
            model(torch.ones(2, 200)).square().mean().backward()
        assert [exchange.meter.wire_bytes, exchange.meter.dense_wire_bytes] == [2 * sent, 2 * dense]
        exchange.close()


GO_ON: dict[str, tuple[Any, Any]] = {
    "dgc": (partial(dgc, warmup_epochs=2), decayed),
    "muon": (partial(methods.TwoPhaseCompressor, 4), sharded.with_muon),
}


def built(transport: Any, name: str) -> tuple[Any, Any, Any]:
    make_compressor, make_optimizer = GO_ON[name]
    model = shard(network(), machine(transport))
    exchange = compress(model, make_compressor(), transport=transport, steps_per_epoch=3)
    return model, make_optimizer(model), exchange


@pytest.mark.parametrize("name", GO_ON)
@on_machines
def test_a_loaded_run_continues_bit_for_bit(transport: Any, tmp_path: Path, name: str) -> str:
    inputs = batches(8, transport.rank)
    model, optimizer, exchange = built(transport, name)
    train(model, optimizer, inputs[:4])
    at_save, own = digest([whole(model)]), tmp_path / f"exchange{transport.rank}.pt"
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "checkpoint")
    torch.save(exchange.compression_state_dict(), own)
    train(model, optimizer, inputs[4:])
    end, error = digest([whole(model)]), exchange.error_norm()
    assert end != at_save and error > 0
    exchange.close()

    model, optimizer, exchange = built(transport, name)
    weights, state = get_state_dict(model, optimizer)
    loaded: Any = {"model": weights, "optimizer": state}
    checkpoint.load(loaded, checkpoint_id=tmp_path / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    exchange.load_compression_state_dict(torch.load(own))
    train(model, optimizer, inputs[4:])
    exchange.close()
    assert (digest([whole(model)]), exchange.error_norm()) == (end, error)
    return end


@pytest.mark.parametrize("name", GO_ON)
@on_machines
def test_a_gathered_state_loads_on_its_ranks(transport: Any, name: str) -> None:
    model, optimizer, exchange = built(transport, name)
    train(model, optimizer, batches(4, transport.rank))
    whole_state, own_state = exchange.gather_state(), exchange.compression_state_dict()
    assert (whole_state is None) == (transport.rank > 0)
    exchange.close()
    again = built(transport, name)[2]
    again.load_gathered(whole_state)
    assert_equal(again.compression_state_dict(), own_state)
    again.close()


@pytest.mark.parametrize("name", GO_ON)
@on_machines
def test_the_state_of_another_rank_is_refused(transport: Any, name: str) -> None:
    """The error belongs to one shard on one machine."""
    inputs = batches(5, transport.rank)
    model, optimizer, exchange = built(transport, name)
    train(model, optimizer, inputs[:4])
    own = deepcopy(exchange.compression_state_dict())
    states = all_gather_object(transport, own)
    found = [told(partial(exchange.load_compression_state_dict, state), ValueError) for state in states]
    exchange.close()
    number, part = divmod(transport.rank, 2)
    where = f"of 2 on machine {1 - number} of 2, and shard {part} of 2 on machine {number} of 2 loads it"
    assert found[transport.rank] == ""
    assert f"from shard {part} {where}. What is not sent" in found[(transport.rank + 2) % 4]
    assert all("shards are different parts" in found[rank] for rank in range(4) if rank % 2 != part)
    model, optimizer, exchange = built(transport, name)
    if transport.rank < 2:  # only on the first machine
        exchange.load_compression_state_dict(own)
    steps = "different steps (ranks 0, 1: step 4; ranks 2, 3: step 0)"
    refused(steps, lambda: loss_of(model, inputs[4]).backward())
    exchange.close()


def refused_by_compress(
    message: str, transport: Any, model: Any = None, compressor: Any = None, **options: Any
) -> None:
    model = shard(network(), machine(transport)) if model is None else model
    refused(message, lambda: compress(model, compressor, **{"transport": transport, **options}))


@on_machines
def test_a_model_that_cannot_work_is_refused(transport: Any) -> None:
    mesh, world = machine(transport), sharded.of_all()

    def check(message: str, model: Any) -> None:
        refused_by_compress(message, transport, model)

    described = "has replicas, which a transport would describe a second time"
    check(f"the mesh of module 2 {described}", shard(network(), sharded.of_hsdp()))
    check(f"the mesh of the model {described}", replicate(network(), mesh=mesh))
    check("module 2 is sharded over ranks [0, 1, 2, 3], and this machine has ranks", shard(network(), world))
    check("9 trainable parameters are not sharded, such as 0.weight", network())
    half = network()
    fully_shard(half[0], mesh=mesh)
    check("7 trainable parameters are not sharded, such as 2.weight", half)
    groups, with_result = network(), ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh, 0))
    fully_shard(groups[0], mesh=world, shard_placement_fn=lambda p: with_result if p.ndim == 1 else None)
    fully_shard(groups, mesh=mesh)
    check("parameter group 0 of module 0 is sharded over ranks [0, 1, 2, 3], and this", groups)
    check("the model has no trainable parameters", shard(network().requires_grad_(False), mesh))
    other = network()
    if transport.rank >= 2:
        other.append(nn.Linear(1, 1))  # of one row: the second rank of each machine has none of it
    check("train different models or compress them differently: ", shard(other, mesh))
    with_complex: Any = network()
    with_complex[0].weight = nn.Parameter(with_complex[0].weight.detach().to(torch.complex64))
    check("is complex, which only DistributedOptimizer and dgc.ddp.compress exchange", shard(with_complex, mesh))


@on_machines
def test_an_argument_that_cannot_work_is_refused(transport: Any) -> None:
    check = refused_by_compress
    check("nonfinite must be 'skip' or 'raise', not 'ignore'", transport, nonfinite="ignore")
    differing = methods.ThresholdCompressor(2, 0.5 + transport.rank)
    check("compression.threshold is 0.5 on rank 0 and 1.5 on rank 1", transport, compressor=differing)
    check("it needs nonfinite='skip'", transport, nonfinite="raise", grad_scaler=torch.amp.GradScaler("cpu"))
    check("group 'cross' does not exist: use TorchTransport(hierarchical=True)", connect())


@on_machines
def test_a_first_step_that_cannot_work_is_refused(transport: Any) -> None:
    mesh, batch = machine(transport), batches(1, transport.rank)[0]

    def check(
        message: str,
        change: Any = None,
        before: Any = None,
        make: Any = methods.DenseCompressor,
        optimizer: Any = None,
    ) -> None:
        model = network()
        if before:
            before(model)
        exchange = compress(shard(model, mesh), make(), transport=transport)
        if change:
            change(model)

        def step() -> None:
            loss_of(model, batch).backward()
            (optimizer or torch.optim.SGD)(model.parameters(), lr=0.1).step()

        refused(message, step, RuntimeError, ValueError)
        exchange.close()

    def other_model(model: Any) -> None:
        model[4].bias.data += transport.rank // 2

    def step_in_backward(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)

    sgd = partial(torch.optim.SGD, momentum=0.9)
    check("SGD would apply it again: use dgc.optim.DGCSGD", make=dgc, optimizer=sgd)
    check("Adam would apply it again", make=dgc, optimizer=torch.optim.Adam)
    check("4.bias differs between machines 0 and 1 before the first step", before=other_model)
    replaced = "were replaced after dgc.fsdp.compress, for example by load_state_dict(assign=True)"
    check(replaced, lambda model: model.load_state_dict(deepcopy(model.state_dict()), assign=True))
    check("an optimizer that steps during backward is not supported", step_in_backward)
    frozen = "4.weight of the model was frozen or unfrozen after dgc.fsdp.compress"
    check(frozen, lambda model: model[4].requires_grad_(False))
    check("mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)", before=lambda model: model.half())

    repeated = sharded.build(mesh, "repeated")
    exchange = compress(repeated, methods.DenseCompressor(), transport=transport)
    loss_of(repeated, batch).backward()
    repeated.times = 3
    more = "module middle runs more often in this forward pass than in the first, 2 times"
    refused(more, loss_of(repeated, batch).backward, RuntimeError)
    exchange.close()
