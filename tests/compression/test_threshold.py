"""Threshold quantization: MXNet's bytes and numbers, three wires with the same sums, thresholds from the data."""

from typing import Any

import pytest
import torch
from compression.ranks import Ranks, normal

from dgc.compression import ThresholdCompressor
from dgc.wire.envelope import sealed_bytes

G = torch.tensor([0.75, 0.25, -0.625, 0.125, -0.5, 0.375])
R = torch.tensor([0.0, 0.125, -0.25, 0.375, 0.0, 0.0])
FOLLOWING = torch.tensor([0.0, 0.125, -0.125, 0.0, 0.0, 0.5])


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (
            {"threshold": 0.5},
            [
                (G, [0.5, 0.0, -0.5, 0.5, -0.5, 0.0], [0.25, 0.375, -0.375, 0.0, 0.0, 0.375]),
                (FOLLOWING, [0.0, 0.5, -0.5, 0.0, 0.0, 0.5], [0.25, 0.0, 0.0, 0.0, 0.0, 0.375]),
            ],
        ),
        (
            {"bits": 1, "threshold": 0.0},
            [(G, [1, 1, -1, 1, -1, 1], [-0.25, -0.625, 0.125, -0.5, 0.5, -0.625])],
        ),
    ],
)
def test_the_worked_examples(settings: Any, steps: Any) -> None:
    ranks = Ranks(1, lambda: ThresholdCompressor(**settings), [(6,)])
    ranks.errors()[0].copy_(R)
    for gradient, mean, error in steps:
        assert ranks.step([gradient]).tolist() == mean and ranks.errors()[0].tolist() == error


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("settings", [{}, {"threshold": None}, {"bits": 1, "threshold": 0.0}], ids=str)
def test_every_wire_gives_the_same_bits(size: Any, settings: Any) -> None:
    wires, shapes = ("gather", "scatter", "server"), [(7, 5), (33,), (1,), (0, 3)]
    fleets = [Ranks(size, lambda wire=wire: ThresholdCompressor(wire=wire, **settings), shapes) for wire in wires]
    for step in range(3):
        own = [normal(35 + 33 + 1, 10 * step + rank) for rank in range(size)]
        means = [fleet.step(own) for fleet in fleets]
        assert torch.equal(means[0], means[1]) and torch.equal(means[0], means[2])
    assert torch.equal(fleets[0].errors()[0], fleets[1].errors()[0])


def test_the_scattered_sums_take_as_few_bits_as_they_can() -> None:
    """Bytes: the codes for each rank and the packed share, each sealed."""
    codes = 64 * 64 // 4
    for size, bits in ((2, 3), (3, 3), (4, 4), (8, 5)):
        ranks = Ranks(size, lambda: ThresholdCompressor(wire="scatter"), [(64, 64)])
        ranks.step([normal(64 * 64, rank) for rank in range(size)])
        share = 4 * -(-codes // (4 * size))
        sums = -(-share * 4 * bits // 8)
        assert ranks.world.meters[0].payload_bytes == size * sealed_bytes(share) + sealed_bytes(sums), size


@pytest.mark.usefixtures("no_type_checks")
def test_many_ranks_whose_sums_need_more_than_a_byte() -> None:
    ranks = Ranks(130, lambda: ThresholdCompressor(threshold=0.1), [(9,)])
    mean = ranks.step([torch.ones(9)] * 130)
    torch.testing.assert_close(mean, torch.full((9,), 0.1))


def test_thresholds_from_the_data_follow_the_gradients_scale() -> None:
    factors = (1.0, 1e-6, 1e8)
    fleets = [Ranks(3, lambda: ThresholdCompressor(threshold=None), [(300,)]) for _ in factors]
    for step in range(3):
        own = [normal(300, 7 * step + rank) for rank in range(3)]
        first, *others = (fleet.step([g * x for g in own]) for fleet, x in zip(fleets, factors, strict=True))
        for factor, mean in zip(factors[1:], others, strict=True):
            torch.testing.assert_close(mean, first * factor, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bits": 3}, "bits must be 1 or 2"),
        ({"threshold": 0.0}, "threshold must be positive"),
        ({"threshold": -1.0}, "threshold must be positive"),
        ({"bits": 1, "threshold": None}, "threshold must be a number"),
        ({"factor": 0.0}, "factor"),
        ({"wire": "ring"}, "wire must be one of auto, gather, scatter, server"),
    ],
)
def test_bad_options(settings: Any, words: Any) -> None:
    with pytest.raises(ValueError, match=words):
        ThresholdCompressor(**settings)
