"""Where each parameter lies in the result of FSDP2's reduce-scatter, and machines with their ranks."""

from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from refusals import refuse
from torch.distributed.fsdp import fully_shard  # noqa: F401  (registers torch.ops.fsdp)

from dgc.comm.lockstep import LockstepTransport, LockstepWorld
from dgc.compression import DenseCompressor
from dgc.core.bucket import make_bucket
from dgc.engine.buckets import PlannedBucket
from dgc.fsdp import shards as mesh
from dgc.fsdp.exchange import GroupPlan, Replicas, check_equal_models
from dgc.fsdp.shards import ParameterGroup, lay_out

GROUPS: list[list[tuple[int, ...]]] = [
    [(7,)],
    [(1, 5)],
    [(3, 4), (3,)],
    [(5, 2, 3), (1,), (8, 2), (2,), (1, 1)],
    [(4, 3), (2, 2, 2)],
]


def reduced(tensors: list[torch.Tensor], ranks: int) -> torch.Tensor:
    """What each rank's reduce-scatter returns: [ranks, numel]. This is how FSDP2 prepares its input."""
    rows = [-(-t.shape[0] // ranks) * prod(t.shape[1:]) for t in tensors]
    output = torch.full((ranks, sum(rows)), float("nan"), dtype=torch.float32)
    torch.ops.fsdp.chunk_cat(tensors, dim=0, num_chunks=ranks, out=output)
    return output


def shard_of(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return (*tensor.chunk(ranks), *[tensor[:0]] * ranks)[rank]


def test_each_place_has_the_rows_of_its_rank() -> None:
    for shapes, ranks in product(GROUPS, [1, 2, 3, 5]):
        tensors = [torch.randn(shape) for shape in shapes]
        for rank, output in enumerate(reduced(tensors, ranks)):
            shards = [shard_of(t, rank, ranks) for t in tensors]
            places = lay_out([(t.shape, s.shape, 0) for t, s in zip(tensors, shards, strict=True)], ranks)
            assert sum(place.reserved for place in places) == output.numel()
            for place, shard in zip(places, shards, strict=True):
                assert torch.equal(place.rows_of(output), shard.flatten())
    # another dimension has no padding
    wide, long = lay_out([((3, 8, 5), (3, 2, 5), 1), ((6, 5), (2, 5), 0)], 4)
    assert (wide.start, wide.reserved, long.start, long.reserved) == (0, 30, 30, 10)


def plan_of(shapes: list[tuple[int, ...]], rank: int, ranks: int) -> GroupPlan:
    """One bucket of the parameters of which the rank has rows."""
    tensors = [(f"p{i}", shard_of(torch.zeros(shape), rank, ranks)) for i, shape in enumerate(shapes)]
    places = lay_out([(shape, t.shape, 0) for shape, (_, t) in zip(shapes, tensors, strict=True)], ranks)
    members = [(pair, place) for pair, place in zip(tensors, places, strict=True) if pair[1].numel()]
    bucket = make_bucket("b", [pair for pair, _ in members])
    planned = PlannedBucket(bucket, DenseCompressor(), tuple(t for (_, t), _ in members))
    group, replicas = object.__new__(ParameterGroup), object.__new__(Replicas)  # not used
    return GroupPlan(group, replicas, (), (planned,), (tuple(place for _, place in members),))


def test_gradients_of_several_backward_passes_add_up() -> None:
    shapes, ranks, rank = [(3, 4), (1, 5), (3,)], 2, 1
    plan = plan_of(shapes, rank, ranks)
    passes = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
    for tensors in passes[:2]:
        plan.add(reduced(tensors, ranks)[rank])
    bucket = plan.buckets[0].bucket
    assert [s.name for s in bucket.segments] == ["p0", "p2"], "it has no row of the second"
    for segment, i in zip(bucket.segments, (0, 2), strict=True):
        assert torch.equal(segment.of(bucket.flat), shard_of(passes[0][i] + passes[1][i], rank, ranks))
    plan.has_gradients = False  # as after an exchange
    plan.add(reduced(passes[2], ranks)[rank])
    assert torch.equal(bucket.segments[0].of(bucket.flat), shard_of(passes[2][0], rank, ranks))
    unused = plan_of([(3, 4)], 0, 2)
    flat = unused.buckets[0].bucket.flat.fill_(3.0)
    unused.fill()
    assert not flat.any()


def test_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LockstepWorld(6, local_size=3).run(mesh.machines) == [[[0, 1, 2], [3, 4, 5]]] * 6
    monkeypatch.setattr(mesh, "all_gather_object", lambda *_: [0, 1, 0, 1])  # as if ranks alternated
    assert LockstepWorld(4, local_size=2).run(mesh.machines) == [[[0, 2], [1, 3]]] * 4
    monkeypatch.setattr(LockstepTransport, "group_size", lambda own, group: 2 - (own.rank == 2))
    refuse("needs the same number of ranks on every machine, not 1 to 2", LockstepWorld(3).run, mesh.machines)


@pytest.mark.usefixtures("no_type_checks")
@on_ranks(2, 1)
def test_machines_with_elements_in_another_order_differ(transport: LockstepTransport) -> None:
    own = torch.arange(6, dtype=torch.bfloat16)
    p = SimpleNamespace(to_local=lambda: own.flip(0) if transport.rank else own)
    group = SimpleNamespace(names=("weight",))
    replicas = Replicas(transport, [[0, 1]], kind="machine")
    plan: Any = SimpleNamespace(group=group, named=[("weight", p)], replicas=replicas)
    words = "weight differs between machines 0 and 1 before the first step"
    refuse(words, check_equal_models, [plan], transport, "models")
