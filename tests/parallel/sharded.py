"""Models that FSDP2 shards on real ranks, and how they are trained."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from parallel.found import digest, told
from parallel.ranks import each_rank_of, over, two_agents
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from dgc.compression import SparseCompressor, TwoPhaseCompressor
from dgc.fsdp import compress, local_mesh, quantize
from dgc.memory import ResidualMemory
from dgc.optim import MuonWithAdamW, muon_groups

FEATURES = 7
on_machines = each_rank_of(over(two_agents, 4), hierarchical=True)
MESHES: dict[str, DeviceMesh] = {}


def exchanged(bits: int) -> Callable[[Any], Any]:
    return lambda model: compress(model, TwoPhaseCompressor(bits))


# How a model is compressed: between its replicas, and inside them.
EXCHANGED: dict[str, Callable[[Any], Any]] = {f"{bits} bits": exchanged(bits) for bits in (16, 8, 4)}
QUANTIZED: dict[str, Callable[[Any], Any]] = {
    **{f"{bits} bits": partial(quantize, gradients=bits) for bits in (16, 8, 4)},
    "4 bits, weights in 4": partial(quantize, gradients=4, weights=4),
}


def kept(name: str, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    """A mesh that is made once: torch has meshes in its caches, so their groups must stay."""
    return MESHES[name] if name in MESHES else MESHES.setdefault(name, make())


def machine(transport: Any) -> Any:
    return kept("machine", lambda: local_mesh(transport))


def of_hsdp() -> DeviceMesh:
    shape = 2, dist.get_world_size() // 2
    return kept("hsdp", lambda: init_device_mesh("cpu", shape, mesh_dim_names=("machine", "local")))


def of_all() -> DeviceMesh:
    return kept("all", lambda: init_device_mesh("cpu", (dist.get_world_size(),)))


def network(seed: int = 0) -> nn.Sequential:
    """Sizes that two ranks do not divide evenly. The last layer has one row: one rank has none of it."""
    torch.manual_seed(seed)
    layers = [nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 6, bias=False), nn.LayerNorm(6)]
    return nn.Sequential(*layers, nn.Linear(6, 3), nn.Linear(3, 1))


def shard(model: nn.Sequential, mesh: Any, **options: Any) -> Any:
    """Layer 0 is a group, and layers 2 and 3 are one; the others are in the group of the whole model."""
    for layers in ([model[0]], [model[2], model[3]], model):
        fully_shard(layers, mesh=mesh, **options)
    return model


def replicated(name: str = "plain", seed: int = 0, **options: Any) -> Any:
    """The groups of `shard`, without shards."""
    mesh, model = kept("replicas", lambda: init_device_mesh("cpu", (dist.get_world_size(),))), network(seed)
    for module in (model[0], model[2], model[3], model):
        replicate(module, mesh=mesh, **options)
    if name == "sums":
        divide(model, 1.0)
    return model


class Repeated(nn.Module):
    """Its middle layer runs twice, so FSDP2 reduces the layer's gradient in two parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, 1)
        self.middle = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 5))  # one rank has no row of the first weight
        self.times = 2

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).tanh()
        for _ in range(self.times):
            x = self.middle(x).tanh()
        return self.last(x)


class Tied(nn.Module):
    """The last layer has the weight of the first one. The middle one is used by rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(FEATURES, 9), nn.Linear(9, 9), nn.Linear(FEATURES, 9)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).tanh()
        x = x if dist.get_rank() else self.middle(x)
        return x.mean(1, keepdim=True) + self.last(torch.ones(FEATURES)).mean()


POLICIES: dict[str, Any] = {
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16 reduce": {"reduce_dtype": torch.bfloat16},
    "fp16 parameters": {"reduce_dtype": torch.float32},
}


def build(mesh: DeviceMesh, name: str = "plain", seed: int = 0) -> Any:
    if name == "repeated":
        repeated: Any = Repeated()
        fully_shard(repeated.middle, mesh=mesh)
        return fully_shard(repeated, mesh=mesh)
    if name == "tied":
        tied = fully_shard(Tied(), mesh=mesh)
        tied.set_reduce_scatter_unused_params(True)  # else ranks would send FSDP2 different sizes
        return tied
    model, options = network(seed), dict[str, Any]()
    if name in POLICIES:
        options["mp_policy"] = MixedPrecisionPolicy(**POLICIES[name])
    if name == "columns":
        size = mesh.size(mesh.ndim - 1)
        options["shard_placement_fn"] = lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % size == 0 else None
    if name == "resharded" and mesh.size() % 2 == 0:
        options["reshard_after_forward"] = 2
    if name == "frozen":
        model[2].requires_grad_(False)
        model[4].bias.requires_grad_(False)
    if name == "fp16 parameters":
        model.half()
    if name == "checkpointed":
        model[0] = checkpoint_wrapper(model[0])
    sharded = shard(model, mesh, **options)
    if name == "divided":
        divide(sharded, 3.0)
    return sharded


def divide(model: Any, factor: float | None, sums: bool = True) -> None:
    """FSDP2 divides the sum of all gradients by a factor: after its hook (sums), or in its reduce-scatter."""
    for module in (model[0], model[2], model):
        if factor is not None:
            module.set_gradient_divide_factor(factor)
        if sums:
            module.set_force_sum_reduction_for_comms(True)


def batches(steps: int, rank: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
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


def accumulate(model: Any, optimizer: Any, inputs: Sequence[Tensor], switch: str = "") -> None:
    """Two backward passes per step. The switch is off in the first of them."""
    for first, second in zip(inputs[::2], inputs[1::2], strict=True):
        optimizer.zero_grad()
        for batch in (first, second):
            if switch:
                getattr(model, switch)(batch is second)
            loss_of(model, batch).backward()
        optimizer.step()


def check_near(model: Any, expected: Tensor, start: Tensor, bound: float = 2e-6) -> None:
    """The largest difference of any parameter, relative to the change."""
    difference = float((whole(model) - expected).norm() / (expected - start).norm())
    assert difference < bound, difference


def flat(model: nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def top_k(ratio: float = 0.2, **options: Any) -> SparseCompressor:
    return SparseCompressor(ratio, ResidualMemory(), **options)


def with_muon(model: nn.Module, precision: str = "fp32") -> MuonWithAdamW:
    groups = muon_groups(model, head=["4.*"], split={"0.weight": [2, 3]})
    return MuonWithAdamW(groups, lr=0.01, ns_precision=precision)


def on_gradient(layer: nn.Module, act: Callable[[Tensor], Tensor | None]) -> Any:
    """Call `act`, which may change it, on the gradient of the layer's output. Returns a handle."""

    def hook(module: Any, inputs: Any, output: Tensor) -> None:
        output.register_hook(act)

    return layer.register_forward_hook(hook)


def check_a_dropped_step(
    transport: Any, start: Callable[..., Any], reason: str, error_of: Callable[[Any], Any], unscales: bool
) -> dict[str, str]:
    """NaN in a row that half of the ranks lack of a gradient on the last rank, in the second of four steps.

    start: `start(nonfinite=.., grad_scaler=..)` returns a model, its exchange and an optimizer.
    error_of: The error of an exchange, which must not change then, or None.
    """
    models = {}
    for policy in ("skip", "raise", "scaler"):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if policy == "scaler" else None
        model, exchange, optimizer = start(nonfinite=policy.replace("scaler", "skip"), grad_scaler=scaler)
        factors, messages = torch.ones(5), list[str]()
        on_gradient(model[0], partial(torch.mul, factors))
        for step, batch in enumerate(batches(4, transport.rank)):
            dropped = step == 1
            factors[4] = float("nan") if dropped and transport.rank == transport.size - 1 else 1.0
            before, error = whole(model), error_of(exchange)
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                messages.append(told((scaler.scale(loss) if scaler else loss).backward, RuntimeError))
                if scaler:
                    if unscales:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
            messages += [str(w.message) for w in caught if "every rank drops" in str(w.message)]
            assert torch.equal(whole(model), before) == dropped, (policy, step)
            assert error is None or dropped == (error_of(exchange) == error), (policy, step)
            assert all((p.grad is None) == (dropped and scaler is None) for p in model.parameters())
        assert exchange.dropped_steps == 1 and (scaler is None or scaler.get_scale() == 2.0**9)
        messages = list(filter(None, messages))
        assert len(messages) == {"skip": transport.rank == 0, "raise": 1, "scaler": 0}[policy], messages
        assert policy != "raise" or reason in messages[0], messages
        models[policy] = digest([whole(model)])
        exchange.close()
    assert models["skip"] == models["raise"]
    return models
