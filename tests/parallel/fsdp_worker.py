"""Runs on every rank of two machines: scenarios of dgc.fsdp. Each function returns what it found."""

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from parallel.found import Finding, digest, told
from states import assert_equal
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dgc.bucket import make_bucket
from dgc.comm.collectives import all_gather_object
from dgc.comm.lockstep import LockstepWorld
from dgc.comm.torch_distributed import connect
from dgc.compression import (
    DenseCompressor,
    DGCCompressor,
    EF21Compressor,
    PowerSGDCompressor,
    QSGDCompressor,
    SparseCompressor,
    ThresholdCompressor,
    TwoPhaseCompressor,
)
from dgc.engine.state import BucketStates
from dgc.fsdp import ShardedLocalOptimizer, compress, local_mesh
from dgc.gossip import SGP, HierarchicalGossip
from dgc.integrations.torchtitan import compressed
from dgc.local import Nesterov, OuterSteps, ZeroOneSteps
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DGCSGD, LocalOptimizer, MuonWithAdamW, muon_groups
from dgc.testing import Fleet

FEATURES = 7
MESHES: list[Any] = []


def mesh_of(transport: Any) -> Any:
    """The mesh of this machine, created once: torch has meshes in its caches, so their groups must stay."""
    if not MESHES:
        MESHES.append(local_mesh(transport))
    return MESHES[0]


def network() -> nn.Sequential:
    """Sizes that two ranks do not divide evenly. The last layer has one row: one rank has none of it."""
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 6, bias=False), nn.LayerNorm(6)]
    return nn.Sequential(*layers, nn.Linear(6, 3), nn.Linear(3, 1))


def shard(model: nn.Sequential, mesh: Any, **options: Any) -> nn.Sequential:
    """Layer 0 is a group, and layers 2 and 3 are one; the others are in that of the whole model."""
    for layers in ([model[0]], [model[2], model[3]], model):
        fully_shard(layers, mesh=mesh, **options)
    return model


def sharded(transport: Any) -> Any:
    return shard(network(), mesh_of(transport))


def dgc(ratio: float = 0.2, **options: Any) -> DGCCompressor:
    return DGCCompressor(ratio, DGCSGDMemory(momentum=0.9), **options)


def top_k(ratio: float = 0.2, **options: Any) -> SparseCompressor:
    return SparseCompressor(ratio, ResidualMemory(), **options)


def batches(steps: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, FEATURES, generator=generator) for _ in range(steps)]


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    dtype = next(model.parameters()).dtype
    return (model(inputs.to(dtype)).float() - inputs.sum(1, keepdim=True)).square().mean()


def train(model: nn.Module, optimizer: Any, inputs: Sequence[Tensor]) -> None:
    for batch in inputs:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def whole(model: Any) -> Tensor:
    return torch.cat([p.full_tensor().detach().float().flatten() for p in model.parameters()])


# --- equal to HSDP --------------------------------------------------------------------------------


def accumulate(model: Any, optimizer: Any, inputs: Sequence[Tensor], switch: str = "") -> None:
    """Two backward passes per step. The switch is off in the first of them."""
    for first, second in zip(inputs[::2], inputs[1::2], strict=True):
        optimizer.zero_grad()
        if switch:
            getattr(model, switch)(False)
        loss_of(model, first).backward()
        if switch:
            getattr(model, switch)(True)
        loss_of(model, second).backward()
        optimizer.step()


class Repeated(nn.Module):
    """Its middle layer runs twice, so FSDP2 reduces the layer's gradient in two parts."""

    def __init__(self, times: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, 1)
        self.middle = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 5))  # one rank has no row of the first weight
        self.times = times

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).tanh()
        for _ in range(self.times):
            x = self.middle(x).tanh()
        return self.last(x)


def shard_repeated(mesh: Any, times: int = 2) -> Any:
    model: Any = Repeated(times)
    fully_shard(model.middle, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def columns(p: nn.Parameter) -> Shard | None:
    return Shard(1) if p.ndim == 2 and p.shape[1] % 2 == 0 else None


def equal_to_hsdp(transport: Any) -> Finding:
    """The largest difference of any parameter to native HSDP after some steps, relative to the change."""
    flat, square = mesh_of(transport), init_device_mesh("cpu", (2, 2), mesh_dim_names=("machine", "local"))
    fp16, bf16 = torch.float16, torch.bfloat16
    policies = {
        "bf16": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32),
        "bf16 reduce": MixedPrecisionPolicy(reduce_dtype=bf16),
        "fp16 parameters": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    }

    def build(mesh: Any, name: str) -> Any:
        if name == "repeated":
            return shard_repeated(mesh)
        model = network()
        if name == "frozen":
            model[2].requires_grad_(False)
            model[4].bias.requires_grad_(False)
        if name == "fp16 parameters":
            model.to(fp16)
        options: Any = {"mp_policy": policies[name]} if name in policies else {}
        if name == "columns":
            options = {"shard_placement_fn": columns}
        return shard(model, mesh, **options)

    ratio_1, dense = partial(dgc, 1.0), DenseCompressor
    runs: list[tuple[str, Any, Any]] = [
        ("no sync", partial(accumulate, switch="set_requires_gradient_sync"), ratio_1),
        ("no all-reduce", partial(accumulate, switch="set_requires_all_reduce"), ratio_1),
        *((name, train, ratio_1) for name in ("plain", "repeated", "frozen")),
        *((name, train, dense) for name in ("plain", "columns", *policies)),
        ("two exchanges", accumulate, dense),
    ]
    found = {}
    for name, loop, make in runs:
        inputs = batches(4, transport.rank)
        native, model = build(square, name), build(flat, name)
        start = whole(model)
        options: Any = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
        loop(native, torch.optim.SGD(native.parameters(), **options), inputs)
        exchange = compress(model, make(), transport=transport)
        loop(model, DGCSGD(model.parameters(), **options), inputs)
        change = (whole(native) - start).norm()
        found[f"{name} {make().__class__.__name__}"] = float((whole(model) - whole(native)).norm() / change)
        exchange.close()
    return found


def with_muon(model: nn.Module, precision: str = "fp32") -> MuonWithAdamW:
    groups = muon_groups(model, head=["4.*"], split={"0.weight": [2, 3]})
    return MuonWithAdamW(groups, lr=0.01, ns_precision=precision)


def muon(transport: Any) -> Finding:
    """The same difference to the whole model, which one process trains on the batches of all ranks."""
    world, found = init_device_mesh("cpu", (4,)), {}  # whose last rank has no row of the first matrix
    for name, mesh, precision in (
        ("fp32", mesh_of(transport), "fp32"),
        ("bf16", mesh_of(transport), "bf16"),
        ("over all", world, "fp32"),
    ):
        alone, model = network(), shard(network(), mesh)
        start, own = whole(model), with_muon(alone, precision)
        for inputs in zip(*(batches(4, rank) for rank in range(4)), strict=True):
            own.zero_grad()
            sum((loss_of(alone, each) / 4 for each in inputs), torch.zeros(())).backward()
            own.step()
        exchange = None if mesh is world else compress(model, DenseCompressor(), transport=transport)
        other = with_muon(model, precision)
        train(model, other, batches(4, transport.rank))
        expected = torch.cat([p.detach().flatten() for p in alone.parameters()])
        found[name] = float((whole(model) - expected).norm() / (expected - start).norm())
        assert all(
            hasattr(state[name], "to_local") for state in other.state.values() for name in state if name != "step"
        )
        if exchange is not None:
            exchange.close()
    return found


class SumReduceScatter(DefaultReduceScatter):
    """Gloo has no PREMUL_SUM, which FSDP2 asks for with most divide factors. Right for a factor of 1."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        return super().__call__(output_tensor, input_tensor, group, dist.ReduceOp.SUM, async_op)


def divided(transport: Any) -> Finding:
    """The same difference where FSDP2 divides the sum of all gradients by a factor.

    FSDP2 divides in its reduce-scatter, or after its hook ("sums").
    """
    flat, square = mesh_of(transport), init_device_mesh("cpu", (2, 2), mesh_dim_names=("machine", "local"))
    found = {}
    for factor, sums in ((1.0, True), (1.0, False), (2.0, False), (3.0, True), (None, True)):
        models = []
        for mesh in (square, flat):
            model: Any = shard(network(), mesh)
            for module in (model[0], model[2], model):
                if factor is not None:
                    module.set_gradient_divide_factor(factor)
                if sums or (mesh is square and factor != 2):
                    module.set_force_sum_reduction_for_comms(True)
                elif factor == 1:
                    module.set_custom_reduce_scatter(SumReduceScatter())
            models.append(model)
        native, model = models
        start, inputs = whole(model), batches(4, transport.rank)
        options: Any = {"lr": 0.01, "momentum": 0.9}
        train(native, torch.optim.SGD(native.parameters(), **options), inputs)
        exchange = compress(model, dgc(1.0), transport=transport)
        train(model, DGCSGD(model.parameters(), **options), inputs)
        change = (whole(native) - start).norm()
        found[f"{factor} {'sums' if sums else ''}"] = float((whole(model) - whole(native)).norm() / change)
        exchange.close()
    return found


@dataclass
class Spec:
    """The part of torchtitan's ModelSpec that matters."""

    parallelize_fn: Any
    post_optimizer_build_fn: Any = None


class Titan:
    """What torchtitan 0.3.0 does of a Trainer.Config until it trains, and a step of its loop."""

    def __init__(self, transport: Any, make: Any = None, **dims: Any):
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("machine", "local"))

        def parallelize(model: Any, *, parallel_dims: Any, training: Any, parallelism: Any, rest: str) -> Any:
            sharded = shard(model, square if parallel_dims.dp_replicate_enabled else mesh_of(transport))
            for module in (model[0], model[2], model):
                module.set_gradient_divide_factor(1.0)
                if make is None:
                    module.set_force_sum_reduction_for_comms(True)
            assert rest == "rest"
            return sharded

        training = SimpleNamespace(disable_cuda_graphs=False)
        parallelism = SimpleNamespace(spmd_backend="spmd_types")
        config = SimpleNamespace(model_spec=Spec(parallelize), training=training, parallelism=parallelism)
        if make is not None:
            config = compressed(config, make())
        off = dict.fromkeys(("pp_enabled", "tp_enabled", "cp_enabled", "ep_enabled"), False)
        own = SimpleNamespace(**{"dp_replicate_enabled": True, "dp_replicate": 2, **off, **dims})
        with torch.device("meta"):
            model = network()
        self.model = config.model_spec.parallelize_fn(
            model, parallel_dims=own, training=training, parallelism=parallelism, rest="rest"
        )
        self.model.to_empty(device="cpu")
        start = network().state_dict()
        for name, p in self.model.named_parameters():
            with torch.no_grad():
                p.copy_(distribute_tensor(start[name], p.device_mesh, p.placements))
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.optimizers: Any = SimpleNamespace(
            state_dict=lambda: deepcopy(self.inner.state_dict()), load_state_dict=self.inner.load_state_dict
        )
        if config.model_spec.post_optimizer_build_fn:
            config.model_spec.post_optimizer_build_fn(self.optimizers, [self.model], own)

    def train(self, inputs: Sequence[Tensor]) -> Tensor:
        train(self.model, self.inner, inputs)
        return whole(self.model)


def torchtitan(transport: Any) -> Finding:
    """Its sums are those of HSDP, and its optimizers' state has what this rank has not sent."""
    inputs = batches(6, transport.rank)
    start, native = whole(sharded(transport)), Titan(transport).train(inputs)
    dense = Titan(transport, DenseCompressor)
    difference = (dense.train(inputs) - native).norm() / (native - start).norm()
    run = Titan(transport, top_k)
    run.train(inputs[:3])
    model, state = run.model.state_dict(), deepcopy(run.optimizers.state_dict())
    model = {name: tensor.to_local().clone() for name, tensor in model.items()}
    end = run.train(inputs[3:])
    again = Titan(transport, top_k)
    with torch.no_grad():
        for name, p in again.model.named_parameters():
            p.to_local().copy_(model[name])
    again.optimizers.load_state_dict(state)
    assert torch.equal(again.train(inputs[3:]), end)
    for at in (dense, run, again):
        at.optimizers.exchange.close()
    other = told(lambda: Titan(transport, top_k, dp_replicate=4), ValueError)
    return {
        "difference": float(difference),
        "error": run.optimizers.exchange.error_norm(),
        "other": other,
        "keys": [key for key in state if "exchange" in key],
    }


# --- the method between machines ------------------------------------------------------------------


METHODS: dict[str, Callable[[], Any]] = {
    "top-k": lambda: top_k(vectors="sparse"),
    "dgc": lambda: dgc(vectors="sparse"),
    "reduce_scatter": lambda: top_k(0.05, vectors="sparse", exchange="reduce_scatter"),
    "gtopk": lambda: dgc(0.05, vectors="sparse", exchange="gtopk"),
    "2-bit": lambda: ThresholdCompressor(2, 0.05),
    "qsgd": QSGDCompressor,
    "4 bits": lambda: TwoPhaseCompressor(4),
    "ef21": lambda: EF21Compressor(top_k(vectors="sparse")),
    "powersgd": lambda: PowerSGDCompressor(2, min_compression_rate=0),
    "8 bits": TwoPhaseCompressor,
    "hadamard": lambda: TwoPhaseCompressor(4, 64, hadamard=True),
}


def method_between_machines(transport: Any) -> Finding:
    """Whether an error is kept. Gradients equal those of the method among two ranks, on the rows of this one."""
    found = {}
    for name, make in METHODS.items():
        model = sharded(transport)
        exchange = compress(model, make(), transport=transport)
        expected = Expected(make, transport.local_rank)
        for step in range(4):  # the residual of a step is in the next
            model.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the dropped step
                loss_of(model, gradient_batch(step, transport.rank)).backward()
            want = expected.step(step)
            for parameter, p in model.named_parameters():
                assert (p.grad is None) == (not want)
                if want and p.to_local().numel():
                    assert torch.equal(p.grad.to_local(), want[parameter]), (name, parameter)
        assert exchange.dropped_steps == 1, name
        found[name] = exchange.error_norm() > 0
        exchange.close()
    return found


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
        for machine in range(2):
            self.states[machine].add(self.buckets[machine], 2, machine)


class Expected:
    """The mean gradients of this rank's rows, from plain models of all four ranks and two simulated machines."""

    def __init__(self, make: Callable[[], Any], local_rank: int):
        self.local_rank, self.plain = local_rank, network()
        rows = self.rows({name: p.detach() for name, p in self.plain.named_parameters()})
        self.groups = [[n for n in rows if int(n[0]) in layers] for layers in ((0,), (2, 3), (4, 5))]
        self.fleets = [Machines(make, {name: rows[name] for name in group}) for group in self.groups]

    def rows(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's rows of each tensor, without those of which it has none."""
        parts = {name: tensor.chunk(2) for name, tensor in tensors.items()}
        return {name: part[self.local_rank] for name, part in parts.items() if self.local_rank < len(part)}

    def gradients(self, machine: int, step: int) -> dict[str, Tensor]:
        """The means of its two ranks."""
        self.plain.zero_grad()
        for rank in (2 * machine, 2 * machine + 1):
            (loss_of(self.plain, gradient_batch(step, rank)) / 2).backward()
        return self.rows({name: p.grad.clone() for name, p in self.plain.named_parameters() if p.grad is not None})

    def step(self, step: int) -> dict[str, Tensor]:
        """The means, or nothing if the step is dropped."""
        of_machines = [self.gradients(machine, step) for machine in range(2)]
        found: dict[str, Tensor] = {}
        for group, fleet in zip(self.groups, self.fleets, strict=True):
            mean, _ = fleet.step([[own[name] for name in group] for own in of_machines])
            found |= {n: s.of(mean) for n, s in zip(group, fleet.buckets[0].segments, strict=True)}
        return {} if any(fleet.nonfinite[0] for fleet in self.fleets) else found


# --- special steps --------------------------------------------------------------------------------


def nonfinite(transport: Any) -> Finding:
    """NaN in the last row of a gradient on the last rank, in the second of four steps.

    Half of the ranks have no part of this row.
    """
    found = Finding()
    for policy in ("skip", "raise", "scaler"):
        model = sharded(transport)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if policy == "scaler" else None
        kind = "raise" if policy == "raise" else "skip"
        exchange = compress(model, dgc(), transport=transport, nonfinite=kind, grad_scaler=scaler)
        optimizer = DGCSGD(model.parameters(), lr=0.05, momentum=0.9)
        factors, messages = torch.ones(5), []

        def spoil(module: Any, inputs: Any, output: Tensor, factors: Tensor = factors) -> None:
            output.register_hook(lambda gradient: gradient * factors)

        model[0].register_forward_hook(spoil)
        for step, batch in enumerate(batches(4, transport.rank)):
            factors[4] = float("nan") if (step, transport.rank) == (1, 3) else 1.0
            before = whole(model)
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                messages.append(told((scaler.scale(loss) if scaler else loss).backward, RuntimeError))
                if scaler:
                    scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
            messages += [str(w.message) for w in caught if "every rank drops" in str(w.message)]
            assert torch.equal(whole(model), before) == (step == 1)
            assert all((p.grad is None) == (step == 1 and scaler is None) for p in model.parameters())
        assert exchange.dropped_steps == 1 and 0 < exchange.error_norm() < 100, policy
        assert scaler is None or scaler.get_scale() == 2.0**9
        found[policy] = {"model": digest([whole(model)]), "messages": [m for m in messages if m]}
        exchange.close()
    return found


def unused_on_one_machine(transport: Any) -> Finding:
    """Only one machine uses a layer, in the first step too. All ranks have the same model nevertheless."""
    model = shard_repeated(mesh_of(transport))
    start = whole(model)
    exchange = compress(model, top_k(0.3), transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(batches(4, transport.rank)):
        # FSDP2 requires that the ranks of one machine use the same layers
        model.times = int(transport.rank // 2 == step % 2)
        train(model, optimizer, [batch])
        assert all(p.grad is not None for p in model.parameters())  # Muon gathers a matrix if it has one
    exchange.close()
    return {"model": digest([whole(model)]), "moved": float(((whole(model) - start) != 0).float().mean())}


# --- outer steps ----------------------------------------------------------------------------------


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def flat(model: nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def outer_steps(transport: Any, adam: Any = adam) -> Finding:
    """Machines are workers of DiLoCo. In the fourth of seven steps one shard of rank 3 has a gradient of NaN."""

    def method() -> OuterSteps:
        return OuterSteps(3, outer=Nesterov())

    def train_on(own: Any, model: Any, rows: Sequence[Tensor], bad: bool) -> None:
        for step, batch in enumerate(rows):
            own.zero_grad()
            loss_of(model, batch).backward()
            if bad and step == 3:
                gradient = model[0].weight.grad
                (gradient.to_local() if hasattr(gradient, "to_local") else gradient).fill_(float("nan"))
            own.step()

    def on_machine(machine: Any, steps: int = 7) -> Tensor:
        """A plain model with the batches of both ranks."""
        model, ranks = network(), (2 * machine.rank, 2 * machine.rank + 1)
        own = LocalOptimizer(adam(model), None, method(), transport=machine)
        both = [torch.cat(rows) for rows in zip(*(batches(7, rank) for rank in ranks), strict=True)]
        train_on(own, model, both[:steps], machine.rank == 1)
        return flat(model)

    inputs, machine = batches(7, transport.rank), transport.rank // 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = sharded(transport)
        own = ShardedLocalOptimizer(adam(model), model, method(), transport=transport)
        train_on(own, model, inputs, transport.rank == 3)
        on_machines = LockstepWorld(2).run(on_machine)
        replica = DistributedDataParallel(network(), process_group=mesh_of(transport).get_group())
        islands = HierarchicalGossip(method(), averages_gradients=False)
        replicas = LocalOptimizer(adam(replica), None, islands, transport=transport)
        train(replica, replicas, inputs[:3])
        replicas.synchronize_messages()
        before = LockstepWorld(2).run(lambda machine: on_machine(machine, 3))[machine]
    found: Finding = {
        "warned": [str(w.message) for w in caught if "this machine drops" in str(w.message)],
        "dropped": own.dropped_steps,
    }
    pairs = [(whole(model), on_machines[machine]), (flat(replica), before)]
    with torch.no_grad():
        outputs = [model(inputs[0])]  # after which FSDP2 keeps the outermost module's parameters
        with own.consensus():
            found["mean"] = digest([whole(model)])
            outputs.append(model(inputs[0]))
        outputs.append(model(inputs[0]))
        common = network()
        torch.nn.utils.vector_to_parameters((on_machines[0] + on_machines[1]) / 2, common.parameters())
        assert torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[0], outputs[1])
        pairs.append((outputs[1], common(inputs[0])))
        assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-6, pairs
    own.close()
    replicas.close()

    def build(nonfinite: str = "skip") -> tuple[Any, Any]:
        model, steps = sharded(transport), OuterSteps(2, compression=top_k())
        return model, ShardedLocalOptimizer(adam(model), model, steps, transport=transport, nonfinite=nonfinite)

    model, own = build()
    train(model, own, inputs[:3])
    state = deepcopy(own.compression_state_dict())
    train(model, own, inputs[3:6])
    found["sparse"] = digest([whole(model)])
    assert own.error_norm() > 0
    own.close()
    model, own = build()
    own.load_compression_state_dict(state)
    train(model, own, inputs[3:6])
    assert digest([whole(model)]) == found["sparse"]
    own.close()
    model, own = build("raise")
    loss_of(model, inputs[0]).backward()
    if transport.rank == 0:
        model[0].weight.grad.to_local().fill_(float("inf"))
    found["raised"] = told(own.step, RuntimeError)
    own.grad_scale = torch.ones(())
    assert "train in bf16, without a GradScaler" in told(own.step, ValueError)
    own.close()
    for algorithm, message in {
        HierarchicalGossip(SGP()): "HierarchicalGossip cannot exchange shards",
        ZeroOneSteps(1): "ZeroOneSteps cannot exchange shards",
        OuterSteps(2 + (transport.rank == 3)): "average_every is 2 on rank 0 and 3 on rank 3",
    }.items():
        make = partial(ShardedLocalOptimizer, adam(model), model, algorithm, transport=transport)
        assert message in told(make, ValueError)
    return found


def decayed(model: nn.Module) -> DGCSGD:
    return DGCSGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


GO_ON: dict[str, tuple[Any, Any]] = {"dgc": (partial(dgc, warmup_epochs=2), decayed), "muon": (top_k, with_muon)}


def saved_and_loaded(transport: Any, folder: Path, name: str) -> Finding:
    """A run that is continued from a checkpoint ends with the bits of the run that saved it."""
    inputs, (make_compressor, make_optimizer) = batches(8, transport.rank), GO_ON[name]

    def build() -> tuple[Any, Any, Any]:
        model = sharded(transport)
        exchange = compress(model, make_compressor(), transport=transport, steps_per_epoch=3)
        return model, make_optimizer(model), exchange

    model, optimizer, exchange = build()
    train(model, optimizer, inputs[:4])
    at_save, own = digest([whole(model)]), folder / f"exchange{transport.rank}.pt"
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "checkpoint")
    torch.save(exchange.compression_state_dict(), own)
    train(model, optimizer, inputs[4:])
    found = {"saved": digest([whole(model)]), "error": exchange.error_norm(), "at save": at_save}
    exchange.close()

    model, optimizer, exchange = build()
    weights, state = get_state_dict(model, optimizer)
    loaded: Any = {"model": weights, "optimizer": state}
    checkpoint.load(loaded, checkpoint_id=folder / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    exchange.load_compression_state_dict(torch.load(own))
    train(model, optimizer, inputs[4:])
    exchange.close()
    found |= {"loaded": digest([whole(model)]), "loaded error": exchange.error_norm()}

    whole_state, own_state = exchange.gather_state(), exchange.compression_state_dict()
    assert (whole_state is None) == (transport.rank > 0)
    again = build()[2]
    again.load_gathered(whole_state)
    assert_equal(again.compression_state_dict(), own_state)
    again.close()

    states = all_gather_object(transport, torch.load(own))
    found["whose"] = [told(partial(exchange.load_compression_state_dict, state), ValueError) for state in states]
    model, optimizer, exchange = build()
    if transport.rank < 2:  # only on the first machine
        exchange.load_compression_state_dict(torch.load(own))
    found["one machine"] = told(lambda: loss_of(model, inputs[4]).backward(), ValueError)
    exchange.close()
    return found


def bytes_between_machines(transport: Any) -> Finding:
    found = {}
    for name, compressor in {"dense": DenseCompressor(), "top-k": top_k(0.01)}.items():
        model: Any = nn.Linear(200, 51)
        fully_shard(model, mesh=mesh_of(transport))
        exchange = compress(model, compressor, transport=transport)
        for _ in range(2):
            model(torch.ones(2, 200)).square().mean().backward()
        numel = sum(p.to_local().numel() for p in model.parameters())
        found[name] = [exchange.meter.wire_bytes, exchange.meter.dense_wire_bytes, numel]
        exchange.close()
    return found


# --- refused --------------------------------------------------------------------------------------


def refused_models(transport: Any) -> None:
    """What `compress` refuses, and its message."""
    mesh, world = mesh_of(transport), init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("machine", "local"))
    used, in_use = sharded(transport), dgc()
    exchange = compress(used, in_use, transport=transport)

    def refused(message: str, model: Any = None, compressor: Any = None, **options: Any) -> None:
        model = sharded(transport) if model is None else model
        found = told(lambda: compress(model, compressor, **{"transport": transport, **options}), ValueError)
        assert message in found, (message, found)

    refused("over a mesh of 2 dimensions. On such a mesh (HSDP) FSDP2 averages over", shard(network(), square))
    refused("the model is sharded over ranks [0, 1, 2, 3], and this machine has ranks", shard(network(), world))
    refused("9 trainable parameters are not sharded, such as 0.weight", network())
    half = network()
    fully_shard(half[0], mesh=mesh)
    refused("7 trainable parameters are not sharded, such as 2.weight", half)
    groups, with_result = network(), ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh, 0))
    fully_shard(groups[0], mesh=world, shard_placement_fn=lambda p: with_result if p.ndim == 1 else None)
    refused("module 0 has 2 parameter groups (shard_placement_fn with several meshes)", groups)
    refused("are replicated: call fully_shard", replicate(network(), mesh=mesh))
    refused("the model has no trainable parameters", shard(network().requires_grad_(False), mesh))
    other = network()
    if transport.rank >= 2:
        other.append(nn.Linear(1, 1))  # of one row: the second rank of each machine has none of it
    refused("train different models or compress them differently: ", shard(other, mesh))
    refused("the model has a FSDPExchange already: close() it before another exchange", used)
    with_complex: Any = network()
    with_complex[0].weight = nn.Parameter(with_complex[0].weight.detach().to(torch.complex64))
    only = "is complex, which only DistributedOptimizer and dgc.ddp.compress exchange"
    refused(only, shard(with_complex, mesh))
    refused("nonfinite must be 'skip' or 'raise', not 'ignore'", nonfinite="ignore")
    refused("this DGCCompressor has the residual of another", compressor=in_use)
    differing = ThresholdCompressor(2, 0.5 + transport.rank)
    refused("compression.threshold is 0.5 on rank 0 and 1.5 on rank 1", compressor=differing)
    refused("it needs nonfinite='skip'", nonfinite="raise", grad_scaler=torch.amp.GradScaler("cpu"))
    refused("group 'cross' does not exist: use TorchTransport(hierarchical=True)", transport=connect())
    exchange.close()


def refused_steps(transport: Any) -> None:
    """What the first step refuses, and its message."""
    mesh, batch = mesh_of(transport), batches(1, transport.rank)[0]

    def refused(
        message: str,
        change: Callable[[Any], Any] = lambda model: None,
        before: Callable[[Any], Any] = lambda model: None,
        make: Callable[[], Any] = DenseCompressor,
        optimizer: Any = torch.optim.SGD,
    ) -> None:
        model = network()
        before(model)
        exchange = compress(shard(model, mesh), make(), transport=transport)
        change(model)

        def step() -> None:
            loss_of(model, batch).backward()
            optimizer(model.parameters(), lr=0.1).step()

        found = told(step, RuntimeError, ValueError)
        assert message in found, (message, found)
        exchange.close()

    def other_model(model: Any) -> None:
        if transport.rank >= 2:
            with torch.no_grad():
                model[4].bias.add_(1)

    def replace(model: nn.Module) -> None:
        model.load_state_dict(deepcopy(model.state_dict()), assign=True)

    def step_in_backward(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)

    sgd = partial(torch.optim.SGD, momentum=0.9)
    refused("SGD would apply it again: use dgc.optim.DGCSGD", make=dgc, optimizer=sgd)
    refused("Adam would apply it again", make=dgc, optimizer=torch.optim.Adam)
    refused("4.bias differs between machines 0 and 1 before the first step", before=other_model)
    refused("were replaced after dgc.fsdp.compress, for example by load_state_dict(assign=True)", replace)
    refused("an optimizer that steps during backward is not supported", step_in_backward)
    frozen = "4.weight of the model was frozen or unfrozen after dgc.fsdp.compress"
    refused(frozen, lambda model: model[4].requires_grad_(False))
    refused("mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)", before=lambda model: model.half())

    repeated = shard_repeated(mesh)
    exchange = compress(repeated, DenseCompressor(), transport=transport)
    loss_of(repeated, batch).backward()
    repeated.times = 3
    more = told(loss_of(repeated, batch).backward, RuntimeError)
    assert "module middle runs more often in this forward pass than in the first, 2 times" in more, more
    exchange.close()
