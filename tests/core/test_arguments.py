"""Arguments of DGCCompressor and what they stand for; arguments and states that compressors refuse."""

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from core.ranks import Ranks
from refusals import refuse

from dgc import compression as methods
from dgc import contrib
from dgc.codes.uniform import DenseValuesCompressor
from dgc.compression import DGCCompressor, SparseCompressor
from dgc.engine.agreement import describe
from dgc.memory import DGCSGDMemory, NoMemory, ResidualMemory
from dgc.sparse.compressor import INDICES, MEMORIES, SELECTORS, VALUES, RatioWarmup
from dgc.sparse.payloads import CastValues, Int8Values, PlainIndices, RiceIndices, SignValues
from dgc.sparse.selectors import Exact, Predicted, Sampled
from dgc.testing import Fleet
from scripts.methods import SELECTORS as OF_METHODS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("no_type_checks")


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


def test_a_memory_loses_what_is_not_sent_only_where_asked_for() -> None:
    assert isinstance(DGCCompressor(0.001, NoMemory()).memory, NoMemory)
    assert isinstance(DGCCompressor(0.001).memory, DGCSGDMemory)


PARTS: dict[str, dict[str, Any]] = {
    "memory": {**MEMORIES},
    "selector": {**SELECTORS},
    "values": {**VALUES},
    "indices": {**INDICES},
}


@pytest.mark.parametrize(
    ("argument", "name"), [(argument, name) for argument, choices in PARTS.items() for name in choices]
)
def test_a_name_stands_for_the_object_with_its_defaults(argument: str, name: str) -> None:
    options: Any = {"compress_ratio": 0.01, "memory": "residual", argument: name}
    given, built = SparseCompressor(**options), SparseCompressor(**{**options, argument: PARTS[argument][name]()})
    assert describe(made=given) == describe(made=built)


def test_a_selector_has_the_name_of_its_class() -> None:
    assert {type(make()).__name__.lower(): make for make in SELECTORS.values()} == SELECTORS


def test_the_table_of_methods_has_every_selector() -> None:
    assert sorted(OF_METHODS) == sorted(SELECTORS)


CONFIGS = {"2bit": "twobit"}  # of values whose name no module may have


@pytest.mark.parametrize(
    ("folder", "part", "cls"),
    [
        *(("selection", name, type(make()).__name__) for name, make in SELECTORS.items()),
        *(("dgc", name, type(make()).__name__) for name, make in VALUES.items() if name != "fp32"),  # the default
    ],
)
def test_a_part_has_a_config_a_row_of_its_page_and_a_row_of_the_laws(folder: str, part: str, cls: str) -> None:
    assert (ROOT / "configs" / folder / f"{CONFIGS.get(part, part)}.py").is_file()
    rows = [line for line in (ROOT / "docs" / "methods.md").read_text().splitlines() if line.startswith("| ")]
    assert any(f"`{part}`" in row for row in rows), f"no row of docs/methods.md has `{part}`"
    table = (ROOT / "tests" / "laws" / "table.py").read_text()
    assert re.search(rf"\b{cls}\b", table), f"no row of the laws has {cls}"


def test_the_formats_of_a_payload_are_chosen_by_name() -> None:
    named = DGCCompressor(0.001, values="sign", indices="rice")
    assert isinstance(named.format.values, SignValues) and isinstance(named.format.indices, RiceIndices)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_an_argument_of_a_wrong_kind_is_named(name: str, value: Any) -> None:
    others: Any = {"compress_ratio": 0.1, "memory": ResidualMemory(), "warmup_epochs": 2}
    with pytest.raises(ValueError, match=f"^{name} must .*not ") as error:
        DGCCompressor(**{**others, name: value})
    assert repr(value) in str(error.value)


def test_ratios_of_other_epochs_than_those_of_the_warm_up_are_refused() -> None:
    refuse(
        "lists 2 ratios for 3 warmup_epochs",
        DGCCompressor,
        0.1,
        NoMemory(),
        warmup_epochs=3,
        warmup_coeff=[0.5, 0.2],
    )


def test_names_without_parameters_are_refused() -> None:
    refuse(r"named_parameters\(\)", DGCCompressor(0.1, ResidualMemory()).initialize, ["weight", "bias"])


HALF, INT32 = CastValues("fp16"), PlainIndices("int32")
WARMUP = {"warmup_epochs": 5, "warmup_coeff": 0.3}
BOUNDS = {"compress_upper_bound": 1.5, "compress_lower_bound": 0.7, "max_adaptation_iters": 5}
EVERY = {"sample_ratio": 0.01, "strided_sample": False, "resample": False, **BOUNDS}
KEYWORDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"selector": Predicted()}),
    ({"sample_ratio": 1}, {"selector": Exact()}),
    ({"sample_ratio": 0.01}, {"selector": Sampled(0.01)}),
    (EVERY, {"selector": Sampled(0.01, False, 1.5, 0.7, 5, False)}),
    ({"fp16_values": True}, {"values": HALF}),
    ({"int32_indices": True}, {"indices": INT32}),
    ({"fp16_values": True, "int32_indices": True}, {"values": HALF, "indices": INT32}),
    ({**WARMUP, "seed": 3}, {**WARMUP, "seed": 3}),
]


@pytest.mark.parametrize("ratio", [0.01, 100])
@pytest.mark.parametrize(
    ("keywords", "parts"), KEYWORDS, ids=[", ".join(given) or "none" for given, _ in KEYWORDS]
)
def test_each_keyword_of_the_original_names_a_part(keywords: Any, parts: Any, ratio: float) -> None:
    facade = describe(compressor=DGCCompressor(ratio, DGCSGDMemory(0.9), **keywords))
    general = describe(compressor=SparseCompressor(ratio, DGCSGDMemory(0.9), **parts))
    assert facade.pop("compressor") != general.pop("compressor") and facade == general


@pytest.mark.parametrize(
    ("keyword", "name", "part", "words"),
    [
        (
            {"fp16_values": True},
            "values",
            Int8Values(),
            r"values=Int8Values\(.*\) is used; the original's keyword",
        ),
        ({"int32_indices": True}, "indices", RiceIndices(), r"indices=RiceIndices\(\) is used"),
        ({"sample_ratio": 0.1}, "selector", Exact(), "selector=Exact.* is used"),
    ],
    ids=["values", "indices", "selector"],
)
def test_a_part_takes_the_place_of_a_keyword_of_the_original(
    keyword: Any, name: str, part: Any, words: str
) -> None:
    options: dict[str, Any] = {**keyword, name: part}
    with pytest.warns(UserWarning, match=words):
        compressor = DGCCompressor(0.01, ResidualMemory(), **options)
    assert {"selector": compressor.selector, **vars(compressor.format)}[name] is part


def ratios(epochs: int = 7, **options: Any) -> Any:
    compressor = DGCCompressor(memory=NoMemory(), **options)
    return [compressor.in_epoch(epoch).compress_ratio for epoch in range(epochs)]


def test_the_published_warm_up_takes_roots_of_the_ratio() -> None:
    published = ratios(compress_ratio=0.001, warmup_epochs=5)
    assert [float(f"{r:.2g}") for r in published] == [0.25, 0.063, 0.016, 0.004, 0.001, 0.001, 0.001]
    assert published[4:] == pytest.approx([0.001] * 3, rel=1e-12)


def test_a_ratio_above_1_is_its_inverse() -> None:
    assert ratios(compress_ratio=0.001, warmup_epochs=5) == ratios(compress_ratio=1000, warmup_epochs=5)


def test_without_a_warm_up_the_ratio_is_constant() -> None:
    assert ratios(compress_ratio=0.01) == ratios(compress_ratio=0.01, warmup_epochs=0) == [0.01] * 7


def test_a_number_as_coefficient_is_a_base_that_stops_at_the_ratio() -> None:
    powers = ratios(compress_ratio=0.001, warmup_epochs=5, warmup_coeff=0.25)
    assert powers == pytest.approx([0.25, 0.0625, 0.015625, 0.00390625, 0.001, 0.001, 0.001])


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_coefficients_are_the_ratios_of_the_epochs(kind: Any) -> None:
    seen = ratios(compress_ratio=0.1, warmup_epochs=3, warmup_coeff=kind([1.0, 0.5, 0.3]))
    assert seen == [1.0, 0.5, 0.3, 0.1, 0.1, 0.1, 0.1]


def test_before_any_epoch_begins_the_ratio_is_of_the_first() -> None:
    compressor = DGCCompressor(0.001, NoMemory(), warmup_epochs=5)
    assert compressor.compress_ratio == pytest.approx(0.001**0.2)


def test_an_epoch_begins_also_by_the_original_s_name() -> None:
    compressor = DGCCompressor(0.001, NoMemory(), warmup_epochs=5)
    compressor.warmup_compress_ratio(1)
    assert compressor.compress_ratio == pytest.approx(0.001**0.4)


def test_a_warm_up_may_be_resumed_at_any_epoch() -> None:
    """Nothing is remembered from the last call."""
    warmup = RatioWarmup(0.001, 5)
    assert [warmup.at(e) for e in (9, 0, 3)] == pytest.approx([0.001, 0.001**0.2, 0.001**0.8])


# --- refused arguments and states of all compressors -----------------------------------------------

DGC = partial(DGCCompressor, 0.01, ResidualMemory())
SPARSE = partial(DGC, vectors="sparse")
CHUNKS = partial(methods.ChunkCompressor, compress_ratio=0.1, memory=NoMemory())
POWERSGD = partial(methods.PowerSGDCompressor, 1)
ACCORDION = partial(contrib.AccordionCompressor, 2)
EF21 = partial(methods.EF21Compressor, DGC())
DENSE_VALUES = "dense_values must be one of None, fp32, fp16, bf16, int8, not"
EXCHANGE = "exchange must be one of all_gather.*, not"
ARGUMENTS: list[tuple[Any, dict[str, Any], str]] = [
    (CHUNKS, {"chunk_size": 0}, "chunk_size must be 1 element or more, not 0"),
    (CHUNKS, {"chunk_size": 1.5}, "chunk_size must be a whole number of elements, not 1.5"),
    (CHUNKS, {"dtype": "bf16"}, "dtype must be one of fp16, fp32, not 'bf16'"),
    (CHUNKS, {"compress_ratio": 0}, "compress_ratio must be positive and finite"),
    (CHUNKS, {"memory": None}, "memory must be one of 'dgc', 'residual', 'none', or an object"),
    (CHUNKS, {"warmup_epochs": 3, "warmup_coeff": [1]}, "warmup_coeff lists 1 ratios for 3"),
    (EF21, {"beta": 0.0}, r"beta must be in \(0, 1\]"),
    (EF21, {"beta": 1.5}, r"beta must be in \(0, 1\]"),
    (methods.EF21Compressor, {"compressor": DGCCompressor(0.1, DGCSGDMemory(0.9))}, "EF21 has momentum"),
    *((DGC, {"dense_values": name}, f"{DENSE_VALUES} {name!r}") for name in ("int4", "FP16", "")),
    (DenseValuesCompressor, {"values": "fp32"}, "values must be one of fp16, bf16, int8, not 'fp32'"),
    (DGC, {"vectors": "both"}, "vectors must be one of dense, sparse, not 'both'"),
    (DGC, {"vector_ratio": 0.1}, "vector_ratio has no effect .* set vectors='sparse'"),
    (SPARSE, {"vector_ratio": 0.0}, "vector_ratio must be positive and finite, not 0.0"),
    (SPARSE, {"vector_ratio": 0.001}, "vector_ratio is 0.001, less than .* of 0.01"),
    *((DGC, {"exchange": given}, f"{EXCHANGE} {given!r}") for given in ("ring", None, 3)),
    (methods.QSGDCompressor, {"bits": 3}, "bits must be 2, 4 or 8"),
    (methods.QSGDCompressor, {"norm": "l1"}, "norm must be one of l2, max"),
    (methods.QSGDCompressor, {"block": 0}, "block"),
    (contrib.TernGradCompressor, {"clip": 0.0}, "clip"),
    (methods.SignSGDCompressor, {"momentum": 1.0}, "momentum"),
    (contrib.RandomKCompressor, {"compress_ratio": 0.0}, "compress_ratio"),
    (contrib.RandomKCompressor, {"compress_ratio": math.inf}, "compress_ratio"),
    (partial(contrib.RandomKCompressor, 0.1), {"values": "bf16"}, "one of fp32, fp16"),
    (contrib.SVDCompressor, {"rank": 0}, "rank"),
    (methods.ThresholdCompressor, {"bits": 3}, "bits must be 1 or 2"),
    (methods.ThresholdCompressor, {"threshold": 0.0}, "threshold must be positive"),
    (methods.ThresholdCompressor, {"threshold": -1.0}, "threshold must be positive"),
    (methods.ThresholdCompressor, {"bits": 1, "threshold": None}, "threshold must be a number"),
    (methods.ThresholdCompressor, {"factor": 0.0}, "factor"),
    (methods.ThresholdCompressor, {"wire": "ring"}, "wire must be one of auto, gather, scatter, server"),
    (methods.TwoPhaseCompressor, {"bits": 2}, "bits must be 16, 8 or 4, not 2"),
    (methods.TwoPhaseCompressor, {"second_bits": 2}, "second_bits must be 16, 8 or 4, not 2"),
    (methods.TwoPhaseCompressor, {"second_bits": 16}, "16 bits have no blocks"),
    (methods.TwoPhaseCompressor, {"bits": 16, "second_bits": 8}, "16 bits have no blocks"),
    (methods.TwoPhaseCompressor, {"bits": 16, "block": 64}, "16 bits have no blocks"),
    (methods.TwoPhaseCompressor, {"bits": 16, "hadamard": True}, "16 bits have no blocks"),
    (methods.TwoPhaseCompressor, {"random": True}, "random=True is for bits=16 without error feedback"),
    (
        methods.TwoPhaseCompressor,
        {"bits": 16, "random": True, "error_feedback": True},
        "random=True is for bits=16 without error feedback",
    ),
    (methods.TwoPhaseCompressor, {"block": 100}, "block must be one of 64, 128, 256, 512, not 100"),
    (methods.PowerSGDCompressor, {"rank": 0}, "must be at least 1"),
    (POWERSGD, {"mode": "fast"}, "mode must be one of residual, paper, square"),
    (POWERSGD, {"mode": "paper", "num_iters_per_step": 2}, "requires mode='residual'"),
    (POWERSGD, {"min_compression_rate": -1}, "must be at least 0"),
    (POWERSGD, {"wire": "bf16"}, "wire must be one of fp32, fp16"),
    (ACCORDION, {"high_rank": 4, "mode": "square"}, "chosen for each tensor"),
    (ACCORDION, {"high_rank": 4, "every": 0}, "every at least 1"),
    (ACCORDION, {"high_rank": 4, "change": 0.0}, "change must be positive"),
    (ACCORDION, {"high_rank": 1}, "high_rank must be at least rank = 2, not 1"),
    (POWERSGD, {"orthogonalization": "svd"}, "orthogonalization must be one of auto, qr, gram_sch"),
    *((POWERSGD, {"epsilon": epsilon}, "epsilon must lie between 0 and 1") for epsilon in (0.0, -1.0, 1.0)),
    (methods.Route, {"rules": []}, "at least one Rule"),
]


@pytest.mark.parametrize(("make", "wrong", "words"), ARGUMENTS, ids=[words for *_, words in ARGUMENTS])
def test_each_compressor_refuses_wrong_arguments(make: Any, wrong: dict[str, Any], words: str) -> None:
    refuse(words, make, **wrong)


@pytest.mark.parametrize(
    "rounding", [methods.FP16Compressor(), methods.QSGDCompressor(error_feedback=False)], ids=["fp16", "qsgd"]
)
def test_ef21_refuses_a_compressor_without_a_residual(rounding: Any) -> None:
    start = partial(Ranks, 1, partial(methods.EF21Compressor, rounding), [(3, 7)])
    refuse("has no residual to send the rest later", start)


def states(make: Any, *shapes: Any) -> Any:
    return Fleet(make, 1, [torch.zeros(shape) for shape in shapes]).states[0]


OTHER = "state of another compressor"
RANK_2 = partial(POWERSGD, 2)


def of_matrix() -> Any:
    return states(RANK_2, (30, 40))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([(30, 40), (5,)], r"errors of another model: missing \['p1'\]"),
        ([(40, 30)], r"errors of p0 has shape \(30, 40\), not \(40, 30\)"),
    ],
)
def test_powersgd_refuses_the_state_of_another_model(shapes: Any, words: str) -> None:
    refuse(words, states(RANK_2, *shapes).load_state_dict, of_matrix().state_dict())


def test_powersgd_refuses_a_state_without_factors() -> None:
    refuse(OTHER, of_matrix().load_state_dict, {"errors": {}, "steps": 3})


@pytest.mark.parametrize(
    ("side", "words"),
    [
        ("P", r"P of p0 has shape \(1, \d+\), not \(30, rank\)"),
        ("Q", r"Q of p0 has shape \(1, \d+\), not \(40, rank\)"),
    ],
)
def test_powersgd_refuses_factors_of_another_shape(side: str, words: str) -> None:
    state = of_matrix().state_dict()
    refuse(words, of_matrix().load_state_dict, {**state, side: {"p0": state[side]["p0"].reshape(1, -1)}})


def squeeze() -> Any:
    return states(contrib.DoubleSqueezeCompressor, (7, 20), (33,))


def test_double_squeeze_refuses_a_state_with_another_table() -> None:
    refuse(OTHER, squeeze().load_state_dict, {**squeeze().state_dict(), "more": {"p0": 1}})


def test_double_squeeze_refuses_a_state_without_its_server_errors() -> None:
    state = squeeze().state_dict()
    del state["server_errors"]
    refuse(OTHER, squeeze().load_state_dict, state)


def test_double_squeeze_refuses_server_errors_without_a_parameter() -> None:
    state = squeeze().state_dict()
    half = {**state, "server_errors": {"p1": state["server_errors"]["p1"]}}
    refuse(r"server_errors of another model: missing \['p0'\]", squeeze().load_state_dict, half)


@pytest.mark.parametrize("make", [methods.DenseCompressor, methods.FP16Compressor, methods.BF16Compressor])
def test_a_compressor_without_a_state_refuses_one(make: Any) -> None:
    refuse(OTHER, states(make, (3,)).load_state_dict, {"residuals": {"p0": torch.zeros(3)}})
