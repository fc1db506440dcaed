"""Residual redistributed to another number of ranks: the mean is unchanged, and no state is scaled up."""

from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from cases import case

from dgc.comm.lockstep import LockstepWorld
from dgc.compression import DGCCompressor, PowerSGDCompressor, ThresholdCompressor
from dgc.engine.redistribute import blend, merge, redistribute, select, share_of, shares
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer


def test_rows_sum_to_one_and_columns_to_new_over_old() -> None:
    for old, new in product(range(1, 9), repeat=2):
        rows = [shares(old, new, rank) for rank in range(new)]
        with case(old, new):
            assert all(sum(row.values()) == 1 for row in rows)
            for rank in range(old):
                assert sum(row.get(rank, Fraction(0)) for row in rows) == Fraction(new, old)
            assert all(len(row) <= -(-old // new) + 1 for row in rows)
            assert old != new or rows == [{rank: 1} for rank in range(new)]


METHODS: dict[str, Any] = {
    "dgc": lambda: DGCCompressor(0.05, DGCSGDMemory(0.9)),
    "dgc int8 vectors": lambda: DGCCompressor(0.05, DGCSGDMemory(0.9), dense_values="int8"),
    "powersgd": lambda: PowerSGDCompressor(2, high_rank=3),
    "2bit": lambda: ThresholdCompressor(threshold=0.1),
    "residual": lambda: DGCCompressor(0.05, ResidualMemory()),
}
# (ranks, ranks of each machine; None: all ranks alike)
FLAT_4, FLAT_3, TWO_BY_TWO, THREE_BY_TWO, TWO_BY_THREE = (4, None), (3, None), (4, 2), (6, 2), (6, 3)
Layout = tuple[int, int | None]


def run(transport: Any, method: str, two_levels: bool, states: Any, old: Any, steps: int, **settings: Any) -> Any:
    """The residual after some steps, which begin with this rank's share of the states of other ranks.

    old: the layout of those.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5))
    sgd = DGCSGD(model.parameters(), lr=0.05, momentum=0.0 if method == "residual" else 0.9)
    settings |= {"transport": transport, "hierarchical": "on" if two_levels else "off"}
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), METHODS[method](), **settings)
    optimizer.begin_epoch(0)
    if old is not None:
        machines = [rank // (old[1] or 1) for rank in range(old[0])]
        own = share_of(states.__getitem__, machines, transport.rank, transport.size, optimizer.part)
        optimizer.load_compression_state_dict(own)
    elif states is not None:
        optimizer.load_compression_state_dict(redistribute(states, transport.size)[transport.rank])
    generator = torch.Generator().manual_seed(transport.rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 12, generator=generator)).square().sum().backward()
        optimizer.step()
    return optimizer.compression_state_dict()


def world(
    layout: Layout, method: str, states: Any = None, old: Any = None, steps: int = 4, **settings: Any
) -> Any:
    size, local = layout
    return LockstepWorld(size, local).run(
        lambda t: run(t, method, local is not None, states, old, steps, **settings)
    )


def means(states: list[Any]) -> dict[str, torch.Tensor]:
    """The mean of each tensor over the ranks that have it."""
    tensors: dict[str, list[torch.Tensor]] = {}
    for state in states:
        for where, value in leaves({key: part for key, part in state.items() if key != "part"}).items():
            if isinstance(value, torch.Tensor):
                tensors.setdefault(where, []).append(value.double())
    return {where: torch.stack(parts).mean(0) for where, parts in tensors.items()}


def leaves(state: Any, where: str = "") -> Any:
    if isinstance(state, dict):
        return {name: leaf for key in state for name, leaf in leaves(state[key], f"{where}.{key}").items()}
    return {where: state}


@pytest.mark.parametrize("method", ["dgc", "residual"])
@pytest.mark.parametrize(("old", "new"), [(3, 2), (3, 4), (4, 1), (1, 4), (2, 5)])
def test_the_mean_over_ranks_is_preserved_to_rounding(method: str, old: int, new: int) -> None:
    before = world((old, None), method)
    after = world((new, None), method, before, steps=0)
    expected, found = means(before), means(after)
    assert len(expected) >= 2
    for name in leaves({key: part for key, part in before[0].items() if key != "identity"}):
        olds, news = ([leaves(state)[name] for state in states] for states in (before, after))
        if name in expected:
            scale = max(float(part.abs().max()) for part in olds)
            assert (expected[name] - found[name]).abs().max() <= 2**-23 * scale
            assert max(float(part.norm()) for part in news) <= max(float(part.norm()) for part in olds) + 1e-6
        else:
            assert set(olds) == set(news)
    world((new, None), method, before)


def test_a_blend_is_rounded_once_and_keeps_what_is_equal_on_all_ranks_bit_for_bit() -> None:
    states = {rank: {"v": torch.randn(1000, generator=torch.Generator().manual_seed(rank))} for rank in range(8)}
    expected: Any = sum(state["v"].double() for state in states.values()) / 8
    assert torch.equal(blend(states, shares(8, 1, 0))["v"], expected.float())
    q = torch.rand(50)
    equal = {rank: {"q": q.clone(), "steps": 3, "order": [1, torch.tensor([5])]} for rank in range(3)}
    mixed = blend(equal, shares(3, 2, 0))
    assert torch.equal(mixed["q"], q) and mixed["steps"] == 3 and mixed["order"][1].item() == 5


def test_values_that_cannot_be_summed_and_parts_that_contradict_are_reported() -> None:
    zeros = torch.zeros(2)
    ones = torch.ones(2).long()
    two: list[Any] = [(1, 2), (1, 1.0), ([1], [1, 2]), (zeros, torch.zeros(3)), (ones, 2 * ones)]
    for first, second in two:
        with pytest.raises(ValueError, match=r"^state\.a"):
            blend({0: {"a": first}, 1: {"a": second}}, shares(2, 1, 0))
    with pytest.raises(ValueError, match="^state"):
        blend({0: {"a": 1}, 1: {"b": 1}}, shares(2, 1, 0))
    assert merge([{"steps": 0, "v": {}}, {"steps": 3, "v": {"w": 1.5}}]) == {"steps": 3, "v": {"w": 1.5}}
    assert merge([{"kind": "a"}, {"kind": "a"}]) == {"kind": "a"}
    for first, second in (("a", "b"), (zeros, torch.ones(2)), (True, 1), (zeros, None)):
        with pytest.raises(ValueError, match=r"^state\.a differs between ranks of one machine"):
            merge([{"a": first}, {"a": second}])


@pytest.mark.parametrize("method", list(METHODS)[:4])
@pytest.mark.parametrize(
    ("old", "new"),
    [(TWO_BY_TWO, FLAT_4), (FLAT_4, TWO_BY_TWO), (FLAT_3, TWO_BY_THREE)]
    + [(TWO_BY_TWO, THREE_BY_TWO), (THREE_BY_TWO, TWO_BY_THREE), (TWO_BY_THREE, FLAT_3)],
)
def test_the_mean_is_preserved_between_machines_and_ranks(method: str, old: Any, new: Any) -> None:
    before = world(old, method)
    after = world(new, method, before, old, steps=0)
    expected, found = means(before), means(after)
    assert expected.keys() == found.keys() and len(expected) >= 4
    for where, mean in expected.items():
        assert (found[where] - mean).abs().max() <= 2**-22 * max(1.0, float(mean.abs().max())), where
    assert {value for state in after for where, value in leaves(state).items() if ".steps." in where} == {4}


def test_other_buckets_only_move_tensors_between_the_ranks_of_a_machine() -> None:
    before = world(TWO_BY_TWO, "dgc", bucket_mb=1e-4)
    after = world(TWO_BY_TWO, "dgc", before, TWO_BY_TWO, steps=0)
    assert [state["part"]["tensors"] for state in before] != [state["part"]["tensors"] for state in after]
    for machine in (0, 2):  # the mean is of one rank: the one that has the tensor
        expected, found = means(before[machine:][:2]), means(after[machine:][:2])
        assert len(expected) >= 4 and found.keys() == expected.keys()
        assert all(torch.equal(found[where], tensor) for where, tensor in expected.items())


def test_names_of_parameters_and_of_a_state_may_be_alike() -> None:
    part: Any = {"machine": 0, "machines": 1, "tensors": ["P"], "others": ["errors", "Q"]}
    state = {"P": {"P": 1, "Q": 2}, "errors": {"P": 3, "errors": 4}, "steps": 5}
    assert select(state, part) == {"P": {"P": 1}, "errors": {"P": 3}, "steps": 5}
