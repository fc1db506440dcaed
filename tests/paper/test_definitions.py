"""The fast implementations give the bits of the definitions in dgc/paper: 50 steps, of which one is dropped."""

from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch

import dgc.kernels as kernels
from dgc import paper
from dgc.compression import DGCCompressor, ThresholdCompressor, TwoPhaseCompressor
from dgc.core.bucket import make_bucket
from dgc.memory import ClipByNorm, DGCSGDMemory, ResidualMemory
from dgc.sparse.selectors import Exact, Laplace, Predicted, Radix
from dgc.testing import Fleet

pytestmark = pytest.mark.usefixtures("no_type_checks")
SIZES = (1, 2, 3)
STEPS, DROPPED, EPOCH = 50, 17, 10
SHAPES = ((20, 10), (6, 5, 2), (20, 5), (3, 1), (1, 1), (0, 4))
LIKE = [torch.zeros(shape) for shape in SHAPES]


def normal(shape: Any, generator: Any) -> Any:
    return torch.randn(shape, generator=generator)


def in_halves(shape: Any, generator: Any) -> Any:
    """Many equal magnitudes, and zeros."""
    return (torch.randn(shape, generator=generator) * 2).round() / 2


def heavy_tailed(shape: Any, generator: Any) -> Any:
    return torch.randn(shape, generator=generator) ** 3


def errors(fleet: Any) -> Any:
    """The sum of what each rank has not sent, without the signs of zeros."""
    each = [list(compressor.errors()) for compressor in fleet.states]
    return [torch.stack(own).sum(0) + 0.0 for own in each if own]


def same_bits(ours: Any, theirs: Any) -> Any:
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(ours, theirs, strict=True))


def run(make: Any, define: Any, size: Any, shapes: Any = SHAPES, draw: Any = normal, after: Any = None) -> Any:
    """Both in lockstep, compared in every step; the means of all. after: a further comparison of their fleets."""
    like, history = [torch.zeros(shape) for shape in shapes], []
    fleets = [Fleet(make, size, like, seed) for seed, make in enumerate((make, define))]
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        own = [[draw(shape, generator) for shape in shapes] for _ in range(size)]
        if step == DROPPED:
            own[-1][0].view(-1)[0] = float("nan")
        for fleet in fleets:
            for compressor in fleet.states if step % EPOCH == 0 else ():
                compressor.begin_epoch(step // EPOCH)
        means = [fleet.step(own) for fleet in fleets]
        assert fleets[0].nonfinite == fleets[1].nonfinite
        assert (fleets[0].nonfinite[0] is None) == (step != DROPPED)
        assert same_bits(*map(errors, fleets)), f"errors at step {step} of {size} ranks"
        if after is not None:
            after(*fleets)
        if step != DROPPED:
            assert same_bits(*means), f"means at step {step} of {size} ranks"
            history += means[0][0].tolist()
    return tuple(history)


def fast_dgc(
    ratio: Any, momentum: Any, nesterov: Any, masking: Any, limit: Any, epochs: Any, selector: Any
) -> Any:
    """At 3 ranks a quarter of the elements with int64 indices would cost more than dense."""
    memory = DGCSGDMemory(momentum, nesterov, None if limit is None else ClipByNorm(limit), masking)
    warmup = {"warmup_epochs": epochs, "warmup_coeff": 0.25}
    return DGCCompressor(ratio, memory, selector=selector, int32_indices=epochs > 0, **warmup)


def sparse_at_the_same_ratio(fast: Any, definition: Any) -> None:
    for ours, theirs in zip(fast.states, definition.states, strict=True):
        assert ours.dense_share == 0 and ours.compress_ratio == theirs.compress_ratio


def same_momenta(fast: Any, definition: Any) -> None:
    for ours, theirs in zip(fast.states, definition.states, strict=True):
        momentums, expected = ours.state_dict()["momentums"], theirs.state_dict()["U"]
        assert all(torch.equal(momentums[name], u) for name, u in expected.items())


def test_dgc() -> None:
    """With an exact selector, in steps that are sent sparse: the paper has no others."""
    cases = [(0.9, *options) for options in product((False, True), (True, False), (None, 5.0))]
    selectors, others, histories = cycle([Exact(), Radix(), Predicted()]), cycle([1, 3, 3]), []
    for momentum, nesterov, masking, limit in [*cases, (0.0, False, True, None)]:
        options = (0.07, momentum, nesterov, masking, limit, 4 if nesterov ^ masking ^ (limit is None) else 0)
        makes = partial(fast_dgc, *options, next(selectors)), partial(paper.DGC, *options)
        run(*makes, next(others), after=sparse_at_the_same_ratio)
        histories.append(run(*makes, 2, after=sparse_at_the_same_ratio))
    assert len(set(histories)) == len(histories) == 9  # each option matters
    # Of equal ones the first is sent, never a zero, and a zero keeps its momentum.
    for size, selector in zip(SIZES, (Exact(), Radix(), Predicted()), strict=True):
        equal = (0.05, 0.5, False, True, None, 0)
        makes = partial(fast_dgc, *equal, selector), partial(paper.DGC, *equal)
        run(*makes, size, draw=in_halves, after=same_momenta)
    fast, definition = DGCCompressor(0.05, DGCSGDMemory(0.9)), paper.DGC(0.05)
    segments = make_bucket("b", [(str(shape), torch.zeros(shape)) for shape in [*SHAPES, (7,), ()]]).segments
    assert [fast.accepts(s) for s in segments] == [definition.accepts(s) for s in segments]
    assert [definition.accepts(s) for s in segments] == [True] * len(SHAPES) + [False] * 2
    own = [[torch.randn(7), torch.randn(())] for _ in range(3)]

    def mean(compressor: Any) -> Any:
        return Fleet(lambda: compressor.fallback, 3, own[0]).step(own)

    assert same_bits(mean(fast), mean(definition))


def fast_ldte_bs(stop: Any) -> Any:
    return DGCCompressor(0.05, ResidualMemory(), selector=Laplace(stop))


def test_ldte_bs() -> None:
    """In a bucket of one tensor. A single element goes dense in the fast one, which sends all of it too."""
    data = [((40, 25), normal), ((30, 20), heavy_tailed), ((20, 20), in_halves)]
    counts = {"redsync": (1, 2), "tight": (0.8, 1.25), "exact": (1, 1)}
    cases = [(size, stop, *data[(i + size) % 3]) for i, stop in enumerate(counts) for size in SIZES]
    for size, stop, shape, draw in [*cases, (3, "tight", (1, 1), normal)]:
        run(partial(fast_ldte_bs, stop), partial(paper.LDTEBS, 0.05, *counts[stop]), size, (shape,), draw)
    # The fast one lets a tensor fill what others leave of their k: it sends what the definition does, or more.
    shapes, more = ((40, 25), (30, 20), (0, 4), (20, 20)), 0
    like, slots = [torch.zeros(shape) for shape in shapes], 50 + 30 + 20
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        own = [[normal(shape, generator) for shape in shapes]]
        (fast,) = Fleet(partial(fast_ldte_bs, "tight"), 1, like).step(own)
        (definition,) = Fleet(partial(paper.LDTEBS, 0.05), 1, like).step(own)
        sent = definition != 0
        assert torch.equal(fast[sent], definition[sent])
        assert sent.sum() <= fast.count_nonzero() <= slots
        more += int(fast.count_nonzero() - sent.sum())
    assert more > 0


THRESHOLDS = [(2, 0.5), (2, 0.3), (1, 0.0), (1, -0.2)]


def test_threshold() -> None:
    draws, shapes, histories = cycle([normal, in_halves]), (*SHAPES, (7,), ()), []
    for width, t in THRESHOLDS:
        for size, wire in zip(SIZES, ("gather", "scatter", "server"), strict=True):
            makes = partial(ThresholdCompressor, width, t, wire=wire), partial(paper.Threshold, width, t)
            histories.append(run(*makes, size, shapes, next(draws)))
    assert len(set(histories)) == len(histories)
    # t added 5 times is rounded more often than 5 t: exact for t a power of 2, else within 4 roundings.
    differ = 0
    for width, t in [*THRESHOLDS, (2, 0.7)]:
        makes = partial(ThresholdCompressor, width, t), partial(paper.Threshold, width, t)
        fleets = [Fleet(make, 5, LIKE) for make in makes]
        for step in range(10):
            generator = torch.Generator().manual_seed(step)
            own = [[normal(shape, generator) for shape in SHAPES] for _ in range(5)]
            ours, theirs = (fleet.step(own)[0].double() for fleet in fleets)
            bound = 0 if width == 1 or t == 0.5 else 4 * 2.0**-24 * t
            assert float((ours - theirs).abs().max()) <= bound
            assert same_bits(*map(errors, fleets))
            differ += not torch.equal(ours, theirs)
    assert differ > 0


def test_two_phases() -> None:
    draws = cycle([normal, in_halves])
    for size, bits, block in product(SIZES, (8, 4), (64, 256)):
        makes = partial(TwoPhaseCompressor, bits, block), partial(paper.TwoPhase, bits, block)
        run(*makes, size, SHAPES, next(draws))


def test_two_phases_of_16_bits() -> None:
    for size in SIZES:
        run(partial(TwoPhaseCompressor, 16), paper.SixteenBits, size, SHAPES, normal)


def test_the_codes_are_mxnets() -> None:
    """The bytes of the fast one, as in MXNet's worked example (tests/kernels/test_quantizers.py)."""
    for n in (0, 1, 16, 33, 100):
        v, bounds, t = torch.randn(n), torch.tensor([0, n]), torch.tensor([0.5])
        quantizers, one = kernels.of(v).quantize, torch.ones(1)
        assert torch.equal(paper.Threshold(2, 0.5).quantize(v), quantizers.tern_encode(v, bounds, t)[0])
        codes, _ = quantizers.sign_encode(v, bounds, t, one)
        assert torch.equal(paper.Threshold(1, 0.5).quantize(v), codes)
