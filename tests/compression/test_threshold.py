"""Threshold quantization: MXNet's bytes and numbers, three wires with the same sums, thresholds from the data."""

from typing import Any

import pytest
import torch
from compression.ranks import Ranks, normal

import dgc.kernels as kernels
from dgc.compression import ThresholdCompressor
from dgc.wire.envelope import sealed_bytes

G = torch.tensor([0.75, 0.25, -0.625, 0.125, -0.5, 0.375])
R = torch.tensor([0.0, 0.125, -0.25, 0.375, 0.0, 0.0])


def test_the_worked_example_of_two_bits() -> None:
    ranks = Ranks(1, lambda: ThresholdCompressor(threshold=0.5), [(6,)])
    ranks.errors()[0].copy_(R)
    assert ranks.step([G]).tolist() == [0.5, 0.0, -0.5, 0.5, -0.5, 0.0]
    assert ranks.errors()[0].tolist() == [0.25, 0.375, -0.375, 0.0, 0.0, 0.375]
    following = torch.tensor([0.0, 0.125, -0.125, 0.0, 0.0, 0.5])
    assert ranks.step([following]).tolist() == [0.0, 0.5, -0.5, 0.0, 0.0, 0.5]
    assert ranks.errors()[0].tolist() == [0.25, 0.0, 0.0, 0.0, 0.0, 0.375]


def test_the_worked_example_of_one_bit() -> None:
    ranks = Ranks(1, lambda: ThresholdCompressor(bits=1, threshold=0.0), [(6,)])
    ranks.errors()[0].copy_(R)
    assert ranks.step([G]).tolist() == [1, 1, -1, 1, -1, 1]
    assert ranks.errors()[0].tolist() == [-0.25, -0.625, 0.125, -0.5, 0.5, -0.625]


def test_the_bytes_are_mxnets() -> None:
    bounds, v = torch.tensor([0, 6]), G + R
    quantizers = kernels.of(v).quantize
    codes, _ = quantizers.tern_encode(v, bounds, torch.tensor([0.5]))
    assert bytes(codes.tolist()).hex() == "cb800000"
    one = torch.ones(1)
    codes, _ = quantizers.sign_encode(v, bounds, torch.zeros(1), -one, one)
    assert bytes(codes.tolist()).hex() == "d4000000"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("settings", [{}, {"threshold": None}, {"bits": 1, "threshold": 0.0}], ids=str)
def test_every_wire_gives_the_same_bits(size: Any, settings: Any) -> None:
    shapes = [(7, 5), (33,), (1,), (0, 3)]
    n = 35 + 33 + 1
    fleets = [
        Ranks(size, lambda wire=wire: ThresholdCompressor(wire=wire, **settings), shapes)
        for wire in ("gather", "scatter", "server")
    ]
    for step in range(3):
        own = [normal(n, 10 * step + rank) for rank in range(size)]
        means = [fleet.step(own) for fleet in fleets]
        assert torch.equal(means[0], means[1]) and torch.equal(means[0], means[2])
    assert torch.equal(fleets[0].errors()[0], fleets[1].errors()[0])


@pytest.mark.parametrize(("size", "bits"), [(2, 3), (3, 3), (4, 4), (8, 5)])
def test_the_scattered_sums_take_as_few_bits_as_they_can(size: Any, bits: Any) -> None:
    """Bytes: the codes for each rank and the packed share, each sealed."""
    shape, n = (64, 64), 64 * 64
    ranks = Ranks(size, lambda: ThresholdCompressor(wire="scatter"), [shape])
    ranks.step([normal(n, rank) for rank in range(size)])
    codes = n // 4
    share = 4 * -(-codes // (4 * size))
    sums = -(-share * 4 * bits // 8)
    assert ranks.world.meters[0].payload_bytes == size * sealed_bytes(share) + sealed_bytes(sums)


@pytest.mark.usefixtures("no_type_checks")
def test_many_ranks_whose_sums_need_more_than_a_byte() -> None:
    ranks = Ranks(130, lambda: ThresholdCompressor(threshold=0.1), [(9,)])
    mean = ranks.step([torch.ones(9)] * 130)
    torch.testing.assert_close(mean, torch.full((9,), 0.1))


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e8])
def test_thresholds_from_the_data_follow_the_gradients_scale(factor: Any) -> None:
    small, large = (Ranks(3, lambda: ThresholdCompressor(threshold=None), [(300,)]) for _ in range(2))
    for step in range(3):
        own = [normal(300, 7 * step + rank) for rank in range(3)]
        expected = small.step(own) * factor
        torch.testing.assert_close(large.step([g * factor for g in own]), expected, rtol=1e-5, atol=1e-30)


@pytest.mark.usefixtures("no_type_checks")
def test_what_is_far_below_the_threshold_leaves_in_the_end() -> None:
    ranks = Ranks(1, lambda: ThresholdCompressor(threshold=0.5), [(4,)])
    sent = sum(ranks.step([torch.full((4,), 0.05)]) for _ in range(200))
    torch.testing.assert_close(sent + ranks.errors()[0], torch.full((4,), 10.0), rtol=1e-4, atol=0)


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
