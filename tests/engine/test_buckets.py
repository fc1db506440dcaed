"""Assignment of gradients to buckets, and their layout."""

import math
import warnings
from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from refusals import refuse

from dgc.compression import DenseCompressor, DGCCompressor, PowerSGDCompressor, Route, Rule
from dgc.core.bucket import make_bucket
from dgc.engine.buckets import MEGABYTE, PlannedBucket, default_bucket_mb, describe, keep_states, plan_buckets
from dgc.memory import NoMemory

DENSE, SPARSE = DenseCompressor(), DGCCompressor(0.1, NoMemory())


def parameters(*sizes: Any, dtype: Any = torch.float32) -> Any:
    return [(f"p{i}", torch.zeros(n, dtype=dtype)) for i, n in enumerate(sizes)]


def names(planned: Any) -> Any:
    return [[segment.name for segment in plan.bucket.segments] for plan in planned]


def plan(named: Any, elements: Any, route: Any = None) -> Any:
    return plan_buckets(named, route or (lambda segment: DENSE), 4 * elements / MEGABYTE, "x")


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ((10, 10, 10, 10, 10), 20, [["p4", "p3"], ["p2", "p1"], ["p0"]]),
        ((10, 10, 10), 30, [["p2", "p1", "p0"]]),
        ((10, 10, 10), 29, [["p2", "p1"], ["p0"]]),
        ((), 10, []),
    ],
)
def test_buckets_are_filled_up_to_the_size(sizes: Any, limit: int, expected: Any) -> None:
    assert names(plan(parameters(*sizes), limit)) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((5, 5, 100, 5, 5), [["p4", "p3"], ["p2"], ["p1", "p0"]]), ((100,), [["p0"]])],
)
def test_a_tensor_larger_than_a_bucket_has_one_of_its_own(sizes: Any, expected: Any) -> None:
    assert names(plan(parameters(*sizes), 20)) == expected


@pytest.mark.parametrize("size", [0.0, -1.0, math.nan])
def test_a_bucket_size_that_is_not_positive_is_refused(size: float) -> None:
    refuse("bucket_mb", plan, parameters(3), size)


@pytest.fixture(scope="module")
def many() -> list[PlannedBucket]:
    """The buckets of up to 50 elements of 60 parameters of random sizes."""
    sizes = torch.randint(1, 40, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    return plan_buckets(parameters(*sizes), lambda segment: DENSE, 4 * 50 / MEGABYTE, "x")


def test_every_parameter_is_in_one_bucket_in_reverse_order(many: list[PlannedBucket]) -> None:
    assert [name for bucket in names(many) for name in bucket] == [f"p{i}" for i in reversed(range(60))]


def test_no_bucket_of_several_parameters_exceeds_the_size(many: list[PlannedBucket]) -> None:
    assert all(p.bucket.numel <= 50 for p in many)


def test_buckets_have_different_names(many: list[PlannedBucket]) -> None:
    assert len({p.bucket.name for p in many}) == len(many)


def test_a_bucket_has_one_dtype_with_one_compressor() -> None:
    sparse, other = DGCCompressor(0.1, NoMemory()), DGCCompressor(0.2, NoMemory())
    route = Route([Rule(other, name="h*"), Rule(sparse)])
    shapes = {"a": (3, 3), "b": (3,), "c": (3, 3), "d": (3,), "h": (3, 3), "e": (3, 3)}
    named = [
        (name, torch.zeros(shape, dtype=torch.float16 if name == "c" else None)) for name, shape in shapes.items()
    ]
    planned = plan(named, 1000, route.compressor_for)
    assert sorted(names(planned)) == [["c"], ["d", "b"], ["e", "a"], ["h"]]
    by_names = {tuple(n): p for n, p in zip(names(planned), planned, strict=True)}
    assert by_names["e", "a"].compressor is sparse
    assert by_names["h",].compressor is other
    assert by_names["c",].bucket.flat.dtype == torch.float16
    assert by_names["d", "b"].compressor is other.fallback  # of the first rule, for both


def test_what_several_compressors_leave_shares_a_bucket() -> None:
    rules = [Rule(DGCCompressor(ratio, NoMemory()), name=f"{i}.*") for i, ratio in enumerate((0.1, 0.2))]
    route = Route([*rules, Rule(DenseCompressor())])
    named = [(f"{i}.{name}", torch.zeros(n)) for i in range(3) for name, n in (("w", (9, 9)), ("b", (9,)))]
    found = sorted(names(plan(named, 1000, route.compressor_for)))
    assert found == [["0.w"], ["1.w"], ["2.b", "2.w", "1.b", "0.b"]]


def test_views_have_the_parameters_strides() -> None:
    last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    named = [("last", last), ("t", torch.zeros(4, 3).t()), ("skip", torch.zeros(4, 6)[:, ::2])]
    (planned,) = plan(named, 1000)
    views = dict(zip(["skip", "t", "last"], planned.views, strict=True))
    assert views["last"].stride() == last.stride() and views["t"].stride() == (1, 3)
    assert views["skip"].stride() == (3, 1)
    for i, view in enumerate(planned.views):
        view.fill_(i + 1.0)
    assert planned.bucket.flat.tolist() == [1.0] * 12 + [2.0] * 12 + [3.0] * 120


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        pytest.param(torch.zeros(3, 4), (4, 1), id="matrix"),
        pytest.param(torch.zeros(3, 1, 4), (4, 4, 1), id="one in the middle"),
        pytest.param(torch.zeros(0, 3), (3, 1), id="empty"),
        pytest.param(torch.zeros(()), (), id="number"),
        pytest.param(torch.zeros(1), (1,), id="one element"),
        pytest.param(torch.zeros(3).expand(2, 3), (3, 1), id="expanded"),
        pytest.param(torch.zeros(4, 4)[:2, :2], (2, 1), id="with gaps"),
    ],
)
def test_a_segment_is_dense_in_the_shape_of_its_tensor(tensor: torch.Tensor, stride: tuple[int, ...]) -> None:
    bucket = make_bucket("b", [("p", tensor)])
    (segment,) = bucket.segments
    assert segment.stride == stride and segment.shape == tuple(tensor.shape)
    view = segment.of(bucket.flat)
    assert view.shape == tensor.shape
    view.fill_(1.0)
    assert bucket.flat.sum() == tensor.numel()


def test_an_empty_tensor_takes_no_place() -> None:
    bucket = make_bucket("b", [("a", torch.zeros(2)), ("empty", torch.zeros(0, 3)), ("c", torch.zeros(4))])
    assert [segment.offset for segment in bucket.segments] == [0, 2, 2] and bucket.numel == 6


def test_equal_plans_have_equal_descriptions() -> None:
    assert describe(plan(parameters(3, 4), 100)) == describe(plan(parameters(3, 4), 100))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: plan(parameters(3, 5), 100), id="shapes"),
        pytest.param(lambda: plan(parameters(3, 4), 5), id="bucket size"),
        pytest.param(
            lambda: plan(parameters(3, 4), 100, lambda s: DGCCompressor(0.1, NoMemory())), id="compressor"
        ),
        pytest.param(lambda: plan(parameters(3, 4, dtype=torch.float16), 100), id="dtype"),
        pytest.param(lambda: plan([("q", torch.zeros(3)), ("p1", torch.zeros(4))], 100), id="names"),
    ],
)
def test_plans_that_differ_have_different_descriptions(other: Any) -> None:
    assert describe(other()) != describe(plan(parameters(3, 4), 100))


def dense_of(rank: int, compressor: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The warnings of rank `rank` about a model with these parameters, in several buckets."""
    named = [(name, torch.zeros(shape)) for name, shape in shapes.items()]
    planned = plan_buckets(named, lambda segment: compressor, 0.002, "p")
    assert len(planned) > 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keep_states(planned, 2, rank)
    return [str(warning.message) for warning in caught]


LORA = {f"{layer}.{name}": shape for layer in "012" for name, shape in (("A", (4, 64)), ("B", (64, 4)))}


def test_one_warning_says_how_many_tensors_are_too_small_for_powersgd() -> None:
    (told,) = dense_of(0, PowerSGDCompressor(4), {**LORA, "bias": (64,)})
    assert told.startswith("PowerSGDCompressor sends 6 of 7 tensors dense, such as 2.B: their rank is at most its")


@pytest.mark.parametrize(
    ("rank", "compressor", "shapes"),
    [
        pytest.param(1, PowerSGDCompressor(4), LORA, id="another rank says it"),
        pytest.param(0, PowerSGDCompressor(1), LORA, id="a smaller rank"),
        pytest.param(0, PowerSGDCompressor(4, min_compression_rate=0), LORA, id="all compressed"),
        pytest.param(0, DenseCompressor(), LORA, id="another method"),
        pytest.param(0, PowerSGDCompressor(4), {**LORA, "first": (64, 64)}, id="most elements are compressed"),
        pytest.param(0, PowerSGDCompressor(4), {"a": (3000,), "b": (3000,)}, id="no matrices"),
    ],
)
def test_nothing_is_said_of_tensors_that_are_sent_as_intended(rank: int, compressor: Any, shapes: Any) -> None:
    assert dense_of(rank, compressor, shapes) == []


@pytest.mark.parametrize(
    ("device", "gradients_mb", "expected"),
    [
        ("cpu", 10, 25),
        ("cpu", 1000, 25),
        ("cuda", 10, 25),
        ("cuda", 400, 100),
        ("cuda", 1000, 128),
    ],
)
def test_buckets_are_larger_on_a_gpu_where_launches_take_longer_than_overlap_saves(
    device: str, gradients_mb: int, expected: float
) -> None:
    assert default_bucket_mb(gradients_mb * MEGABYTE, device) == expected


def test_the_default_size_is_chosen_by_the_device_of_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(return_value=1e-3)
    monkeypatch.setattr("dgc.engine.buckets.default_bucket_mb", asked)
    planned = plan_buckets(parameters(3), lambda segment: DenseCompressor(), None, "bucket")
    nbytes = sum(p.numel() * p.element_size() for _, p in parameters(3))
    asked.assert_called_once_with(nbytes, "cpu")
    assert planned
