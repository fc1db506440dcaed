"""Dense exchanges and casts, which rule takes which tensor, and the fallbacks of sparse methods."""

import copy
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from cases import case
from core.ranks import Ranks, normal
from optim.nets import alone
from torch import Tensor, nn

from dgc import compression as methods
from dgc import contrib
from dgc.codes.uniform import DenseValuesCompressor
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import Route, Rule
from dgc.core.bucket import make_bucket
from dgc.core.dense import ClippedCompressor
from dgc.core.envelope import sealed_bytes
from dgc.memory import ClipByNorm, ClipByValue, DGCSGDMemory, NoMemory, ResidualMemory
from dgc.optim import DGCSGD, DistributedOptimizer
from dgc.sparse.payloads import CastValues, Int8Values, SignValues, ValueFormat

N = 301


def reduce_all(make: Any, own: Any, dtype: Any = torch.float32) -> Any:
    results, mean = Ranks(len(own), make, {"w": (N,)}, dtype).exchange(own)
    assert all(isinstance(result, methods.DenseResult) for result in results) and mean.dtype == dtype
    return mean


def gradients(size: Any, scale: float = 1.0) -> Any:
    return [scale * normal(N, seed=rank) for rank in range(size)]


@pytest.mark.parametrize(
    ("compressor", "share"),
    [
        (methods.DenseCompressor(), None),
        (methods.PowerSGDCompressor(1), None),
        (methods.DGCCompressor(0.01, NoMemory()), 0.0),
    ],
    ids=["dense", "powersgd", "dgc"],
)
def test_only_a_compressor_that_decides_has_a_dense_share(compressor: Any, share: float | None) -> None:
    assert Ranks(1, lambda: compressor, [(N,)]).states[0].dense_share == share


def test_dense_leaves_nan_to_the_user() -> None:
    ranks, (own,) = Ranks(1, methods.DenseCompressor, {"w": (N,)}), gradients(1)
    own[7] = float("nan")
    ranks.buckets[0].flat.copy_(own)
    ranks.world.converse("b", [ranks.states[0].reduce(ranks.buckets[0])])
    assert ranks.buckets[0].flat.isnan().nonzero().tolist() == [[7]]


CASTS = [methods.FP16Compressor, methods.BF16Compressor]
PLAIN = [methods.DenseCompressor, *CASTS]


@pytest.mark.parametrize("make", CASTS)
def test_a_cast_takes_the_memory_of_its_message_once(make: Any) -> None:
    ranks, used = Ranks(1, make, [(N,)]), set[int]()
    (states,), (bucket,) = ranks.states, ranks.buckets
    for g in gradients(3):
        bucket.use_gradient(0, g)
        conversation = states.reduce(bucket)
        requests: Any = next(conversation)
        used.add(requests[0].tensor.data_ptr())
        conversation.close()
        ranks.step([g])
        used.add(states[bucket].scratch["message"].data_ptr())
    assert len(used) == 2  # the first conversation ended without a state


@pytest.mark.parametrize("make", CASTS)
def test_a_cast_reads_gradients_where_they_lie(make: Any) -> None:
    ranks = Ranks(1, make, [(N,)])
    (states,), (bucket,) = ranks.states, ranks.buckets
    for g in gradients(3):
        bucket.use_gradient(0, g)
        before = bucket._flat.clone()
        conversation = states.reduce(bucket)
        next(conversation)
        assert torch.equal(bucket._flat, before)
        conversation.close()
        ranks.step([g])


def test_bf16_adds_in_fp32() -> None:
    """256 + 1 + 1 is 256 where bf16 adds, and 258 in fp32."""
    own = [torch.full((N,), value) for value in (256.0, 1.0, 1.0)]
    assert (reduce_all(methods.BF16Compressor, own) == 258 / 3).all()


def test_bf16_rounds_the_gradient_of_each_rank_once() -> None:
    own = gradients(3)
    expected = sum(g.bfloat16().float() for g in own) / 3
    torch.testing.assert_close(reduce_all(methods.BF16Compressor, own), expected, rtol=1e-6, atol=1e-7)


def test_bf16_holds_large_gradients() -> None:
    assert reduce_all(methods.BF16Compressor, gradients(2, 1e30)).isfinite().all()


def test_fp16_makes_infinity_of_large_gradients() -> None:
    assert (reduce_all(methods.FP16Compressor, [torch.full((N,), 7e4)] * 2) == float("inf")).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", PLAIN)
def test_the_mean_of_gradients_in_half_precision_is_in_their_precision(make: Any, dtype: Any) -> None:
    own = [g.to(dtype) for g in gradients(3)]
    mean, expected = reduce_all(make, own, dtype), sum(g.float() for g in own) / 3
    torch.testing.assert_close(mean.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("make", PLAIN)
def test_a_cast_keeps_nothing_between_steps(make: Any) -> None:
    (states,) = Ranks(1, make, {"w": (3,)}).states
    assert states.state_dict() == {} and list(states.errors()) == []
    assert states.compress_ratio == 1.0 and states.compressor.correction is None
    states.load_state_dict({})


def segment(name: Any, *shape: Any) -> Any:
    return make_bucket("b", [(name, torch.zeros(shape))]).segments[0]


def test_the_first_rule_that_matches_wins() -> None:
    first, second, last = methods.DenseCompressor(), methods.FP16Compressor(), methods.BF16Compressor()
    route = Route([Rule(first, name="head.*"), Rule(second, min_numel=100), Rule(last)])
    assert route.compressor_for(segment("head.weight", 20, 20)) is first
    assert route.compressor_for(segment("body.weight", 10, 10)) is second
    assert route.compressor_for(segment("body.weight", 9, 11)) is last
    assert route.rules[0].compressor is first


def test_a_tensor_that_no_rule_matches_is_named() -> None:
    with pytest.raises(ValueError, match=r"no rule matches b of shape \(3,\)"):
        Route([Rule(methods.DenseCompressor(), min_dim=2)]).compressor_for(segment("b", 3))


@pytest.mark.parametrize(
    ("options", "one", "other"),
    [
        ({"name": "*.weight"}, segment("a.b.weight", 2), segment("a.b.bias", 2)),
        ({"name": "*.Weight"}, segment("a.Weight", 2), segment("a.weight", 2)),
        ({"name": "layer[12].*"}, segment("layer2.w", 2), segment("layer3.w", 2)),
        ({"min_dim": 2}, segment("x", 4, 1), segment("x", 4)),
        ({"max_dim": 1}, segment("x"), segment("x", 4, 1)),
        ({"min_numel": 8}, segment("x", 2, 4), segment("x", 7)),
        ({"max_numel": 8}, segment("x", 2, 4), segment("x", 9)),
        ({"name": "x", "min_dim": 2, "max_numel": 8}, segment("x", 2, 4), segment("y", 2, 4)),
    ],
    ids=lambda given: ", ".join(given) if isinstance(given, dict) else given.name,
)
def test_a_rule_matches_one_tensor_but_not_the_other(options: Any, one: Any, other: Any) -> None:
    rule = Rule(methods.DenseCompressor(), **options)
    assert rule.matches(one) and not rule.matches(other)


def test_a_rule_without_conditions_matches_every_tensor() -> None:
    assert Rule(methods.DenseCompressor()).matches(segment("x"))


def test_a_fallback_takes_what_the_method_does_not_accept() -> None:
    sparse = methods.DGCCompressor(0.01, NoMemory())
    route = Route([Rule(sparse)])
    assert route.compressor_for(segment("w", 3, 3)) is sparse
    bias, other = (route.compressor_for(segment(name, 3)) for name in ("b", "c"))
    assert bias is other is sparse.fallback and isinstance(bias, methods.DenseCompressor)


def test_the_fallback_of_fp16_values_is_fp16() -> None:
    assert isinstance(methods.DGCCompressor(0.01, NoMemory(), fp16_values=True).fallback, methods.FP16Compressor)


class OfAUser(methods.DenseCompressor):
    """May have settings."""


def clipped(norm: float, **options: Any) -> methods.DGCCompressor:
    return methods.DGCCompressor(0.01, DGCSGDMemory(0.9, gradient_clipping=ClipByNorm(norm)), **options)


def chosen_for_vectors(*compressors: Any) -> list[Any]:
    """What takes the vectors of each compressor's layers, where a rule gives it a layer."""
    route = Route([Rule(compressor, name=f"{i}.*") for i, compressor in enumerate(compressors)])
    return [route.compressor_for(segment(f"{i}.bias", 3)) for i in range(len(compressors))]


def test_plain_fallbacks_of_several_methods_are_one() -> None:
    first, second = (methods.DGCCompressor(ratio, ResidualMemory()) for ratio in (0.01, 0.1))
    found = chosen_for_vectors(first, second, methods.DenseCompressor(), contrib.SVDCompressor(2))
    assert all(compressor is first.fallback for compressor in found)


FP16_VALUES = methods.DGCCompressor(0.1, NoMemory(), fp16_values=True)
INT8_VALUES = methods.DGCCompressor(0.1, NoMemory(), dense_values="int8")


@pytest.mark.parametrize(
    ("one", "other", "are_one"),
    [
        pytest.param(clipped(1.0), clipped(1.0), True, id="equal limits"),
        pytest.param(clipped(1.0), clipped(2.0), False, id="other limits"),
        pytest.param(clipped(1.0), methods.DGCCompressor(0.01, ResidualMemory()), False, id="no limit"),
        pytest.param(clipped(1.0), clipped(1.0, fp16_values=True), False, id="fp16"),
        pytest.param(methods.FP16Compressor(), FP16_VALUES, True, id="both fp16"),
        pytest.param(methods.FP16Compressor(), methods.BF16Compressor(), False, id="fp16, bf16"),
        pytest.param(OfAUser(), OfAUser(), False, id="of a user"),
        pytest.param(
            *(clipped(1.0, dense_values="int8"), clipped(1.0, dense_values="int8")), False, id="each has a state"
        ),
        pytest.param(INT8_VALUES, INT8_VALUES, True, id="one method"),
    ],
)
def test_fallbacks_are_one_if_they_have_equal_settings_without_a_state(
    one: Any, other: Any, are_one: bool
) -> None:
    first, second = chosen_for_vectors(one, other)
    assert (first is second) == are_one


SHAPES = [(64,), (3000,), (7,)]
NUMEL = 3071
DENSE_VALUES = ("fp32", "fp16", "bf16", "int8")


def fallback(name: str | None, values: ValueFormat | None = None, clipping: Any = None) -> methods.Compressor:
    memory = DGCSGDMemory(0.9, gradient_clipping=clipping)
    return methods.SparseCompressor(0.01, memory, values=values, dense_values=name).fallback


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        (None, None, methods.DenseCompressor),
        ("fp32", SignValues(), methods.DenseCompressor),
        (None, CastValues("fp16"), methods.FP16Compressor),
    ],
)
def test_a_fallback_keeps_no_error_where_its_values_need_none(name: Any, values: Any, kind: type) -> None:
    assert type(fallback(name, values)) is kind


@pytest.mark.parametrize(
    ("given", "name"),
    [
        pytest.param(fallback(None, SignValues()), "int8", id="for signs"),
        pytest.param(fallback(None, Int8Values()), "int8", id="for int8"),
        pytest.param(fallback(None, CastValues("bf16")), "bf16", id="for bf16"),
        pytest.param(fallback("fp16", CastValues("fp16")), "fp16", id="fp16, for fp16"),
        pytest.param(fallback("int8"), "int8", id="int8"),
        pytest.param(
            methods.DGCCompressor(0.01, ResidualMemory(), dense_values="bf16").fallback, "bf16", id="bf16 of DGC"
        ),
    ],
)
def test_a_fallback_with_a_residual_has_values_that_fit_the_method(given: Any, name: str) -> None:
    assert isinstance(given, DenseValuesCompressor) and given.values == name
    assert given.correction is None  # momentum stays with the optimizer


def test_the_fallback_of_a_memory_that_clips_clips() -> None:
    assert isinstance(fallback("fp32", clipping=ClipByValue(1.0)), ClippedCompressor)


@pytest.mark.parametrize("name", DENSE_VALUES)
@pytest.mark.parametrize("size", [1, 3])
def test_a_fallback_clips_the_mean_of_each_tensor(size: int, name: str) -> None:
    own, make = [normal(NUMEL, seed=rank) for rank in range(size)], partial(fallback, name)
    free = Ranks(size, make, SHAPES).step(own)
    mean = Ranks(size, partial(make, clipping=ClipByNorm(0.5)), SHAPES).step(own)
    for part, whole in zip(mean.split([64, 3000, 7]), free.split([64, 3000, 7]), strict=True):
        torch.testing.assert_close(part, whole * (0.5 / whole.norm()))


class ManyRanks(NamedTuple):
    """Codes are gathered, until an all-reduce of `reduced` bytes an element costs less."""

    name: str
    size: int
    gathers: bool
    reduced: int


MANY_RANKS = [
    ManyRanks(name, size, size <= most, reduced)
    for name, most, reduced in (("int8", 7, 4), ("bf16", 4, 4), ("fp16", 2, 2))
    for size in (1, most, most + 1)
]
with_many_ranks = pytest.mark.parametrize(
    "given", MANY_RANKS, ids=lambda given: f"{given.name}, {given.size} ranks"
)


def trained(given: ManyRanks) -> tuple[Ranks, Tensor]:
    """After three steps, with the sum of what the means have lost."""
    ranks, lost = Ranks(given.size, partial(fallback, given.name), SHAPES), torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(3):
        own = [normal(NUMEL, seed=100 * step + rank) for rank in range(given.size)]
        lost += sum(g.double() for g in own) / given.size - ranks.step(own).double()
    return ranks, lost


@with_many_ranks
def test_vectors_are_exchanged_in_the_cheaper_way(given: ManyRanks) -> None:
    size, reduced = given.size, given.reduced
    meter = trained(given)[0].world.meters[0]
    codes = NUMEL + 4 * (1 + 3 + 1) if given.name == "int8" else 2 * NUMEL
    assert meter.payload_bytes == 3 * (sealed_bytes(codes) if given.gathers else sealed_bytes(0) + reduced * NUMEL)
    assert meter.wire_bytes <= 3 * (2 * reduced * NUMEL * (size - 1) / size + 31 * (size - 1))


@with_many_ranks
def test_what_the_rounding_of_vectors_takes_is_kept(given: ManyRanks) -> None:
    ranks, lost = trained(given)
    kept = sum(e.double() for e in ranks.errors()) / given.size
    rounded = given.name == "fp16" and not given.gathers  # the transport's sum
    torch.testing.assert_close(kept, lost, rtol=0, atol=2.0**-8 if rounded else 1e-5)
    assert any(e.any() for e in ranks.errors()) == (given.gathers or rounded)


@with_many_ranks
def test_only_codes_of_vectors_that_are_gathered_have_a_ratio(given: ManyRanks) -> None:
    ranks, _ = trained(given)
    assert (ranks.states[0].compress_ratio < 1) == (given.gathers and given.name == "int8")


def test_a_large_element_makes_only_its_block_coarse() -> None:
    """A scale belongs to up to 1024 elements of one tensor."""
    ranks, gradient = Ranks(1, partial(fallback, "int8"), SHAPES), normal(NUMEL, seed=1).clamp(-3, 3)
    gradient[64 + 1024] = 1000.0
    error = gradient - ranks.step([gradient])
    torch.testing.assert_close(ranks.errors()[0], error, rtol=0, atol=1e-6)
    block = slice(64 + 1024, 64 + 2048)
    assert float(error[block].abs().max()) > 1
    error[block] = 0
    assert float(error.abs().max()) <= 3 / 127 / 2 * 1.001


def vectors(transport: Any, compression: Any, steps: int, state: Any = None) -> tuple[Tensor, Any]:
    """The vector of a model after steps of SGD with momentum 0.9, and the state of the compression."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(20, 30)), "b": nn.Parameter(torch.zeros(50))})
    inner = DGCSGD(model.parameters(), lr=1.0, momentum=0.9)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), compression, transport=transport)
    if state is not None:
        optimizer.load_compression_state_dict(state, allow_other_rank=True)
    for step in range(steps):
        optimizer.zero_grad()
        (model["b"] @ normal(50, seed=10 * step + transport.rank) + model["w"].sum()).backward()
        optimizer.step()
    return model["b"].detach(), optimizer.compression_state_dict()


def method(dense_values: str) -> methods.DGCCompressor:
    return methods.DGCCompressor(0.05, DGCSGDMemory(0.9), dense_values=dense_values)


def test_momentum_of_vectors_is_the_optimizer_s() -> None:
    """All but the last step's rounding arrives, times 1 / (1 - momentum) in the end."""
    trains = [partial(lambda name, t: vectors(t, method(name), 30)[0], name) for name in DENSE_VALUES]
    exact, *others = (LockstepWorld(2).run(train)[0] for train in trains)
    assert float(exact.abs().max()) > 20
    for other, name in zip(others, DENSE_VALUES[1:], strict=True):
        with case(name):
            assert not torch.equal(exact, other)
            torch.testing.assert_close(other, exact, rtol=0, atol=0.1)


@pytest.fixture(scope="module")
def state_of_int8() -> Any:
    return LockstepWorld(2).run(lambda t: vectors(t, method("int8"), 3)[1])[0]


def test_a_state_has_the_error_of_vectors(state_of_int8: Any) -> None:
    assert {"DenseValuesCompressor.0", "DGCCompressor.1"} <= state_of_int8.keys()
    error = state_of_int8["DenseValuesCompressor.0"]["errors"]["b"]
    assert error.shape == (50,) and error.any()


def test_the_error_of_vectors_is_loaded(state_of_int8: Any) -> None:
    loaded = vectors(alone(), method("int8"), 0, copy.deepcopy(state_of_int8))[1]
    error = state_of_int8["DenseValuesCompressor.0"]["errors"]["b"]
    assert torch.equal(loaded["DenseValuesCompressor.0"]["errors"]["b"], error)


def test_a_state_with_the_error_of_vectors_is_refused_where_vectors_have_none(state_of_int8: Any) -> None:
    with pytest.raises(ValueError, match="state of other compressors"):
        vectors(alone(), method("fp32"), 0, copy.deepcopy(state_of_int8))


def counts(compressor: Any, gradient: Tensor, epoch: int = 0) -> list[int]:
    """Elements that a matrix and a vector send: the largest of each."""
    ranks, found = Ranks(1, lambda: compressor, [(40, 50), (500,)]), []
    ranks.states[0].begin_epoch(epoch)
    mean = ranks.step([gradient])
    for part, whole in zip(mean.split([2000, 500]), gradient.split([2000, 500]), strict=True):
        sent = part.nonzero().view(-1)
        assert torch.equal(sent, whole.abs().topk(sent.numel()).indices.sort().values)
        found.append(sent.numel())
    return found


@pytest.mark.parametrize(("vector_ratio", "expected"), [(None, [20, 5]), (0.1, [20, 50]), (10, [20, 50])])
def test_vectors_join_the_selection_at_a_ratio_of_their_own(vector_ratio: Any, expected: list[int]) -> None:
    compressor = methods.DGCCompressor(0.01, ResidualMemory(), vectors="sparse", vector_ratio=vector_ratio)
    assert counts(compressor, normal(2500, seed=0)) == expected


def test_a_warm_up_sends_as_much_of_vectors() -> None:
    warmup: Any = {"warmup_epochs": 2, "warmup_coeff": [0.1, 0.01]}
    compressor = methods.DGCCompressor(0.001, ResidualMemory(), vectors="sparse", vector_ratio=0.02, **warmup)
    for epoch, expected in enumerate(([200, 50], [20, 10], [2, 10])):
        assert counts(compressor, normal(2500, seed=epoch), epoch) == expected, epoch


def test_momentum_of_sparse_vectors_is_the_memory_s() -> None:
    compressor = methods.DGCCompressor(0.05, DGCSGDMemory(0.9), vectors="sparse", vector_ratio=0.5)
    state = vectors(alone(), compressor, 3)[1]
    (only,) = (name for name in state if name.startswith(("DGC", "Dense")))
    assert state[only]["velocities"].keys() == {"w", "b"}
