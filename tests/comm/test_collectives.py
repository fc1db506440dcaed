"""Blocking collectives, over threads of a lockstep world."""

from typing import Any

import torch

from dgc.comm import all_gather_object, all_reduce, barrier, broadcast_object
from dgc.comm.lockstep import LockstepWorld

OPS: Any = ("mean", "sum", "min", "max")


def test_all_reduce_leaves_the_tensor_of_each_rank() -> None:
    def body(transport: Any) -> Any:
        own = torch.tensor([float(transport.rank)])
        return [all_reduce(transport, own, op).item() for op in OPS], own.item()

    for size in (1, 2, 3):
        expected = [(size - 1) / 2, size * (size - 1) / 2, 0.0, size - 1.0]
        assert LockstepWorld(size).run(body) == [(expected, float(rank)) for rank in range(size)]


def test_all_reduce_keeps_shape_and_integers() -> None:
    def body(transport: Any) -> Any:
        return all_reduce(transport, torch.full((2, 3), transport.rank + 1), "sum", "counts")

    for total in LockstepWorld(3).run(body):
        assert total.dtype == torch.int64 and total.shape == (2, 3) and (total == 6).all()


def test_objects_of_uneven_sizes() -> None:
    def of(rank: Any) -> Any:
        return {"rank": rank, "data": "x" * 1000 * rank}

    def body(transport: Any) -> Any:
        own, last = of(transport.rank), transport.size - 1
        return all_gather_object(transport, own), [broadcast_object(transport, own, root) for root in (0, last)]

    for size in (1, 2, 3):
        assert LockstepWorld(size).run(body) == [([*map(of, range(size))], [of(0), of(size - 1)])] * size


def test_objects_with_tensors_and_none() -> None:
    def body(transport: Any) -> Any:
        first = broadcast_object(transport, torch.arange(3) if transport.rank == 0 else None)
        return first.tolist(), all_gather_object(transport, None)

    assert LockstepWorld(2).run(body) == [([0, 1, 2], [None, None])] * 2


def test_barrier_waits_for_all() -> None:
    arrived = []

    def body(transport: Any) -> Any:
        arrived.append(transport.rank)
        barrier(transport)
        return len(arrived)

    assert LockstepWorld(3).run(body) == [3, 3, 3]
