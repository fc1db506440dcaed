"""PowerSGD: what it recovers, loses and keeps, and its orthonormal rows, for each matrix of a batch by itself."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import case
from core.ranks import normal
from on_ranks import on_ranks
from optim.nets import alone
from states import assert_equal
from torch import Tensor, nn

from dgc.aggregate import Aggregator, AllReduce, Config, PowerSGD, optimizer_step
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import NonFiniteGradientError, PowerSGDCompressor
from dgc.core.bucket import make_bucket
from dgc.engine.state import BucketStates
from dgc.lowrank.matrices import CompressionRule, orthonormalize
from dgc.testing import Fleet, flat
from dgc_models import resnet18

MODES: dict[str, dict[str, Any]] = {
    "half step": {},
    "residual": {"num_iters_per_step": 2},
    "residual 5": {"num_iters_per_step": 5},
    "paper": {"mode": "paper"},
    "cold": {"mode": "paper", "warm_start": False},
    "square": {"mode": "square"},
    "gram-schmidt": {"num_iters_per_step": 2, "orthogonalization": "gram_schmidt"},
    "cholesky": {"mode": "paper", "orthogonalization": "cholesky_qr"},
}
every_mode = pytest.mark.parametrize("settings", MODES.values(), ids=MODES)


def low_rank(r: Any, n: Any, m: Any, seed: Any) -> Any:
    return normal(n, r, seed=seed) @ normal(r, m, seed=seed + 1000)


def fleet_of(shapes: Any, size: int = 1, rank: int = 2, **settings: Any) -> Any:
    return Fleet(lambda: PowerSGDCompressor(rank, **settings), size, [torch.zeros(s) for s in shapes])


USUAL: list[Any] = [(30, 40), (8,), (30, 40), (16, 3, 3, 3), ()]
ODD: list[Any] = [(), (1,), (0, 3), (1, 1), (5, 0), (1, 700), (700, 1), (17, 2, 3, 2)]


@every_mode
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("shapes", "rate"), [(USUAL, 2), (ODD, 1)], ids=["usual shapes", "odd shapes"])
def test_nothing_is_lost_within_rounding(settings: Any, size: Any, shapes: Any, rate: int) -> None:
    fleet = fleet_of(shapes, size, min_compression_rate=rate, **settings)
    for step in range(4):
        own = [[normal(*s, seed=100 * step + 10 * r + i) for i, s in enumerate(shapes)] for r in range(size)]
        given = [e + flat(g).double() for e, g in zip(fleet.errors(), own, strict=True)]
        mean, largest = fleet.step(own)[0].double(), max(float(g.abs().max()) for g in given)
        lost = mean + sum(fleet.errors()) / size - sum(given) / size
        assert fleet.nonfinite == [None] * size and float(lost.abs().max()) <= 8 * 2.0**-24 * largest


exact_modes = pytest.mark.parametrize(
    "settings", [{"num_iters_per_step": 2}, {"num_iters_per_step": 4}, {"mode": "paper"}], ids=str
)


@pytest.mark.parametrize(("r", "count"), [(1, 1), (1, 8), (1, 32), (2, 1), (2, 8), (4, 32)])
@exact_modes
def test_matrices_of_low_rank_arrive_whole(settings: Any, r: int, count: int) -> None:
    """Also many of one shape: the original normalises rank-1 factors by the whole batch's norm."""
    matrices = [10.0 ** (i % 5) * low_rank(r, 40, 60, i) for i in range(count)]
    mean = fleet_of([(40, 60)] * count, rank=r, **settings).step([matrices])[0]
    for found, expected in zip(mean.view(count, 40, 60), matrices, strict=True):
        assert float((found - expected).norm()) < 5e-3 * float(expected.norm())


@exact_modes
def test_matrices_of_several_shapes_arrive_whole(settings: Any) -> None:
    shapes = [(40, 60), (30, 20), (50, 10)]
    whole = flat(matrices := [low_rank(2, *shape, i) for i, shape in enumerate(shapes)])
    assert float((fleet_of(shapes, **settings).step([matrices])[0] - whole).norm() / whole.norm()) < 5e-3


@pytest.mark.parametrize(("half_steps", "expected"), [(1, 1), (2, 1), (4, 2), (6, 3)])
def test_rank_grows_with_half_steps(half_steps: int, expected: int) -> None:
    fleet = fleet_of([(20, 30)], rank=1, num_iters_per_step=half_steps, min_compression_rate=0)
    found = fleet.step([[normal(20, 30)]])[0].view(20, 30)
    assert int(torch.linalg.matrix_rank(found, rtol=1e-5)) == expected


def test_warm_factors_find_the_best_approximation() -> None:
    M = low_rank(10, 40, 60, 0) + normal(40, 60, seed=3)
    fleet = fleet_of([(40, 60)], mode="paper", error_feedback=False)
    for _ in range(30):
        found = fleet.step([[M]])[0].view(40, 60)
    U, s, V = torch.linalg.svd(M)
    torch.testing.assert_close(found, U[:, :2] * s[:2] @ V[:2], rtol=0, atol=0.05)


@pytest.mark.usefixtures("no_type_checks")
def test_each_rank_s_error_stays_bounded() -> None:
    """Ranks with different data. The global form of the paper, e = M - mean(P Q^T), collects g_i - g."""
    targets = [normal(20, 20, seed=r) for r in range(2)]
    fleet, x, norms = fleet_of([(20, 20)], 2, rank=1, num_iters_per_step=2), torch.zeros(20, 20), []
    for _ in range(400):
        x = x - 0.05 * fleet.step([[x - t] for t in targets])[0].view(20, 20)
        norms.append(float(fleet.errors()[0].norm()))
    assert max(norms[200:]) < 3 * max(norms[50:200]) and norms[-1] < 1.5 * norms[199]


@every_mode
def test_zeros_give_zeros(settings: Any) -> None:
    fleet = fleet_of([(30, 40), (30, 40)], **settings)
    for _ in range(3):
        assert not fleet.step([[torch.zeros(30, 40)] * 2])[0].any()


@every_mode
def test_gradients_after_zeros_arrive(settings: Any) -> None:
    """A factor that a zero gradient made zero would let nothing through ever after."""
    fleet = fleet_of([(30, 40), (30, 40)], **settings)
    for _ in range(3):
        fleet.step([[torch.zeros(30, 40)] * 2])
    M = low_rank(1, 30, 40, 0)
    M[0] = 0
    total = sum(fleet.step([[M, torch.zeros(30, 40)]])[0] for _ in range(4))
    share = 0.3 if settings.get("mode") == "square" else 0.9
    assert float(total[:1200] @ M.view(-1)) > share * 4 * float(M.square().sum())


def drop_a_step(settings: Any) -> tuple[Any, list[Any]]:
    """A fleet after a step with inf, with its states before that step."""
    shapes = [(30, 40), (8,), (16, 3, 3, 3)]
    fleet = fleet_of(shapes, 2, **settings)
    for step in range(3):
        fleet.step([[normal(*s, seed=step + r) for s in shapes] for r in range(2)])
    before, bad = [c.state_dict() for c in fleet.states], [torch.zeros(s) for s in shapes]
    bad[2][3] = float("inf")
    fleet.step([[torch.zeros(s) for s in shapes], bad])
    return fleet, before


@every_mode
def test_a_step_is_dropped_for_one_element_that_is_not_finite(settings: Any) -> None:
    fleet, _ = drop_a_step(settings)
    assert fleet.nonfinite == ["the gradient of p2 on rank 1 has NaN or inf, or is 2**64 or more"] * 2


@every_mode
def test_a_dropped_step_changes_no_state(settings: Any) -> None:
    fleet, before = drop_a_step(settings)
    assert_equal(before, [c.state_dict() for c in fleet.states])


@every_mode
def test_torch_s_generator_is_left_alone(settings: Any) -> None:
    generator = torch.get_rng_state()
    drop_a_step(settings)
    assert torch.equal(torch.get_rng_state(), generator)


@every_mode
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matrices_in_half_precision_are_multiplied_in_fp32(dtype: Any, settings: Any) -> None:
    M = low_rank(1, 40, 60, 0).to(dtype)
    half = Fleet(lambda: PowerSGDCompressor(2, **settings), 1, [torch.zeros(40, 60, dtype=M.dtype)])
    full = fleet_of([(40, 60)], **settings)
    for _ in range(3):
        found, expected = half.step([[M]])[0], full.step([[M.float()]])[0]
        torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=0)
    assert torch.equal(half.errors()[0], full.errors()[0])


WITH_FP16 = {name: settings for name, settings in MODES.items() if settings.get("mode") != "square"}
with_fp16 = pytest.mark.parametrize("settings", WITH_FP16.values(), ids=WITH_FP16)


def one_step_on_each_wire(settings: Any) -> Iterator[Any]:
    own = [[normal(40, 60, seed=r), 1 + normal(9, seed=r) / 10] for r in range(2)]
    for wire in ("fp16", "fp32"):
        fleet = fleet_of([(40, 60), (9,)], 2, wire=wire, **settings)
        fleet.step(own)
        yield fleet


@with_fp16
def test_fp16_sends_half_the_bytes(settings: Any) -> None:
    half, full = (fleet.world.meters[0].payload_bytes - 24 for fleet in one_step_on_each_wire(settings))
    assert 2 * half == full


@with_fp16
def test_what_fp16_rounds_off_vectors_is_kept(settings: Any) -> None:
    half, full = one_step_on_each_wire(settings)
    assert half.errors()[0][2400:].any() and not full.errors()[0][2400:].any()


@pytest.mark.parametrize(("rate", "expected"), [(230, 4), (231, 0)])
def test_the_rule_of_compression_counts_the_flattened_matrix(rate: int, expected: int) -> None:
    assert CompressionRule(4, 1, rate).rank_of(512 * 512 * 9, 512, 4608) == expected


def test_a_matrix_is_compressed_only_if_it_has_strictly_more_elements() -> None:
    rule = CompressionRule(1, 2, 2)
    assert [rule.rank_of(numel, 4, 4) for numel in (16, 17)] == [0, 1]


def test_the_original_s_counts_are_of_the_flattened_matrix() -> None:
    powersgd = PowerSGD([torch.zeros(512, 512, 3, 3)], Config(rank=4, num_iters_per_step=1), alone())
    assert (powersgd.uncompressed_num_floats, powersgd.compressed_num_floats) == (2359296, 10240)
    assert int(powersgd.compression_rate) == 230


@pytest.fixture(scope="module")
def resnet18_bucket() -> Any:
    with torch.device("meta"):
        return make_bucket("b", list(resnet18(num_classes=10).named_parameters()))


@pytest.mark.parametrize(("rank", "mib"), [(1, 4.2), (2, 7.5), (4, 14.2), (7, 24.2)])
@pytest.mark.parametrize("settings", [{"mode": "paper"}, {"num_iters_per_step": 2}], ids=["paper", "residual"])
def test_bytes_of_resnet18_are_the_paper_s(settings: Any, rank: int, mib: float, resnet18_bucket: Any) -> None:
    """Table 3 of the paper: MiB in an epoch of 24 steps, with all matrices compressed."""
    compressor = PowerSGDCompressor(rank, min_compression_rate=0, **settings)
    assert round(24 * 4 * compressor.floats_per_step(resnet18_bucket) / 2**20, 1) == mib


class Run:
    """One rank with a bucket for each group of named tensors."""

    def __init__(self, *groups: list[tuple[str, Tensor]], seed: int = 0, **settings: Any) -> None:
        self.states = BucketStates(PowerSGDCompressor(seed=seed, **settings))
        self.buckets = [make_bucket(f"b{i}", group) for i, group in enumerate(groups)]
        for bucket in self.buckets:
            self.states.add(bucket, 1, 0)

    def step(self, number: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for bucket in self.buckets:
            for s in bucket.segments:
                s.of(bucket.flat).copy_(normal(*s.shape, seed=10 * number + int(s.name[1:])))
            LockstepWorld(1).converse(bucket.name, [self.states.reduce(bucket)])
            found |= {s.name: s.of(bucket.flat).clone() for s in bucket.segments}
        return found


def moved_to_other_buckets(settings: Any) -> tuple[Run, Run, Any]:
    """A run after three steps, another with other buckets that has loaded its state, and that state."""
    shapes = ((30, 40), (8,), (30, 40), (16, 3, 3, 3))
    p0, p1, p2, p3 = ((f"p{i}", torch.zeros(s)) for i, s in enumerate(shapes))
    first = Run([p0, p1, p2, p3], rank=2, **settings)
    second = Run([p3, p2], [p1, p0], seed=3, rank=2, **settings)
    for number in range(3):
        first.step(number)
    state = first.states.state_dict()
    second.states.load_state_dict(state)
    return first, second, state


@every_mode
def test_errors_are_loaded_in_other_buckets(settings: Any) -> None:
    _, second, state = moved_to_other_buckets(settings)
    assert_equal(state["errors"], second.states.state_dict()["errors"])
    second.step(3)


# The factors of a square are the factors of a bucket.
WARM = {k: v for k, v in MODES.items() if v.get("mode") != "square" and v.get("warm_start", True)}
warm_modes = pytest.mark.parametrize("settings", WARM.values(), ids=WARM)


@warm_modes
def test_the_whole_state_is_loaded_in_other_buckets(settings: Any) -> None:
    _, second, state = moved_to_other_buckets(settings)
    assert_equal(state, second.states.state_dict())


@warm_modes
def test_it_resumes_in_other_buckets(settings: Any) -> None:
    first, second, _ = moved_to_other_buckets(settings)
    for number in range(3, 6):
        ours, theirs = first.step(number), second.step(number)
        for name, mean in ours.items():
            torch.testing.assert_close(theirs[name], mean, rtol=0, atol=1e-4)


@every_mode
def test_a_bucket_of_vectors_leaves_the_half_steps_of_matrices_in_the_state(settings: Any) -> None:
    """The other factor is next."""
    p0, p1 = ("p0", torch.zeros(30, 40)), ("p1", torch.zeros(8))
    here, there = (Run([p0], [p1], rank=1, **settings) for _ in range(2))
    here.step(0)
    there.states.load_state_dict(here.states.state_dict())
    assert torch.equal(here.step(1)["p0"], there.step(1)["p0"])


@pytest.mark.parametrize("rank", [1, 4])
def test_a_resumed_run_may_have_another_rank(rank: int) -> None:
    fleet = fleet_of([(30, 40)], num_iters_per_step=2)
    fleet.step([[normal(30, 40)]])
    state = fleet.states[0].state_dict()
    other = fleet_of([(30, 40)], rank=rank, num_iters_per_step=2)
    other.states[0].load_state_dict(state)
    P = other.states[0].state_dict()["P"]["p0"]
    assert P.shape == (30, rank)
    torch.testing.assert_close(P[:, :1].abs(), state["P"]["p0"][:, :1].abs())
    assert other.step([[normal(30, 40, seed=1)]])[0].isfinite().all()


def test_the_first_steps_are_dense_if_asked_for() -> None:
    fleet = fleet_of([(30, 40), (7,)], 2, start_compressing_after_num_steps=2, num_iters_per_step=2)
    for step in range(4):
        own = [[normal(30, 40, seed=9 * step + r), normal(7, seed=r)] for r in range(2)]
        mean, (one, other) = fleet.step(own)[0], map(flat, own)
        assert torch.equal(mean, (one + other) / 2) == (step < 2)
        assert (fleet.states[0].compress_ratio == 1) == (step < 2)
    assert fleet.world.meters[0].payload_bytes == 2 * (4 * 1207 + 24) + 2 * (4 * (2 * 70 + 7) + 24)


def test_three_lines_train() -> None:
    """Gradients are zero after a step, whether or not zero_grad is called."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = Config(rank=1, min_compression_rate=5, num_iters_per_step=2, start_compressing_after_num_steps=0)
    powersgd, inputs, losses = PowerSGD(model.parameters(), config, alone()), normal(64, 20), []
    for step in range(200):
        loss = (model(inputs) - inputs[:, :1] * inputs[:, 1:2]).square().mean()
        loss.backward()
        optimizer_step(optimizer, powersgd)
        assert not any(p.grad is None or p.grad.any() for p in model.parameters())
        if step % 20 >= 10:
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0] and powersgd.state_dict()["PowerSGDCompressor.0"]["errors"]["param0"].any()


def test_an_optimizer_with_parameters_in_another_order_is_refused() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1))
    config = Config(rank=1, min_compression_rate=5, num_iters_per_step=2, start_compressing_after_num_steps=0)
    powersgd = PowerSGD(model.parameters(), config, alone())
    with pytest.raises(ValueError, match="built with other parameters"):
        optimizer_step(torch.optim.SGD(list(model.parameters())[::-1], lr=0.1), powersgd)


@pytest.mark.parametrize(("count", "half_steps"), [(8, 1), (8, 2), (3, 3), (1, 2)])
def test_a_switch_repeats_the_original_at_rank_1(count: int, half_steps: int) -> None:
    """The original divides the factors of all matrices of one shape by one norm, the paper each by its own."""
    config = Config(1, 0, half_steps, start_compressing_after_num_steps=0, orthogonalization="authors")
    powersgd = PowerSGD([torch.zeros(20, 30)] * count, config, alone())
    saved, M = powersgd.state_dict()["PowerSGDCompressor.0"], torch.zeros(count, 20, 30)
    P, Q = (torch.stack([saved[side][f"param{i}"] for i in range(count)]) for side in "PQ")
    for step in range(3):
        gradients, mean = normal(count, 20, 30, seed=step), torch.zeros(count, 20, 30)
        M = M + gradients
        for half in range(step * half_steps, (step + 1) * half_steps):
            if half % 2 == 0:
                P = P / P.norm()
                Q = M.mT @ P
            else:
                Q = Q / Q.norm()
                P = M @ Q
            M, mean = M - P @ Q.mT, mean + P @ Q.mT
        found = torch.stack(powersgd.aggregate(list(gradients)))
        torch.testing.assert_close(found, mean, rtol=0, atol=1e-4 * float(mean.abs().max()))


class Aggregated:
    """What a rank aggregates once: a matrix, a vector, and a number without a gradient."""

    def __init__(self, transport: Any) -> None:
        params = [torch.zeros(30, 40), torch.zeros(7), torch.zeros((), dtype=torch.float64)]
        config = Config(rank=1, num_iters_per_step=2, start_compressing_after_num_steps=0)
        self.powersgd = PowerSGD(params, config, transport)
        self.given = [low_rank(1, 30, 40, 0), torch.full((7,), float(transport.rank)), None]
        self.means = self.powersgd.aggregate(self.given)


@on_ranks(2)
def test_aggregate_averages_over_ranks(transport: Any) -> None:
    first, second, third = Aggregated(transport).means
    torch.testing.assert_close(first, low_rank(1, 30, 40, 0), rtol=0, atol=1e-4)
    assert second.tolist() == [0.5] * 7 and third.shape == () and third.dtype == torch.float64


@on_ranks(2)
def test_aggregate_makes_the_given_gradients_zero(transport: Any) -> None:
    given = Aggregated(transport).given
    assert not given[0].any() and not given[1].any()


@on_ranks(2)
def test_aggregate_refuses_gradients_that_are_not_finite(transport: Any) -> None:
    aggregated = Aggregated(transport)
    first, second, third = aggregated.means
    with pytest.raises(NonFiniteGradientError, match="param1 on rank 1"):
        aggregated.powersgd.aggregate([first, second / (1 - transport.rank), third])


@on_ranks(2)
def test_aggregate_refuses_too_few_gradients(transport: Any) -> None:
    aggregated = Aggregated(transport)
    with pytest.raises(ValueError, match="1 gradients for 3 parameters"):
        aggregated.powersgd.aggregate(aggregated.given[:1])


def test_factors_are_the_same_on_all_ranks_after_aggregates_that_were_refused() -> None:
    def body(transport: Any) -> Any:
        aggregated = Aggregated(transport)
        first, second, third = aggregated.means
        with pytest.raises(NonFiniteGradientError):
            aggregated.powersgd.aggregate([first, second / (1 - transport.rank), third])
        with pytest.raises(ValueError):
            aggregated.powersgd.aggregate(aggregated.given[:1])
        return aggregated.powersgd.state_dict()["PowerSGDCompressor.0"]["P"]["param0"]

    assert torch.equal(*LockstepWorld(2).run(body))


def steps_of_sgd(transport: Any, *aggregators: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Two steps with each aggregator, of a parameter with gradients and of one without, which are returned."""
    p, unused = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([p, unused], lr=1.0)
    for make in aggregators:
        aggregator = make([p, unused])
        assert isinstance(aggregator, Aggregator)
        for _ in range(2):
            p.grad = torch.full((3, 4), float(transport.rank))
            optimizer_step(sgd, aggregator)
            assert not p.grad.any() and unused.grad is None
    return p, unused


@on_ranks(2)
def test_the_original_s_aggregators_average_what_has_gradients(transport: Any) -> None:
    both = (lambda params: AllReduce(transport), lambda params: PowerSGD(params, Config(rank=1), transport))
    p, unused = steps_of_sgd(transport, *both)
    assert (p == 1 - 4 * 0.5).all() and (unused == 1).all()


def resumed_after_two_steps(transport: Any) -> tuple[Any, Any]:
    """A PowerSGD that has taken two steps, with one that has loaded its state."""
    made: list[Any] = []

    def make(params: Any) -> Any:
        made.extend(PowerSGD(params, Config(rank=1), transport) for _ in range(2))
        return made[0]

    steps_of_sgd(transport, make)
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


@on_ranks(2)
def test_the_step_counter_is_loaded(transport: Any) -> None:
    powersgd, resumed = resumed_after_two_steps(transport)
    assert powersgd.step_counter == resumed.step_counter == 2


@on_ranks(2)
def test_a_dropped_step_is_not_in_the_step_counter(transport: Any) -> None:
    _, resumed = resumed_after_two_steps(transport)
    with pytest.raises(NonFiniteGradientError, match="param0 on rank 0"):
        resumed.aggregate([torch.full((3, 4), -1.0) / transport.rank, None])
    assert resumed.step_counter == 2 and resumed.dropped_steps == 1


@on_ranks(2)
def test_all_reduce_adds_any_number_of_gradients(transport: Any) -> None:
    plain = AllReduce(transport)
    assert AllReduce(transport).aggregate([]) == [] and plain.aggregate([torch.ones(3)])[0].sum() == 3


@on_ranks(2)
def test_all_reduce_refuses_a_gradient_that_is_none(transport: Any) -> None:
    with pytest.raises(ValueError, match="none of them may be None"):
        AllReduce(transport).aggregate([torch.ones(3), None])


@on_ranks(2)
def test_all_reduce_refuses_gradients_of_other_shapes_than_before(transport: Any) -> None:
    plain = AllReduce(transport)
    plain.aggregate([torch.ones(3)])
    with pytest.raises(ValueError, match=r"gradient 0 has shape \(1,\), not \(3,\)"):
        plain.aggregate([torch.ones(1)])


every_way = pytest.mark.parametrize("way", ["auto", "qr", "gram_schmidt", "cholesky_qr"])


def basis_of(x: Any, *options: Any, **named: Any) -> Any:
    return orthonormalize([x], *options, **named)[0]


def assert_orthonormal(x: Any) -> None:
    torch.testing.assert_close(x @ x.mT, torch.eye(x.shape[1]).expand(len(x), -1, -1), rtol=0, atol=2e-6)


some_shapes = pytest.mark.parametrize("shape", [(1, 1, 1), (4, 1, 7), (3, 2, 50), (2, 5, 5), (5, 7, 1000)])


@every_way
@some_shapes
def test_rows_are_orthonormal(way: Any, shape: Any) -> None:
    x = normal(*shape) * torch.logspace(-6, 6, shape[0])[:, None, None]
    assert_orthonormal(basis_of(x, way))
    for scale in (1e-30, 1e30):
        with case(scale):
            assert_orthonormal(basis_of(normal(*shape) * scale, way))


@every_way
@some_shapes
def test_the_first_rows_span_what_the_first_of_the_matrix_span(way: Any, shape: Any) -> None:
    x = normal(*shape) * torch.logspace(-6, 6, shape[0])[:, None, None]
    basis = basis_of(x, way)
    for k in range(1, shape[1] + 1):
        part, first = basis[:, :k], x[:, :k]
        norms, outside = (y.flatten(1).norm(dim=1) for y in (first, first - first @ part.mT @ part))
        assert bool((outside <= 1e-5 * norms).all())


@every_way
def test_a_matrix_does_not_depend_on_the_others_of_its_batch(way: Any) -> None:
    x = normal(6, 1, 40) * torch.tensor([1e-8, 1.0, 1e8, 3.0, 0.1, 7.0])[:, None, None]
    together = basis_of(x, way)
    for i in range(6):
        torch.testing.assert_close(together[i : i + 1], basis_of(x[i : i + 1], way))


@every_way
@pytest.mark.parametrize("r", [1, 3])
def test_zeros_become_orthonormal_rows_of_noise(way: Any, r: int) -> None:
    x, noise = normal(3, r, 30), normal(3, r, 30, seed=5)
    x[1] = 0
    basis, found = basis_of(x, way), basis_of(x, way, noise=lambda b: noise)
    assert_orthonormal(basis)
    assert_orthonormal(found)
    assert float((found[1] @ noise[1].T @ noise[1]).norm()) > 1
    torch.testing.assert_close(found[0], basis[0])


@every_way
def test_dependent_rows_become_orthonormal_ones_that_span_them(way: Any) -> None:
    x = normal(2, 4, 30)
    x[0, 1] = 2 * x[0, 0]
    x[0, 2] = x[0, 0] + 1e-5 * x[0, 3]
    x[1, 0] = 0
    basis = basis_of(x, way, epsilon=1e-6)
    assert_orthonormal(basis)
    for i in range(2):
        rows = x[i] / x[i].norm(dim=1, keepdim=True).clamp(min=1e-30)
        assert float((rows - rows @ basis[i].T @ basis[i]).norm(dim=1)[[0, 1, 3]].max()) < 1e-4
