"""The ratio's warm-up, epoch by epoch."""

from typing import Any

import pytest

from dgc.compression import DGCCompressor
from dgc.compression.sparse import RatioWarmup
from dgc.memory import NoMemory


def ratios(epochs: int = 7, **options: Any) -> Any:
    compressor = DGCCompressor(memory=NoMemory(), **options)
    seen = []
    for epoch in range(epochs):
        compressor.begin_epoch(epoch)
        seen.append(compressor.compress_ratio)
    return seen


def test_the_published_table() -> None:
    seen = ratios(compress_ratio=0.001, warmup_epochs=5)
    assert [float(f"{r:.2g}") for r in seen] == [0.25, 0.063, 0.016, 0.004, 0.001, 0.001, 0.001]
    assert seen[4:] == pytest.approx([0.001] * 3, rel=1e-12)


def test_without_warmup() -> None:
    assert ratios(compress_ratio=0.01) == ratios(compress_ratio=0.01, warmup_epochs=0) == [0.01] * 7


def test_a_number_is_a_base_that_stops_at_the_ratio() -> None:
    seen = ratios(compress_ratio=0.001, warmup_epochs=5, warmup_coeff=0.25)
    assert seen == pytest.approx([0.25, 0.0625, 0.015625, 0.00390625, 0.001, 0.001, 0.001])


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_is_taken_as_it_is(kind: Any) -> None:
    coefficients = kind([1.0, 0.5, 0.3])
    seen = ratios(compress_ratio=0.1, warmup_epochs=3, warmup_coeff=coefficients)
    assert seen == [1.0, 0.5, 0.3, 0.1, 0.1, 0.1, 0.1]


def test_the_first_epochs_ratio_holds_before_any_begins() -> None:
    assert DGCCompressor(0.001, NoMemory(), warmup_epochs=5).compress_ratio == pytest.approx(0.001**0.2)


def test_the_originals_name() -> None:
    compressor = DGCCompressor(0.001, NoMemory(), warmup_epochs=5)
    compressor.warmup_compress_ratio(1)
    assert compressor.compress_ratio == pytest.approx(0.001**0.4)


def test_epochs_may_go_back() -> None:
    """A resumed run begins somewhere; nothing is remembered from the last call."""
    warmup = RatioWarmup(0.001, 5)
    assert [warmup.at(e) for e in (9, 0, 3)] == pytest.approx([0.001, 0.001**0.2, 0.001**0.8])


def test_a_factor_warms_up_like_its_fraction() -> None:
    assert ratios(compress_ratio=1000, warmup_epochs=5) == ratios(compress_ratio=0.001, warmup_epochs=5)


@pytest.mark.parametrize("coefficient", [0.0, -0.1, 1.5, [0.5, 2.0], [0.5, 0.0]])
def test_bad_coefficients(coefficient: Any) -> None:
    with pytest.raises(ValueError, match="warmup_coeff"):
        DGCCompressor(0.1, NoMemory(), warmup_epochs=2, warmup_coeff=coefficient)


def test_a_list_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="lists 2 ratios for 3 warmup_epochs"):
        DGCCompressor(0.1, NoMemory(), warmup_epochs=3, warmup_coeff=[0.5, 0.2])
