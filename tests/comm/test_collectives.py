"""Blocking collectives, over threads of a lockstep world."""

from typing import Any

import pytest
import torch

from dgc.comm import all_gather_object, all_reduce, barrier, broadcast_object
from dgc.comm.lockstep import LockstepWorld

SIZES = [1, 2, 3]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["mean", "sum", "min", "max"])
def test_all_reduce(size: Any, op: Any) -> None:
    expected = {"mean": (size - 1) / 2, "sum": size * (size - 1) / 2, "min": 0.0, "max": size - 1.0}[op]

    def body(transport: Any) -> Any:
        own = torch.tensor([float(transport.rank)])
        return all_reduce(transport, own, op).item(), own.item()

    assert LockstepWorld(size).run(body) == [(expected, float(rank)) for rank in range(size)]


def test_all_reduce_keeps_shape_and_integers() -> None:
    def body(transport: Any) -> Any:
        return all_reduce(transport, torch.full((2, 3), transport.rank + 1), "sum", "counts")

    for total in LockstepWorld(3).run(body):
        assert total.dtype == torch.int64 and total.shape == (2, 3) and (total == 6).all()


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_object_of_uneven_sizes(size: Any) -> None:
    def body(transport: Any) -> Any:
        return all_gather_object(transport, {"rank": transport.rank, "data": "x" * 1000 * transport.rank})

    expected = [{"rank": rank, "data": "x" * 1000 * rank} for rank in range(size)]
    assert LockstepWorld(size).run(body) == [expected] * size


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_object(root: Any) -> None:
    def body(transport: Any) -> Any:
        obj = ["own", transport.rank, "y" * (50 + 500 * (transport.rank != root))]
        return broadcast_object(transport, obj, root)

    assert LockstepWorld(3).run(body) == [["own", root, "y" * 50]] * 3


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


def test_repeated_calls_under_one_name_do_not_mix() -> None:
    def body(transport: Any) -> Any:
        return [all_reduce(transport, torch.tensor([step]), "sum").item() for step in range(20)]

    assert LockstepWorld(2).run(body) == [[2 * step for step in range(20)]] * 2
