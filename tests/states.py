"""States of ranks: with identities, on another number of ranks, and compared."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dgc.engine.state import KEY, Identity, identified
from dgc.optim import redistribute


def of_rank(state: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """The state of a compressor as a checkpoint of this rank has it."""
    return identified(state, Identity(rank, size, step=0))


def redistributed(states: Sequence[Mapping[str, Any]], size: int) -> list[dict[str, Any]]:
    """The states of a compressor on the ranks of one run, for another number of ranks."""
    mixed = redistribute([of_rank(state, rank, len(states)) for rank, state in enumerate(states)], size)
    return [{key: value for key, value in state.items() if key != KEY} for state in mixed]


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    """Compares nested states bit for bit."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            if key not in ("seconds", "training_seconds"):
                assert_equal(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}/{i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where
