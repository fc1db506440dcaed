"""What DGCCompressor refuses, with one error that names the argument."""

from typing import Any

import pytest

from dgc.compression import DGCCompressor, SparseCompressor
from dgc.compression.sparse import INDICES, MEMORIES, SELECTORS, VALUES
from dgc.engine.agreement import describe
from dgc.memory import DGCSGDMemory, NoMemory, ResidualMemory
from dgc.selection import Exact
from dgc.wire import CastValues, PlainIndices, RiceIndices, SignValues

pytestmark = pytest.mark.usefixtures("no_type_checks")


def test_what_is_not_sent_is_lost_only_where_asked_for() -> None:
    for nothing in (None, DGCSGDMemory, "nothing"):
        message = "^memory must be one of 'dgc', 'residual', 'none', or an object of dgc.memory, not "
        with pytest.raises(ValueError, match=message):
            DGCCompressor(0.001, nothing)  # type: ignore[arg-type]
    assert isinstance(DGCCompressor(0.001, NoMemory()).memory, NoMemory)
    assert isinstance(DGCCompressor(0.001).memory, DGCSGDMemory)


def test_a_name_stands_for_the_object_with_its_defaults() -> None:
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
    "compress_ratio": ["0.1", None, True],
    "sample_ratio": ["0.1", True],
    "strided_sample": [1, "yes"],
    "compress_upper_bound": ["1.3", None],
    "compress_lower_bound": [[0.8]],
    "max_adaptation_iters": [2.5, "10"],
    "resample": [None],
    "fp16_values": ["fp16"],
    "int32_indices": [32],
    "warmup_epochs": ["five", 2.5, True, None],
    "warmup_coeff": ["0.25", [0.5, "0.1"], True],
    "seed": [None, 1.5],
    "selector": ["exactly", Exact],
    "values": ["fp17", CastValues],
    "indices": ["int31", PlainIndices],
}


def test_arguments_of_a_wrong_type_are_named() -> None:
    for name, values in WRONG.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name} must .*not ") as error:
                DGCCompressor(**{"compress_ratio": 0.1, "memory": ResidualMemory(), name: value})
            assert repr(value) in str(error.value)
    with pytest.raises(ValueError, match=r"named_parameters\(\)"):
        DGCCompressor(0.1, ResidualMemory()).initialize(["weight", "bias"])  # type: ignore[list-item]
