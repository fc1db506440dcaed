"""Threshold quantization: MXNet's bytes and numbers, three wires with the same sums, thresholds from the data."""

from functools import partial
from typing import Any

import pytest
import torch
from compression.ranks import Ranks, normal
from refusals import check_refusals

from dgc.compression import ThresholdCompressor
from dgc.wire.envelope import sealed_bytes


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


@pytest.mark.usefixtures("no_type_checks")
def test_the_scattered_sums_take_as_few_bits_as_they_can() -> None:
    """Codes for each rank and the packed share, each sealed. Sums of many ranks need more than a byte."""
    codes = 64 * 64 // 4
    for size, bits in ((2, 3), (3, 3), (4, 4), (8, 5)):
        ranks = Ranks(size, lambda: ThresholdCompressor(wire="scatter"), [(64, 64)])
        ranks.step([normal(64 * 64, rank) for rank in range(size)])
        share = 4 * -(-codes // (4 * size))
        sums = -(-share * 4 * bits // 8)
        assert ranks.world.meters[0].payload_bytes == size * sealed_bytes(share) + sealed_bytes(sums), size
    mean = Ranks(130, lambda: ThresholdCompressor(threshold=0.1), [(9,)]).step([torch.ones(9)] * 130)
    torch.testing.assert_close(mean, torch.full((9,), 0.1))


def test_thresholds_from_the_data_follow_the_gradients_scale() -> None:
    factors = (1.0, 1e-6, 1e8)
    fleets = [Ranks(3, lambda: ThresholdCompressor(threshold=None), [(300,)]) for _ in factors]
    for step in range(3):
        own = [normal(300, 7 * step + rank) for rank in range(3)]
        first, *others = (fleet.step([g * x for g in own]) for fleet, x in zip(fleets, factors, strict=True))
        for factor, mean in zip(factors[1:], others, strict=True):
            torch.testing.assert_close(mean, first * factor, rtol=1e-5, atol=1e-30)


def test_bad_options() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"bits": 3}, "bits must be 1 or 2"),
        ({"threshold": 0.0}, "threshold must be positive"),
        ({"threshold": -1.0}, "threshold must be positive"),
        ({"bits": 1, "threshold": None}, "threshold must be a number"),
        ({"factor": 0.0}, "factor"),
        ({"wire": "ring"}, "wire must be one of auto, gather, scatter, server"),
    ]
    check_refusals(*((partial(ThresholdCompressor, **settings), words) for settings, words in rows))
