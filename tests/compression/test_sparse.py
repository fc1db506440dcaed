"""The facade with the original's keywords is the general compressor with the parts that they name."""

import pytest

from dgc.compression import DGCCompressor, SparseCompressor
from dgc.engine.agreement import describe
from dgc.memory import DGCSGDMemory, ResidualMemory
from dgc.selection import Exact, Predicted, Sampled
from dgc.wire import CastValues, Int8Values, PlainIndices, RiceIndices


def settings(compressor: SparseCompressor) -> dict[str, str]:
    found = describe(compressor=compressor)
    assert found.pop("compressor").endswith((".DGCCompressor", ".SparseCompressor"))
    return found


def test_each_keyword_of_the_original_names_a_part() -> None:
    half, int32 = CastValues("fp16"), PlainIndices("int32")
    sampled = Sampled(0.01, False, 1.5, 0.7, 5, False)
    cases = [
        ({}, {"selector": Predicted()}),
        ({"sample_ratio": 1}, {"selector": Exact()}),
        ({"sample_ratio": 0.01}, {"selector": Sampled(0.01)}),
        (
            {
                "sample_ratio": 0.01,
                "strided_sample": False,
                "compress_upper_bound": 1.5,
                "compress_lower_bound": 0.7,
                "max_adaptation_iters": 5,
                "resample": False,
            },
            {"selector": sampled},
        ),
        ({"fp16_values": True}, {"values": half}),
        ({"int32_indices": True}, {"indices": int32}),
        ({"fp16_values": True, "int32_indices": True}, {"values": half, "indices": int32}),
        ({"warmup_epochs": 5, "warmup_coeff": 0.3, "seed": 3},) * 2,
    ]
    for keywords, parts in cases:
        for ratio in (0.01, 100):
            facade = DGCCompressor(ratio, DGCSGDMemory(0.9), **keywords)  # type: ignore[arg-type]
            general = SparseCompressor(ratio, DGCSGDMemory(0.9), **parts)  # type: ignore[arg-type]
            assert settings(facade) == settings(general), (keywords, ratio)


def test_a_part_given_as_such_takes_the_place_of_the_original_s_keyword() -> None:
    with pytest.warns(UserWarning, match=r"values=Int8Values\(.*\) is used; the original's keyword"):
        compressor = DGCCompressor(0.01, ResidualMemory(), fp16_values=True, values=Int8Values())
    assert isinstance(compressor.format.values, Int8Values)
    with pytest.warns(UserWarning, match=r"indices=RiceIndices\(\) is used"):
        compressor = DGCCompressor(0.01, ResidualMemory(), int32_indices=True, indices=RiceIndices())
    assert isinstance(compressor.format.indices, RiceIndices)
    with pytest.warns(UserWarning, match="selector=Exact.* is used"):
        compressor = DGCCompressor(0.01, ResidualMemory(), sample_ratio=0.1, selector=Exact())
    assert isinstance(compressor.selector, Exact)
