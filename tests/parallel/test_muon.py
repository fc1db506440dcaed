"""Muon by owners on ranks that shard a model, and on ranks that have whole ones."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from parallel import sharded
from parallel.found import digest
from parallel.ranks import each_rank_of, mpirun, over, torchrun
from parallel.sharded import batches, kept, loss_of, network, on_machines, shard, train, whole
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dgc.compression import TwoPhaseCompressor
from dgc.ddp import compress
from dgc.optim import DistributedOptimizer, MuonWithAdamW, muon_groups

FLAT, HSDP = sharded.of_all, sharded.of_hsdp
on_ranks = each_rank_of(over(torchrun, 3), over(mpirun, 3))


class Experts(nn.Module):
    """Five experts, which neither four ranks nor two divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(sharded.FEATURES, 6)
        self.experts = nn.Parameter(torch.randn(5, 4, 6))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.einsum("erc,bc->ber", self.experts, self.first(x).tanh()).tanh().mean(1))


def of_stacks(placement: Shard, p: nn.Parameter) -> Shard | None:
    return placement if p.ndim == 3 else None


def muon(model: nn.Module, **options: Any) -> MuonWithAdamW:
    is_experts = any(isinstance(module, Experts) for module in model.modules())
    groups = muon_groups(model, head=["last.*" if is_experts else "4.*"], show=False)
    return MuonWithAdamW(groups, lr=0.01, **{"ns_precision": "fp32", **options})


def moved(values: Tensor, start: Tensor, expected: Tensor) -> float:
    """The difference to what is expected, relative to the change."""
    return float((values - expected).norm() / (expected - start).norm())


# mesh, how it is sharded, options
SHARDS: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("rows", FLAT, "plain", {}),
    ("rows in bf16", FLAT, "plain", {"ns_precision": "bf16"}),
    ("rows in 16 bits", FLAT, "plain", {"update_bits": 16}),
    ("replicas", HSDP, "plain", {}),
    ("all of HSDP", HSDP, "plain", {"owners": "on"}),
    ("columns", HSDP, "columns", {"owners": "on"}),
    ("every rank", HSDP, "plain", {"owners": "off"}),
    ("experts", FLAT, Shard(0), {}),
    ("experts of HSDP", HSDP, Shard(0), {"owners": "on"}),
    ("rows of experts", HSDP, Shard(1), {"owners": "on"}),
    ("gathered experts", HSDP, Shard(1), {"owners": "off"}),
]


@on_machines
def test_shards_are_trained_as_whole_matrices(transport: Any) -> str:
    """The model is the one that DDP trains on the same batches, and has the same bits on all ranks."""
    inputs, found = batches(3, transport.rank), list[Tensor]()
    for name, mesh, how, options in SHARDS:
        make: Any = network if isinstance(how, str) else Experts
        replica = DistributedDataParallel(make())
        if isinstance(how, str):
            model: Any = sharded.build(mesh(), how)
        else:
            model = fully_shard(make(), mesh=mesh(), shard_placement_fn=partial(of_stacks, how))
        start = whole(model)
        precision = options.get("ns_precision", "fp32")
        train(replica, muon(replica, ns_precision=precision), inputs)
        optimizer = muon(model, **options)
        train(model, optimizer, inputs)
        found.append(whole(model))
        bound = 1e-5 if precision == "fp32" and "update_bits" not in options else 2e-2
        assert moved(found[-1], start, sharded.flat(replica)) < bound, name
        states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
        assert all(hasattr(state, "to_local") for state in states), name
    return digest(found)


@pytest.mark.parametrize("owners", ["auto", "on"])
@each_rank_of(over(torchrun, 1))
def test_a_shard_that_is_whole_has_the_bits_of_torchs_muon(transport: Any, owners: str) -> None:
    model: Any = shard(network(), FLAT())
    other: Any = network()
    own = muon(model, ns_precision="bf16", owners=owners)
    matrices, rest = [other[0].weight, other[2].weight], [*other[3].parameters(), *other[4].parameters()]
    rest += [other[0].bias, *other[5].parameters()]
    adamw = torch.optim.AdamW(rest, 0.01, (0.9, 0.95), weight_decay=0.1)
    both = torch.optim.Muon(matrices, 0.02, adjust_lr_fn="match_rms_adamw"), adamw
    train(model, own, batches(3, 0))
    for batch in batches(3, 0):
        other.zero_grad()
        loss_of(other, batch).backward()
        for optimizer in both:
            optimizer.step()
    assert torch.equal(whole(model), sharded.flat(other))


def replicated(model: Any) -> Any:
    return replicate(model, mesh=FLAT())


def beside_tensor_parallelism(model: Any) -> Any:
    """The first dimension of the mesh has FSDP2, and the second one the rows or columns of some layers."""
    mesh = kept("tensors", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")))
    layers = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return fully_shard(parallelize_module(model, mesh["tensor"], layers), mesh=mesh["data"])


class Even(nn.Sequential):
    """A network that tensor parallelism divides evenly."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            *(nn.Linear(sharded.FEATURES, 4), nn.Tanh(), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 1))
        )


# what wraps the model, the ranks that have one batch, the owners
WRAPPED: list[tuple[Any, int, str]] = [
    (replicated, 1, "auto"),
    (replicated, 1, "on"),
    *((beside_tensor_parallelism, 2, owners) for owners in ("auto", "on", "off")),
]


@on_machines
def test_other_parameters_on_a_mesh(transport: Any) -> str:
    found = list[Tensor]()
    for wrap, ranks, owners in WRAPPED:
        inputs, replica = batches(3, transport.rank // ranks), DistributedDataParallel(Even())
        model = wrap(Even())
        start = whole(model)
        train(replica, muon(replica), inputs)
        train(model, muon(model, owners=owners), inputs)
        found.append(whole(model))
        assert moved(found[-1], start, sharded.flat(replica)) < 1e-4, (wrap, owners)
    return digest(found)


@on_machines
def test_a_state_of_shards_goes_on_on_another_mesh(transport: Any, tmp_path: Path) -> str:
    inputs = batches(6, transport.rank)
    model = shard(network(), HSDP())
    start, optimizer = whole(model), muon(model, owners="on")
    train(model, optimizer, inputs[:3])
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    train(model, optimizer, inputs[3:])

    other = shard(network(), FLAT())
    resumed = muon(other)
    weights, state = get_state_dict(other, resumed)
    loaded: Any = {"model": weights, "optimizer": state}
    checkpoint.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(other, resumed, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(other, resumed, inputs[3:])
    assert moved(whole(other), start, whole(model)) < 1e-5
    return digest([whole(other)])


@pytest.mark.parametrize("compressed", [False, True], ids=["dense", "4 bits"])
@each_rank_of(over(torchrun, 3))
def test_ddp(transport: Any, compressed: bool) -> str:
    """Near what every rank alone makes of it. With 4 bits the second step is dropped on all ranks."""
    models = []
    for owners in ("off", "on"):
        model = DistributedDataParallel(network())
        optimizer = muon(model, owners=owners)
        if compressed:
            exchange = compress(model, TwoPhaseCompressor(4), optimizer)
        for step, batch in enumerate(batches(4, transport.rank)):
            optimizer.zero_grad()
            before = sharded.flat(model).clone()
            dropped = compressed and step == 1
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "the gradient of .* every rank drops this step")
                (loss_of(model, batch) * (torch.nan if dropped and transport.rank == 0 else 1)).backward()
            optimizer.step()
            assert torch.equal(before, sharded.flat(model)) == dropped
        if compressed:
            assert exchange.dropped_steps == 1
        models.append(sharded.flat(model).clone())
    assert moved(models[1], sharded.flat(network()), models[0]) < 1e-5
    return digest(models)


@on_ranks
def test_distributed_optimizer(transport: Any) -> str:
    models = []
    for owners in ("off", "on"):
        model = network()
        optimizer = DistributedOptimizer(
            muon(model, owners=owners), model.named_parameters(), TwoPhaseCompressor(8), transport=transport
        )
        train(model, optimizer, batches(4, transport.rank))
        optimizer.close()
        models.append(sharded.flat(model).clone())
    assert moved(models[1], sharded.flat(network()), models[0]) < 1e-5
    return digest(models)
