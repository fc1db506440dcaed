"""Arguments of DGCCompressor and what they stand for; arguments and states that compressors refuse."""

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from core.ranks import Ranks
from refusals import check_refusals

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


def test_a_name_stands_for_the_object_with_its_defaults_and_wrong_ones_are_named() -> None:
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
    others: Any = {"compress_ratio": 0.1, "memory": ResidualMemory(), "warmup_epochs": 2}
    for name, values in WRONG.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name} must .*not ") as error:
                DGCCompressor(**{**others, name: value})
            assert repr(value) in str(error.value)
    with pytest.raises(ValueError, match="lists 2 ratios for 3 warmup_epochs"):
        DGCCompressor(0.1, NoMemory(), warmup_epochs=3, warmup_coeff=[0.5, 0.2])
    with pytest.raises(ValueError, match=r"named_parameters\(\)"):
        DGCCompressor(0.1, ResidualMemory()).initialize(["weight", "bias"])  # type: ignore[list-item]


def test_each_keyword_of_the_original_names_a_part_and_a_part_given_as_such_takes_its_place() -> None:
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
    options: dict[str, Any] = {"values": Int8Values(), "indices": RiceIndices(), "selector": Exact()}
    for keyword, part, words in (
        ({"fp16_values": True}, "values", r"values=Int8Values\(.*\) is used; the original's keyword"),
        ({"int32_indices": True}, "indices", r"indices=RiceIndices\(\) is used"),
        ({"sample_ratio": 0.1}, "selector", "selector=Exact.* is used"),
    ):
        with pytest.warns(UserWarning, match=words):
            compressor = DGCCompressor(0.01, ResidualMemory(), **keyword, **{part: options[part]})
        assert {"selector": compressor.selector, **vars(compressor.format)}[part] is options[part]


def ratios(epochs: int = 7, **options: Any) -> Any:
    compressor, seen = DGCCompressor(memory=NoMemory(), **options), []
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
    (methods.TwoPhaseCompressor, {"bits": 2}, "bits must be 8 or 4, not 2"),
    (methods.TwoPhaseCompressor, {"answer_bits": 16}, "answer_bits must be 8 or 4, not 16"),
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


def test_what_each_compressor_refuses_also_states_of_others() -> None:
    check_refusals(*((partial(make, **wrong), words) for make, wrong, words in ARGUMENTS))
    rounding = (methods.FP16Compressor, partial(methods.QSGDCompressor, error_feedback=False))
    starts = (partial(Ranks, 1, partial(methods.EF21Compressor, make()), [(3, 7)]) for make in rounding)
    check_refusals(*((start, "has no residual to send the rest later") for start in starts))
    powersgd, squeeze = partial(POWERSGD, 2), partial(states, contrib.DoubleSqueezeCompressor, (7, 20), (33,))
    of_matrix = partial(states, powersgd, (30, 40))
    low_rank, squeezed, other = of_matrix().state_dict(), squeeze().state_dict(), "state of another compressor"
    short = {side: {**low_rank, side: {"p0": low_rank[side]["p0"].reshape(1, -1)}} for side in "PQ"}
    unserved = {key: state for key, state in squeezed.items() if key != "server_errors"}
    half_served = {**unserved, "server_errors": {"p1": squeezed["server_errors"]["p1"]}}
    rows: list[tuple[Any, Any, str]] = [
        (partial(states, powersgd, (30, 40), (5,)), low_rank, r"errors of another model: missing \['p1'\]"),
        (partial(states, powersgd, (40, 30)), low_rank, r"errors of p0 has shape \(30, 40\), not \(40, 30\)"),
        (of_matrix, {"errors": {}, "steps": 3}, other),
        (of_matrix, short["P"], r"P of p0 has shape \(1, \d+\), not \(30, rank\)"),
        (of_matrix, short["Q"], r"Q of p0 has shape \(1, \d+\), not \(40, rank\)"),
        *((squeeze, state, other) for state in ({**squeezed, "more": {"p0": 1}}, unserved)),
        (squeeze, half_served, r"server_errors of another model: missing \['p0'\]"),
    ]
    for make in (methods.DenseCompressor, methods.FP16Compressor, methods.BF16Compressor):
        rows.append((partial(states, make, (3,)), {"residuals": {"p0": torch.zeros(3)}}, other))
    check_refusals(*((partial(make().load_state_dict, state), words) for make, state, words in rows))


def states(make: Any, *shapes: Any) -> Any:
    return Fleet(make, 1, [torch.zeros(shape) for shape in shapes]).states[0]
