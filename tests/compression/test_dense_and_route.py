"""Dense exchanges, casts, Horovod's own compressions, and which rule takes which tensor."""

from typing import Any

import pytest
import torch
from compression.ranks import Ranks, normal

from dgc import compression as methods
from dgc.bucket import make_bucket
from dgc.compression import Route, Rule
from dgc.memory import ClipByNorm, DGCSGDMemory, NoMemory, ResidualMemory

N = 301


def reduce_all(make: Any, own: Any, dtype: Any = torch.float32) -> Any:
    results, mean = Ranks(len(own), make, {"w": (N,)}, dtype).exchange(own)
    assert all(isinstance(result, methods.DenseResult) for result in results) and mean.dtype == dtype
    return mean


def gradients(size: Any, scale: float = 1.0) -> Any:
    return [scale * normal(N, seed=rank) for rank in range(size)]


def test_only_a_compressor_that_decides_has_a_dense_share_and_dense_leaves_nan_to_the_user() -> None:
    made = (methods.DenseCompressor(), methods.PowerSGDCompressor(1), methods.DGCCompressor(0.01, NoMemory()))
    shares = [Ranks(1, lambda one=one: one, [(N,)]).states[0].dense_share for one in made]
    assert shares == [None, None, 0.0]
    ranks, (own,) = Ranks(1, methods.DenseCompressor, {"w": (N,)}), gradients(1)
    own[7] = float("nan")
    ranks.buckets[0].flat.copy_(own)
    ranks.world.converse("b", [ranks.states[0].reduce(ranks.buckets[0])])
    assert ranks.buckets[0].flat.isnan().nonzero().tolist() == [[7]]


def test_bf16_adds_in_fp32_what_each_rank_rounds_once_and_nothing_is_kept_between_steps() -> None:
    """256 + 1 + 1 is 256 where bf16 adds, and 258 in fp32."""
    own = [torch.full((N,), value) for value in (256.0, 1.0, 1.0)]
    assert (reduce_all(methods.BF16Compressor, own) == 258 / 3).all()
    own = gradients(3)
    expected = sum(g.bfloat16().float() for g in own) / 3
    torch.testing.assert_close(reduce_all(methods.BF16Compressor, own), expected, rtol=1e-6, atol=1e-7)
    assert reduce_all(methods.BF16Compressor, gradients(2, 1e30)).isfinite().all()
    assert (reduce_all(methods.FP16Compressor, [torch.full((N,), 7e4)] * 2) == float("inf")).all()
    for make in (methods.DenseCompressor, methods.FP16Compressor, methods.BF16Compressor):
        for dtype in (torch.float16, torch.bfloat16):
            own = [g.to(dtype) for g in gradients(3)]
            mean, expected = reduce_all(make, own, dtype), sum(g.float() for g in own) / 3
            torch.testing.assert_close(mean.float(), expected, rtol=2e-2, atol=2e-2)
        (states,) = Ranks(1, make, {"w": (3,)}).states
        assert states.state_dict() == {} and list(states.errors()) == []
        assert states.compress_ratio == 1.0 and states.compressor.correction is None
        states.load_state_dict({})


def segment(name: Any, *shape: Any) -> Any:
    return make_bucket("b", [(name, torch.zeros(shape))]).segments[0]


def test_what_rules_match_and_the_first_that_does_wins() -> None:
    first, second, last = methods.DenseCompressor(), methods.FP16Compressor(), methods.BF16Compressor()
    route = Route([Rule(first, name="head.*"), Rule(second, min_numel=100), Rule(last)])
    assert route.compressor_for(segment("head.weight", 20, 20)) is first
    assert route.compressor_for(segment("body.weight", 10, 10)) is second
    assert route.compressor_for(segment("body.weight", 9, 11)) is last
    assert route.rules[0].compressor is first
    with pytest.raises(ValueError, match=r"no rule matches b of shape \(3,\)"):
        Route([Rule(methods.DenseCompressor(), min_dim=2)]).compressor_for(segment("b", 3))
    # Each with a tensor that it matches and one that it does not.
    rows: list[tuple[dict[str, Any], Any, Any]] = [
        ({"name": "*.weight"}, segment("a.b.weight", 2), segment("a.b.bias", 2)),
        ({"name": "*.Weight"}, segment("a.Weight", 2), segment("a.weight", 2)),
        ({"name": "layer[12].*"}, segment("layer2.w", 2), segment("layer3.w", 2)),
        ({"min_dim": 2}, segment("x", 4, 1), segment("x", 4)),
        ({"max_dim": 1}, segment("x"), segment("x", 4, 1)),
        ({"min_numel": 8}, segment("x", 2, 4), segment("x", 7)),
        ({"max_numel": 8}, segment("x", 2, 4), segment("x", 9)),
        ({"name": "x", "min_dim": 2, "max_numel": 8}, segment("x", 2, 4), segment("y", 2, 4)),
    ]
    for options, one, other in rows:
        rule = Rule(methods.DenseCompressor(), **options)
        assert rule.matches(one) and not rule.matches(other), options
    assert Rule(methods.DenseCompressor()).matches(segment("x"))


def test_what_a_compressor_does_not_accept_goes_to_its_fallback_and_equal_ones_are_one() -> None:
    sparse = methods.DGCCompressor(0.01, NoMemory())
    route = Route([Rule(sparse)])
    assert route.compressor_for(segment("w", 3, 3)) is sparse
    bias, other = (route.compressor_for(segment(name, 3)) for name in ("b", "c"))
    assert bias is other is sparse.fallback and isinstance(bias, methods.DenseCompressor)
    assert isinstance(methods.DGCCompressor(0.01, NoMemory(), fp16_values=True).fallback, methods.FP16Compressor)

    class OfAUser(methods.DenseCompressor):
        """May have settings."""

    def clipped(norm: float, **options: Any) -> methods.DGCCompressor:
        return methods.DGCCompressor(0.01, DGCSGDMemory(0.9, gradient_clipping=ClipByNorm(norm)), **options)

    def chosen(*compressors: Any) -> list[Any]:
        route = Route([Rule(compressor, name=f"{i}.*") for i, compressor in enumerate(compressors)])
        return [route.compressor_for(segment(f"{i}.bias", 3)) for i in range(len(compressors))]

    plain = [methods.DGCCompressor(ratio, ResidualMemory()) for ratio in (0.01, 0.1)]
    found = chosen(*plain, methods.DenseCompressor(), methods.SVDCompressor(2))
    assert all(compressor is plain[0].fallback for compressor in found)
    for pair, are_one in (
        ((clipped(1.0), clipped(1.0)), True),
        ((clipped(1.0), clipped(2.0)), False),
        ((clipped(1.0), plain[0]), False),
        ((clipped(1.0), clipped(1.0, fp16_values=True)), False),
        ((methods.FP16Compressor(), methods.DGCCompressor(0.1, NoMemory(), fp16_values=True)), True),
        ((methods.FP16Compressor(), methods.BF16Compressor()), False),
        ((OfAUser(), OfAUser()), False),
        ((clipped(1.0, dense_values="int8"), clipped(1.0, dense_values="int8")), False),  # each has a state
        ((methods.DGCCompressor(0.1, NoMemory(), dense_values="int8"),) * 2, True),
    ):
        first, second = chosen(*pair)
        assert (first is second) == are_one, pair
