"""The facade with the original's keywords is the general compressor with the parts that they name."""

from itertools import product
from typing import Any

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
    half, int32, warmup = CastValues("fp16"), PlainIndices("int32"), {"warmup_epochs": 5, "warmup_coeff": 0.3}
    bounds = {"compress_upper_bound": 1.5, "compress_lower_bound": 0.7, "max_adaptation_iters": 5}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"selector": Predicted()}),
        ({"sample_ratio": 1}, {"selector": Exact()}),
        ({"sample_ratio": 0.01}, {"selector": Sampled(0.01)}),
        (
            {"sample_ratio": 0.01, "strided_sample": False, "resample": False, **bounds},
            {"selector": Sampled(0.01, False, 1.5, 0.7, 5, False)},
        ),
        ({"fp16_values": True}, {"values": half}),
        ({"int32_indices": True}, {"indices": int32}),
        ({"fp16_values": True, "int32_indices": True}, {"values": half, "indices": int32}),
        ({**warmup, "seed": 3}, {**warmup, "seed": 3}),
    ]
    for (keywords, parts), ratio in product(cases, (0.01, 100)):
        facade = DGCCompressor(ratio, DGCSGDMemory(0.9), **keywords)
        general = SparseCompressor(ratio, DGCSGDMemory(0.9), **parts)
        assert settings(facade) == settings(general), (keywords, ratio)


def test_a_part_given_as_such_takes_the_place_of_the_original_s_keyword() -> None:
    options: dict[str, Any] = {"values": Int8Values(), "indices": RiceIndices(), "selector": Exact()}
    for keyword, part, words in (
        ({"fp16_values": True}, "values", r"values=Int8Values\(.*\) is used; the original's keyword"),
        ({"int32_indices": True}, "indices", r"indices=RiceIndices\(\) is used"),
        ({"sample_ratio": 0.1}, "selector", "selector=Exact.* is used"),
    ):
        with pytest.warns(UserWarning, match=words):
            compressor = DGCCompressor(0.01, ResidualMemory(), **keyword, **{part: options[part]})
        used = {"selector": compressor.selector, **vars(compressor.format)}
        assert used[part] is options[part]
