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


def test_the_ratio_of_each_epoch() -> None:
    published = ratios(compress_ratio=0.001, warmup_epochs=5)
    assert [float(f"{r:.2g}") for r in published] == [0.25, 0.063, 0.016, 0.004, 0.001, 0.001, 0.001]
    assert published[4:] == pytest.approx([0.001] * 3, rel=1e-12)
    assert published == ratios(compress_ratio=1000, warmup_epochs=5)
    assert ratios(compress_ratio=0.01) == ratios(compress_ratio=0.01, warmup_epochs=0) == [0.01] * 7
    # a number is a base that stops at the ratio, a list is taken as it is
    powers = ratios(compress_ratio=0.001, warmup_epochs=5, warmup_coeff=0.25)
    assert powers == pytest.approx([0.25, 0.0625, 0.015625, 0.00390625, 0.001, 0.001, 0.001])
    for kind in (list, tuple):
        seen = ratios(compress_ratio=0.1, warmup_epochs=3, warmup_coeff=kind([1.0, 0.5, 0.3]))
        assert seen == [1.0, 0.5, 0.3, 0.1, 0.1, 0.1, 0.1]


def test_the_first_epochs_ratio_holds_before_any_begins() -> None:
    compressor = DGCCompressor(0.001, NoMemory(), warmup_epochs=5)
    assert compressor.compress_ratio == pytest.approx(0.001**0.2)
    compressor.warmup_compress_ratio(1)  # the original's name
    assert compressor.compress_ratio == pytest.approx(0.001**0.4)


def test_epochs_may_go_back() -> None:
    """A resumed run begins somewhere; nothing is remembered from the last call."""
    warmup = RatioWarmup(0.001, 5)
    assert [warmup.at(e) for e in (9, 0, 3)] == pytest.approx([0.001, 0.001**0.2, 0.001**0.8])


def test_bad_coefficients() -> None:
    for coefficient in (0.0, -0.1, 1.5, [0.5, 2.0], [0.5, 0.0]):
        with pytest.raises(ValueError, match="warmup_coeff"):
            DGCCompressor(0.1, NoMemory(), warmup_epochs=2, warmup_coeff=coefficient)
    with pytest.raises(ValueError, match="lists 2 ratios for 3 warmup_epochs"):
        DGCCompressor(0.1, NoMemory(), warmup_epochs=3, warmup_coeff=[0.5, 0.2])
