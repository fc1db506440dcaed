"""Assignment of gradients to buckets, and their layout."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from refusals import refuse

from dgc.compression import DenseCompressor, DGCCompressor, PowerSGDCompressor, Route, Rule
from dgc.core.bucket import make_bucket
from dgc.engine.buckets import MEGABYTE, describe, keep_states, plan_buckets
from dgc.memory import NoMemory

DENSE = DenseCompressor()


def parameters(*sizes: Any, dtype: Any = torch.float32) -> Any:
    return [(f"p{i}", torch.zeros(n, dtype=dtype)) for i, n in enumerate(sizes)]


def names(planned: Any) -> Any:
    return [[segment.name for segment in plan.bucket.segments] for plan in planned]


def plan(named: Any, elements: Any, route: Any = None) -> Any:
    return plan_buckets(named, route or (lambda segment: DENSE), 4 * elements / MEGABYTE, "x")


def test_every_parameter_once_in_reverse_order_up_to_the_size_and_a_large_tensor_alone() -> None:
    assert names(plan(parameters(10, 10, 10, 10, 10), 20)) == [["p4", "p3"], ["p2", "p1"], ["p0"]]
    assert names(plan(parameters(10, 10, 10), 30)) == [["p2", "p1", "p0"]]
    assert names(plan(parameters(10, 10, 10), 29)) == [["p2", "p1"], ["p0"]]
    assert names(plan(parameters(5, 5, 100, 5, 5), 20)) == [["p4", "p3"], ["p2"], ["p1", "p0"]]
    assert names(plan(parameters(100), 20)) == [["p0"]]
    assert plan([], 10) == []
    for size in (0.0, -1.0, float("nan")):
        refuse("bucket_mb", plan, parameters(3), size)

    sizes = torch.randint(1, 40, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    planned = plan(parameters(*sizes), 50)
    assert [name for bucket in names(planned) for name in bucket] == [f"p{i}" for i in reversed(range(60))]
    assert all(p.bucket.numel <= 50 for p in planned)
    assert len({p.bucket.name for p in planned}) == len(planned)


def test_one_bucket_per_dtype_and_compressor() -> None:
    sparse, other = DGCCompressor(0.1, NoMemory()), DGCCompressor(0.2, NoMemory())
    route = Route([Rule(other, name="h*"), Rule(sparse)])
    shapes = {"a": (3, 3), "b": (3,), "c": (3, 3), "d": (3,), "h": (3, 3), "e": (3, 3)}
    named = [
        (name, torch.zeros(shape, dtype=torch.float16 if name == "c" else None)) for name, shape in shapes.items()
    ]
    planned = plan(named, 1000, route.compressor_for)
    assert sorted(names(planned)) == [["c"], ["d", "b"], ["e", "a"], ["h"]]
    by_names = {tuple(n): p for n, p in zip(names(planned), planned, strict=True)}
    assert by_names["e", "a"].compressor is sparse and by_names["h",].compressor is other
    assert by_names["c",].bucket.flat.dtype == torch.float16
    assert by_names["d", "b"].compressor is sparse.fallback

    # what several compressors leave shares a bucket
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


def test_layout() -> None:
    for tensor, stride in (
        *((torch.zeros(3, 4), (4, 1)), (torch.zeros(3, 1, 4), (4, 4, 1)), (torch.zeros(0, 3), (3, 1))),
        *((torch.zeros(()), ()), (torch.zeros(1), (1,))),
        *((torch.zeros(3).expand(2, 3), (3, 1)), (torch.zeros(4, 4)[:2, :2], (2, 1))),
    ):
        bucket = make_bucket("b", [("p", tensor)])
        (segment,) = bucket.segments
        assert segment.stride == stride and segment.shape == tuple(tensor.shape)
        view = segment.of(bucket.flat)
        assert view.shape == tensor.shape
        view.fill_(1.0)
        assert bucket.flat.sum() == tensor.numel()
    # an empty tensor takes no place
    bucket = make_bucket("b", [("a", torch.zeros(2)), ("empty", torch.zeros(0, 3)), ("c", torch.zeros(4))])
    assert [segment.offset for segment in bucket.segments] == [0, 2, 2] and bucket.numel == 6


def test_description_tells_names_shapes_types_and_compressors() -> None:
    first = describe(plan(parameters(3, 4), 100))
    assert first == describe(plan(parameters(3, 4), 100))
    sparse = DGCCompressor(0.1, NoMemory())
    others = [
        *(plan(parameters(3, 5), 100), plan(parameters(3, 4), 5), plan(parameters(3, 4), 100, lambda s: sparse)),
        plan(parameters(3, 4, dtype=torch.float16), 100),
        plan([("q", torch.zeros(3)), ("p1", torch.zeros(4))], 100),
    ]
    assert all(describe(other) != first for other in others)


def dense_of(rank: int, compressor: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The warnings of rank `rank` about a model with these parameters, in several buckets."""
    named = [(name, torch.zeros(shape)) for name, shape in shapes.items()]
    planned = plan_buckets(named, lambda segment: compressor, 0.002, "p")
    assert len(planned) > 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keep_states(planned, 2, rank)
    return [str(warning.message) for warning in caught]


def test_one_warning_says_how_many_tensors_are_too_small_for_powersgd() -> None:
    lora = {f"{layer}.{name}": shape for layer in "012" for name, shape in (("A", (4, 64)), ("B", (64, 4)))}
    (told,) = dense_of(0, PowerSGDCompressor(4), {**lora, "bias": (64,)})
    assert told.startswith("PowerSGDCompressor sends 6 of 7 tensors dense, such as 2.B: their rank is at most its")
    for rank, compressor, shapes in (
        (1, PowerSGDCompressor(4), lora),  # another rank says it
        (0, PowerSGDCompressor(1), lora),
        (0, PowerSGDCompressor(4, min_compression_rate=0), lora),
        (0, DenseCompressor(), lora),
        (0, PowerSGDCompressor(4), {**lora, "first": (64, 64)}),  # most elements are compressed
        (0, PowerSGDCompressor(4), {"a": (3000,), "b": (3000,)}),  # no matrices
    ):
        assert dense_of(rank, compressor, shapes) == []
