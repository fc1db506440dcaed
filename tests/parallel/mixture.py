"""A small mixture of experts on a mesh of 2 x 2, whose experts and other parameters are on different meshes.

Experts are divided over the second dimension of the mesh, as in torchtitan: rank (m, e) has half e of the experts.
All tokens of the ranks (m, :) go to all experts of these ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from parallel.sharded import FEATURES, kept
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd, reduce_scatter_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard, distribute_tensor

WIDTH, EXPERTS = 6, 4


class Experts(nn.Module):
    """Each token goes through one expert, on the rank of the group that has it."""

    def __init__(self, group: Any):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.factor = 1.0  # of its gradient

    def forward(self, x: Tensor, choice: Tensor) -> Any:
        weight: Any = self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight
        if weight.requires_grad and self.factor != 1:
            weight.register_hook(lambda gradient: gradient * self.factor)
        first = len(weight) * dist.get_rank(self.group)
        tokens = all_gather_single_autograd(x, 0, self.group)
        choices = torch.cat([choice] * self.group.size())
        dist.all_gather_single(choices, choice, group=self.group)
        parts = torch.stack([(choices == first + i).unsqueeze(1) * (tokens @ w) for i, w in enumerate(weight)])
        return reduce_scatter_single_autograd(parts.sum(0), "sum", 0, self.group)


class Mixture(nn.Module):
    """The last matrix is the first one."""

    def __init__(self, group: Any, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(FEATURES, WIDTH, bias=False), nn.Linear(FEATURES, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.block = Block(group)

    def forward(self, x: Tensor) -> Any:
        return (self.block(self.first(x).tanh()) @ self.last.weight).mean(1, keepdim=True)


class ExpertsAlone(nn.Module):
    def __init__(self, group: Any, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.block: Any = nn.Module()
        self.block.experts = Experts(group)

    def forward(self, x: Tensor) -> Any:
        choice = torch.arange(len(x)) % EXPERTS
        return self.block.experts(x[:, :WIDTH].contiguous(), choice).mean(1, keepdim=True)


class Block(nn.Module):
    """A router, experts, and a shared part that sees all tokens."""

    def __init__(self, group: Any):
        super().__init__()
        self.router, self.shared = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(group)

    def forward(self, x: Tensor) -> Any:
        best, choice = self.router(x).softmax(1).max(1)
        return x + best.unsqueeze(1) * self.experts(x, choice).tanh() + self.shared(x)


def meshes() -> DeviceMesh:
    """The second dimension has one rank: experts that are not sharded have it as their mesh's."""
    return kept("mixture", lambda: init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("machine", "one", "expert")))


def flat() -> DeviceMesh:
    return kept("mixture, flat", lambda: meshes()._flatten("all"))


def whole() -> DeviceMesh:
    ranks = [[rank] for rank in range(4)]
    return kept("mixture, whole", lambda: DeviceMesh("cpu", ranks, mesh_dim_names=("replica", "one")))


def mixture(kind: str, seed: int = 0, **options: Any) -> Any:
    """One call of fully_shard, with these options, for the block, with two meshes.

    kind: "sharded": over all four ranks, and experts over machines. "replicas": HSDP, and experts with a replica
    on each machine. "mixed": HSDP, and experts sharded over machines. "whole": four replicas, and experts with a
    replica on each machine. "alone": no other parameters than experts, sharded over machines.
    """
    mesh = meshes()
    model: Any = (ExpertsAlone if kind == "alone" else Mixture)(mesh.get_group("expert"), seed)
    experts = model.block.experts
    experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh["expert"], [Shard(0)]))
    if kind == "alone":
        return fully_shard(model, mesh=mesh["machine"], **options)
    of_experts: Any = FSDPMeshInfo(mesh["machine"], 0)
    if kind in ("replicas", "whole"):
        of_experts = HSDPMeshInfo(mesh["machine", "one"], 1, 0)
    others = {"sharded": flat, "whole": whole}.get(kind, lambda: mesh["machine", "expert"])()
    placed = ShardPlacementResult(Shard(1 if kind == "sharded" else 0), of_experts)
    by_shape = lambda p: placed if p.ndim == 3 else None  # noqa: E731
    fully_shard(model.block, mesh=others, shard_placement_fn=by_shape, **options)
    return fully_shard(model, mesh=others, **options)
