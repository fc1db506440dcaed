"""The small quantizing and sampling compressors and EF21, each against its definition."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from core.ranks import Ranks, normal
from optim import nets
from refusals import refuse
from states import redistributed

from dgc import compression as methods
from dgc import contrib, paper
from dgc.codes.uniform import DenseValuesCompressor
from dgc.core.envelope import sealed_bytes
from dgc.memory import ResidualMemory
from dgc.optim import MuonWithAdamW, muon_groups
from dgc.testing import Fleet

N = 600


def once(make: Any, g: Any) -> Any:
    return Ranks(1, make, [tuple(g.shape)]).step([g.reshape(-1)]).view(g.shape)


def test_signs_their_majority_and_their_average() -> None:
    g = normal(N, seed=0)
    torch.testing.assert_close(once(methods.ScaledSignCompressor, g), g.sign() * g.abs().mean())
    signs = torch.tensor([1.0, -1, 1, 1, 8, 8, -8, 8])
    assert torch.equal(Ranks(1, methods.ScaledSignCompressor, [(4,), (4,)]).step([signs]), signs)
    elections: list[tuple[Any, Any]] = [
        ([[1.0, -2, 3, 0.1], [-1.0, -5, 3, 0.1], [9.0, 1, 3, -7]], [1, -1, 1, 1]),
        ([[1.0, 1], [-1.0, 1]], [0, 1]),
        ([[1.0, -1], [0.0, 0], [0.0, 0]], [1, -1]),  # a rank of zeros does not vote
    ]
    for votes, decided in elections:
        ranks = Ranks(len(votes), methods.SignSGDCompressor, [(len(decided),)])
        assert ranks.step([torch.tensor(vote) for vote in votes]).tolist() == decided
    beta, m = 0.9, torch.zeros(N)
    ranks = Ranks(1, partial(methods.SignSGDCompressor, momentum=beta), [(N,)])
    for step in range(20):
        g = normal(N, seed=step)
        m = beta * m + (1 - beta) * g
        assert (ranks.step([g]) == m.sign())[m.abs() > 1e-6].all()


KEEPING: dict[str, Any] = {
    "signs": methods.ScaledSignCompressor,
    "momentum": partial(methods.SignSGDCompressor, momentum=0.9),
    "ternary": methods.ThresholdCompressor,
    "levels": partial(methods.QSGDCompressor, error_feedback=True),
    "fp16 values": partial(DenseValuesCompressor, "fp16"),
    "random": partial(contrib.RandomKCompressor, 0.1, error_feedback=True),
}


@pytest.mark.parametrize("make", KEEPING.values(), ids=KEEPING)
def test_residuals_take_turns_in_two_vectors_and_a_dropped_step_keeps_its_own(make: Any) -> None:
    """New memory in each step would cost more than the codes: the system clears it page by page."""
    ranks, used = Ranks(1, make, [(N,)]), list[int]()
    for step in range(6):
        g, before = normal(N, seed=step), ranks.errors()[0].clone()
        g[3] = float("nan") if step == 3 else g[3]
        (result,), _ = ranks.exchange([g])
        assert (result.nonfinite is not None) == (step == 3)
        if step == 3:
            ranks.states[0].rollback(ranks.buckets[0])
            assert torch.equal(ranks.errors()[0], before + g.nan_to_num())
        used.append(ranks.errors()[0].data_ptr())
    assert len(set(used)) == 2 and used[2] == used[3]


STOCHASTIC = {
    "qsgd, 4 bits": methods.QSGDCompressor,
    "qsgd, 2 bits": lambda: methods.QSGDCompressor(bits=2, block=None),
    "qsgd, l2": lambda: methods.QSGDCompressor(bits=8, norm="l2"),
    "terngrad": lambda: contrib.TernGradCompressor(clip=None),
    "natural": contrib.NaturalCompressor,
    "random k": lambda: contrib.RandomKCompressor(0.1, error_feedback=False),
    "random block": lambda: contrib.RandomBlockCompressor(0.1, error_feedback=False),
    "atomo": lambda: contrib.AtomoCompressor(3),
}


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.usefixtures("no_type_checks")
def test_unbiased(name: Any) -> None:
    """The mean over many steps is the gradient; its error falls as one over the root of their number."""
    g, draws = normal(24 * 25, seed=2), 300

    def distance(steps: int) -> float:
        ranks = Ranks(1, STOCHASTIC[name], [(24, 25)])
        return float((sum(ranks.step([g]).double() for _ in range(steps)) / steps - g).norm() / g.norm())

    few, many = distance(draws // 16), distance(draws)
    assert many < 0.25 and many < 0.5 * few


@pytest.mark.parametrize("name", STOCHASTIC)
def test_randomness_repeats_with_the_seed_and_differs_between_steps_and_ranks(name: Any) -> None:
    """And torch's generator is left alone. Means over ranks that hold the same gradient are better than one's."""
    g, before = normal(24 * 25, seed=2), torch.get_rng_state()
    first, second = (Ranks(1, STOCHASTIC[name], [(24, 25)]) for _ in range(2))
    a, b = [first.step([g]) for _ in range(2)], [second.step([g]) for _ in range(2)]
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and not torch.equal(a[0], a[1])
    assert torch.equal(torch.get_rng_state(), before)
    if name in ("qsgd, 4 bits", "terngrad", "natural"):
        assert (Ranks(8, STOCHASTIC[name], [(24, 25)]).step([g] * 8) - g).norm() < 0.6 * (a[0] - g).norm()


def test_levels_of_stochastic_methods_and_the_nearest_level_of_a_block() -> None:
    """QSGD has 7 levels in 4 bits, of the L2 norm or of the largest magnitude."""
    g = normal(N, seed=5)
    for norm, scale in (("l2", g.norm()), ("max", g.abs().max())):
        levels = 7 * once(partial(methods.QSGDCompressor, 4, None, norm), g) / scale
        assert levels.any() and torch.allclose(levels, levels.round(), atol=1e-4)
    assert methods.QSGDCompressor(bits=4).compress_ratio == 1 / 8
    g = normal(5000, seed=7)
    for bits, levels in ((4, 7), (8, 127)):
        sent = once(partial(methods.BlockwiseCompressor, bits=bits, block=512), g)
        for part, got in zip(g.split(512), sent.split(512), strict=True):
            assert (got - part).abs().max() <= part.abs().max() / levels * 0.5001
    ranks = Ranks(1, partial(methods.BlockwiseCompressor, block=512), [(512,), (513,)])
    ranks.step([normal(1025, seed=0)])
    # a short last block is no full one
    assert ranks.world.meters[0].payload_bytes == sealed_bytes(3 * 4 + 512 + 513)


def test_every_wire_of_threshold_codes_gives_the_same_bits_in_as_few_bytes_as_can_be() -> None:
    wires, shapes = ("gather", "scatter", "server"), [(7, 5), (33,), (1,), (0, 3)]
    every: tuple[dict[str, Any], ...] = ({}, {"threshold": None}, {"bits": 1, "threshold": 0.0})
    for size, settings in product((2, 3), every):
        makes = [partial(methods.ThresholdCompressor, wire=wire, **settings) for wire in wires]
        gather, scatter, server = (Ranks(size, make, shapes) for make in makes)
        for step in range(3):
            own = [normal(35 + 33 + 1, seed=10 * step + rank) for rank in range(size)]
            mean = gather.step(own)
            assert torch.equal(mean, scatter.step(own)) and torch.equal(mean, server.step(own)), settings
        assert torch.equal(gather.errors()[0], scatter.errors()[0])
    # Codes for each rank and the packed share, each sealed. Sums of many ranks need more than a byte.
    codes = 64 * 64 // 4
    for size, bits in ((2, 3), (3, 3), (4, 4), (8, 5)):
        ranks = Ranks(size, partial(methods.ThresholdCompressor, wire="scatter"), [(64, 64)])
        ranks.step([normal(64 * 64, seed=rank) for rank in range(size)])
        share = 4 * -(-codes // (4 * size))
        sums = -(-share * 4 * bits // 8)
        assert ranks.world.meters[0].payload_bytes == size * sealed_bytes(share) + sealed_bytes(sums), size
    mean = Ranks(130, partial(methods.ThresholdCompressor, threshold=0.1), [(9,)]).step([torch.ones(9)] * 130)
    torch.testing.assert_close(mean, torch.full((9,), 0.1))
    factors = (1.0, 1e-6, 1e8)
    fleets = [Ranks(3, partial(methods.ThresholdCompressor, threshold=None), [(300,)]) for _ in factors]
    for step in range(3):
        own = [normal(300, seed=7 * step + rank) for rank in range(3)]
        first, *others = (fleet.step([g * x for g in own]) for fleet, x in zip(fleets, factors, strict=True))
        for factor, found in zip(factors[1:], others, strict=True):
            torch.testing.assert_close(found, first * factor, rtol=1e-5, atol=1e-30)


TWO_MATRICES = [(40, 5), (3, 7)]


def ef21(ratio: float = 0.1, beta: float = 0.2) -> Any:
    return methods.EF21Compressor(methods.DGCCompressor(ratio, ResidualMemory(), selector="exact"), beta)


def test_ef21_by_definition_and_estimates_and_momenta_differ_by_the_errors() -> None:
    for size in (1, 3):
        fast, defined = Ranks(size, ef21, TWO_MATRICES), Ranks(size, partial(paper.EF21, 0.1, 0.2), TWO_MATRICES)
        for step in range(12):
            own = [normal(221, seed=10 * step + rank) for rank in range(size)]
            torch.testing.assert_close(fast.step(own), defined.step(own), rtol=0, atol=1e-6)
    # After a dropped step too.
    ranks = Ranks(3, ef21, TWO_MATRICES)
    for step in range(5):
        own = [normal(221, seed=10 * step + rank) for rank in range(3)]
        if step == 3:
            own[1][7] = float("nan")
        (result, *_), _ = ranks.exchange(own)
        assert (result.nonfinite is not None) == (step == 3)
        if step == 3:
            for states, bucket in zip(ranks.states, ranks.buckets, strict=True):
                states.rollback(bucket)
    saved: list[Any] = [states.state_dict() for states in ranks.states]
    for loaded in (saved, redistributed(saved, 2), redistributed(saved, 5)):
        for name, shape in zip(("p0", "p1"), TWO_MATRICES, strict=True):
            parts = [[state[table][name].double() for state in loaded] for table in ("momentum", "residuals")]
            difference = sum(m - e for m, e in zip(*parts, strict=True)) / len(loaded)
            assert difference.shape == shape
            torch.testing.assert_close(difference, loaded[0]["estimate"][name].double(), rtol=0, atol=1e-6)


EF21_INNER = [
    methods.DenseCompressor,
    partial(methods.QSGDCompressor, error_feedback=True),
    methods.TwoPhaseCompressor,
]


@pytest.mark.parametrize("inner", EF21_INNER)
def test_ef21_drops_a_step_with_a_gradient_that_is_too_large_for_its_momentum(inner: Any) -> None:
    """Otherwise the estimates would have what the momenta do not have."""
    fleet = Fleet(lambda: methods.EF21Compressor(inner(), 0.05), 2, [torch.zeros(40)])
    own = [[torch.ones(40)] for _ in range(2)]
    fleet.step(own)
    before = [states.state_dict()["estimate"]["p0"] for states in fleet.states]
    fleet.step([[own[0][0].where(torch.arange(40) > 0, 1e21)], own[1]])
    assert fleet.nonfinite == ["the gradient of p0 on rank 0 has NaN or inf, or is 2**64 or more"] * 2
    assert nets.same([states.state_dict()["estimate"]["p0"] for states in fleet.states], before)
    for _ in range(200):
        mean = fleet.step(own)[0]
    torch.testing.assert_close(mean, torch.ones(40), rtol=0, atol=1e-3)


def test_ef21_of_ef21_is_refused() -> None:
    refuse(
        "EF21 exchanges changes already", methods.EF21Compressor, methods.EF21Compressor(methods.DenseCompressor())
    )


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")
def test_without_compression_it_is_muon_without_nesterov() -> None:
    def muon(model: Any, **options: Any) -> Any:
        return MuonWithAdamW(muon_groups(model, ["last.*"]), lr=0.01, ns_precision="fp32", **options)

    model, other = nets.net(), nets.net()
    for net in (model, other):
        for p in (net.first.bias, net.spare.bias, *net.last.parameters()):
            p.requires_grad_(False)
    method = methods.EF21Compressor(methods.DenseCompressor())
    nets.train(model, nets.wrap(model, nets.alone(), partial(muon, momentum=0.0), compression=method), range(5))
    nets.train(other, muon(other, nesterov=False), range(5))
    nets.assert_same(model, other)
