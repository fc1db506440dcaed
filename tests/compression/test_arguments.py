"""Arguments of DGCCompressor: what they stand for, the warm-up of the ratio, and which are wrong."""

from itertools import product
from typing import Any

import pytest

from dgc.compression import DGCCompressor, SparseCompressor
from dgc.compression.sparse import INDICES, MEMORIES, SELECTORS, VALUES, RatioWarmup
from dgc.engine.agreement import describe
from dgc.memory import DGCSGDMemory, NoMemory, ResidualMemory
from dgc.selection import Exact, Predicted, Sampled
from dgc.wire import CastValues, Int8Values, PlainIndices, RiceIndices, SignValues

pytestmark = pytest.mark.usefixtures("no_type_checks")


def test_a_name_stands_for_the_object_with_its_defaults() -> None:
    """What is not sent is lost only where asked for."""
    assert isinstance(DGCCompressor(0.001, NoMemory()).memory, NoMemory)
    assert isinstance(DGCCompressor(0.001).memory, DGCSGDMemory)
    parts: dict[str, Any] = {"memory": MEMORIES, "selector": SELECTORS, "values": VALUES, "indices": INDICES}
    for argument, choices in parts.items():
        for name, make in choices.items():
            options: Any = {"compress_ratio": 0.01, "memory": "residual", argument: name}
            given, built = SparseCompressor(**options), SparseCompressor(**{**options, argument: make()})
            assert describe(made=given) == describe(made=built), (argument, name)
    assert {type(make()).__name__.lower(): make for make in SELECTORS.values()} == SELECTORS
    named = DGCCompressor(0.001, values="sign", indices="rice")
    assert isinstance(named.format.values, SignValues) and isinstance(named.format.indices, RiceIndices)


WRONG: dict[str, list[Any]] = {
    "memory": [None, DGCSGDMemory, "nothing"],
    "compress_ratio": ["0.1", None, True, 0, -0.1, float("nan"), float("inf")],
    "sample_ratio": ["0.1", True],
    "strided_sample": [1, "yes"],
    "compress_upper_bound": ["1.3", None],
    "compress_lower_bound": [[0.8]],
    "max_adaptation_iters": [2.5, "10"],
    "resample": [None],
    "fp16_values": ["fp16"],
    "int32_indices": [32],
    "warmup_epochs": ["five", 2.5, True, None],
    "warmup_coeff": ["0.25", [0.5, "0.1"], True, 0.0, -0.1, 1.5, [0.5, 2.0], [0.5, 0.0]],
    "seed": [None, 1.5],
    "selector": ["exactly", Exact],
    "values": ["fp17", CastValues],
    "indices": ["int31", PlainIndices],
}


def test_wrong_arguments_are_named() -> None:
    given: Any = {"compress_ratio": 0.1, "memory": ResidualMemory(), "warmup_epochs": 2}
    for name, values in WRONG.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name} must .*not ") as error:
                DGCCompressor(**{**given, name: value})
            assert repr(value) in str(error.value)
    with pytest.raises(ValueError, match="lists 2 ratios for 3 warmup_epochs"):
        DGCCompressor(0.1, NoMemory(), warmup_epochs=3, warmup_coeff=[0.5, 0.2])
    with pytest.raises(ValueError, match=r"named_parameters\(\)"):
        DGCCompressor(0.1, ResidualMemory()).initialize(["weight", "bias"])  # type: ignore[list-item]


def test_each_keyword_of_the_original_names_a_part() -> None:
    half, int32, warmup = CastValues("fp16"), PlainIndices("int32"), {"warmup_epochs": 5, "warmup_coeff": 0.3}
    bounds = {"compress_upper_bound": 1.5, "compress_lower_bound": 0.7, "max_adaptation_iters": 5}
    every = {"sample_ratio": 0.01, "strided_sample": False, "resample": False, **bounds}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"selector": Predicted()}),
        ({"sample_ratio": 1}, {"selector": Exact()}),
        ({"sample_ratio": 0.01}, {"selector": Sampled(0.01)}),
        (every, {"selector": Sampled(0.01, False, 1.5, 0.7, 5, False)}),
        ({"fp16_values": True}, {"values": half}),
        ({"int32_indices": True}, {"indices": int32}),
        ({"fp16_values": True, "int32_indices": True}, {"values": half, "indices": int32}),
        ({**warmup, "seed": 3}, {**warmup, "seed": 3}),
    ]
    for (keywords, parts), ratio in product(cases, (0.01, 100)):
        facade = describe(compressor=DGCCompressor(ratio, DGCSGDMemory(0.9), **keywords))
        general = describe(compressor=SparseCompressor(ratio, DGCSGDMemory(0.9), **parts))
        assert facade.pop("compressor") != general.pop("compressor") and facade == general, (keywords, ratio)


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
    compressor = DGCCompressor(0.001, NoMemory(), warmup_epochs=5)
    assert compressor.compress_ratio == pytest.approx(0.001**0.2)  # before any epoch begins
    compressor.warmup_compress_ratio(1)  # the original's name
    assert compressor.compress_ratio == pytest.approx(0.001**0.4)
    warmup = RatioWarmup(0.001, 5)  # a resumed run begins somewhere: nothing is remembered from the last call
    assert [warmup.at(e) for e in (9, 0, 3)] == pytest.approx([0.001, 0.001**0.2, 0.001**0.8])
