"""The small quantizing and sampling compressors and EF21, each against its definition."""

from collections.abc import Iterator
from functools import partial
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


def test_scaled_signs_carry_the_mean_magnitude() -> None:
    g = normal(N, seed=0)
    torch.testing.assert_close(once(methods.ScaledSignCompressor, g), g.sign() * g.abs().mean())


def test_scaled_signs_have_a_scale_for_each_tensor() -> None:
    signs = torch.tensor([1.0, -1, 1, 1, 8, 8, -8, 8])
    assert torch.equal(Ranks(1, methods.ScaledSignCompressor, [(4,), (4,)]).step([signs]), signs)


@pytest.mark.parametrize(
    ("votes", "decided"),
    [
        pytest.param([[1.0, -2, 3, 0.1], [-1.0, -5, 3, 0.1], [9.0, 1, 3, -7]], [1, -1, 1, 1], id="a majority"),
        pytest.param([[1.0, 1], [-1.0, 1]], [0, 1], id="a tie"),
        pytest.param([[1.0, -1], [0.0, 0], [0.0, 0]], [1, -1], id="a rank of zeros does not vote"),
    ],
)
def test_the_majority_decides_the_sign(votes: Any, decided: list[int]) -> None:
    ranks = Ranks(len(votes), methods.SignSGDCompressor, [(len(decided),)])
    assert ranks.step([torch.tensor(vote) for vote in votes]).tolist() == decided


def test_signs_of_momentum_are_signs_of_its_average() -> None:
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


every_keeping = pytest.mark.parametrize("make", KEEPING.values(), ids=KEEPING)


def steps_with_nan_in_the_fourth(make: Any) -> Iterator[tuple[int, Ranks, Any, Any, Any]]:
    """The number of each step, the rank, its gradient, its residual before the step, and what the step found."""
    ranks = Ranks(1, make, [(N,)])
    for step in range(6):
        g, before = normal(N, seed=step), ranks.errors()[0].clone()
        g[3] = float("nan") if step == 3 else g[3]
        (result,), _ = ranks.exchange([g])
        if step == 3:
            ranks.states[0].rollback(ranks.buckets[0])
        yield step, ranks, g, before, result


@every_keeping
def test_residuals_take_turns_in_two_vectors(make: Any) -> None:
    """New memory in each step would cost more than the codes: the system clears it page by page."""
    used = [ranks.errors()[0].data_ptr() for _, ranks, *_ in steps_with_nan_in_the_fourth(make)]
    assert len(set(used)) == 2 and used[2] == used[3]


@every_keeping
def test_a_dropped_step_keeps_its_gradient_in_the_residual(make: Any) -> None:
    for step, ranks, g, before, result in steps_with_nan_in_the_fourth(make):
        assert (result.nonfinite is not None) == (step == 3)
        if step == 3:
            assert torch.equal(ranks.errors()[0], before + g.nan_to_num())


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


every_stochastic = pytest.mark.parametrize("name", STOCHASTIC)


def drawn(name: str, steps: int = 2) -> list[Any]:
    """The means of steps with the same gradient, with the default seed."""
    ranks = Ranks(1, STOCHASTIC[name], [(24, 25)])
    return [ranks.step([normal(24 * 25, seed=2)]) for _ in range(steps)]


@every_stochastic
def test_randomness_repeats_with_the_seed(name: Any) -> None:
    a, b = drawn(name), drawn(name)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@every_stochastic
def test_randomness_differs_between_steps(name: Any) -> None:
    first, second = drawn(name)
    assert not torch.equal(first, second)


@every_stochastic
def test_torch_s_generator_is_left_alone(name: Any) -> None:
    before = torch.get_rng_state()
    drawn(name)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["qsgd, 4 bits", "terngrad", "natural"])
def test_randomness_differs_between_ranks(name: Any) -> None:
    """The mean over ranks that hold the same gradient is better than the code of one."""
    g, (alone, *_) = normal(24 * 25, seed=2), drawn(name)
    assert (Ranks(8, STOCHASTIC[name], [(24, 25)]).step([g] * 8) - g).norm() < 0.6 * (alone - g).norm()


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_qsgd_has_7_levels_of_its_norm_in_4_bits(norm: str) -> None:
    g = normal(N, seed=5)
    scale = g.norm() if norm == "l2" else g.abs().max()
    levels = 7 * once(partial(methods.QSGDCompressor, 4, None, norm), g) / scale
    assert levels.any() and torch.allclose(levels, levels.round(), atol=1e-4)


def test_the_ratio_of_4_bits_is_an_eighth() -> None:
    assert methods.QSGDCompressor(bits=4).compress_ratio == 1 / 8


@pytest.mark.parametrize(("bits", "levels"), [(4, 7), (8, 127)])
def test_a_block_takes_the_nearest_level_of_its_largest_element(bits: int, levels: int) -> None:
    g = normal(5000, seed=7)
    sent = once(partial(methods.BlockwiseCompressor, bits=bits, block=512), g)
    for part, got in zip(g.split(512), sent.split(512), strict=True):
        assert (got - part).abs().max() <= part.abs().max() / levels * 0.5001


def test_a_short_last_block_is_no_full_one() -> None:
    ranks = Ranks(1, partial(methods.BlockwiseCompressor, block=512), [(512,), (513,)])
    ranks.step([normal(1025, seed=0)])
    assert ranks.world.meters[0].payload_bytes == sealed_bytes(3 * 4 + 512 + 513)


@pytest.mark.parametrize("settings", [{}, {"threshold": None}, {"bits": 1, "threshold": 0.0}], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_every_wire_of_threshold_codes_gives_the_same_bits(size: int, settings: dict[str, Any]) -> None:
    wires, shapes = ("gather", "scatter", "server"), [(7, 5), (33,), (1,), (0, 3)]
    makes = [partial(methods.ThresholdCompressor, wire=wire, **settings) for wire in wires]
    gather, scatter, server = (Ranks(size, make, shapes) for make in makes)
    for step in range(3):
        own = [normal(35 + 33 + 1, seed=10 * step + rank) for rank in range(size)]
        mean = gather.step(own)
        assert torch.equal(mean, scatter.step(own)) and torch.equal(mean, server.step(own))
    assert torch.equal(gather.errors()[0], scatter.errors()[0])


@pytest.mark.parametrize(("size", "bits"), [(2, 3), (3, 3), (4, 4), (8, 5)])
def test_scattered_threshold_codes_take_as_few_bytes_as_can_be(size: int, bits: int) -> None:
    """Codes for each rank with the packed share, each sealed."""
    codes = 64 * 64 // 4
    ranks = Ranks(size, partial(methods.ThresholdCompressor, wire="scatter"), [(64, 64)])
    ranks.step([normal(64 * 64, seed=rank) for rank in range(size)])
    share = 4 * -(-codes // (4 * size))
    sums = -(-share * 4 * bits // 8)
    assert ranks.world.meters[0].payload_bytes == size * sealed_bytes(share) + sealed_bytes(sums)


def test_sums_of_many_ranks_that_need_more_than_a_byte_are_right() -> None:
    mean = Ranks(130, partial(methods.ThresholdCompressor, threshold=0.1), [(9,)]).step([torch.ones(9)] * 130)
    torch.testing.assert_close(mean, torch.full((9,), 0.1))


@pytest.mark.parametrize("factor", [1e-6, 1e8])
def test_a_threshold_of_the_gradient_has_its_scale(factor: float) -> None:
    fleets = [Ranks(3, partial(methods.ThresholdCompressor, threshold=None), [(300,)]) for _ in range(2)]
    for step in range(3):
        own = [normal(300, seed=7 * step + rank) for rank in range(3)]
        first, found = (fleet.step([g * x for g in own]) for fleet, x in zip(fleets, (1.0, factor), strict=True))
        torch.testing.assert_close(found, first * factor, rtol=1e-5, atol=1e-30)


TWO_MATRICES = [(40, 5), (3, 7)]


def ef21(ratio: float = 0.1, beta: float = 0.2) -> Any:
    return methods.EF21Compressor(methods.DGCCompressor(ratio, ResidualMemory(), selector="exact"), beta)


@pytest.mark.parametrize("size", [1, 3])
def test_ef21_is_its_definition(size: int) -> None:
    fast, defined = Ranks(size, ef21, TWO_MATRICES), Ranks(size, partial(paper.EF21, 0.1, 0.2), TWO_MATRICES)
    for step in range(12):
        own = [normal(221, seed=10 * step + rank) for rank in range(size)]
        torch.testing.assert_close(fast.step(own), defined.step(own), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def states_after_a_dropped_step() -> list[Any]:
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
    return [states.state_dict() for states in ranks.states]


@pytest.mark.parametrize("size", [3, 2, 5])
def test_estimates_of_ef21_differ_from_momenta_by_the_errors(size: int, states_after_a_dropped_step: Any) -> None:
    saved = states_after_a_dropped_step
    loaded = saved if size == 3 else redistributed(saved, size)
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
