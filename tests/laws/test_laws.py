"""The laws that every compressor keeps, in lockstep, of which dgc.testing finds each broken one by name."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from cases import case
from laws.table import EXCHANGES, TABLE, Row
from torch import Tensor
from torch.utils._pytree import tree_leaves_with_path

from dgc import testing
from dgc.comm.lockstep import LockstepWorld
from dgc.compression import Compressor, DenseCompressor, TwoPhaseCompressor
from dgc.contrib import DoubleSqueezeCompressor, RandomKCompressor
from dgc.core.envelope import Flags
from dgc.core.state import State
from dgc.optim import DGCSGD, DistributedOptimizer


def each(rows: Iterable[Row]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


every_row = each(TABLE)
# 2 ranks gather codes where more reduce them; 3 are the fewest for which the order of a sum matters
one_and_more = pytest.mark.parametrize("size", [1, 3])
two_and_more = pytest.mark.parametrize("size", [2, 3])


@pytest.fixture(autouse=True)
def types_are_checked_once(request: pytest.FixtureRequest) -> None:
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    if (request.node.originalname, parameters.get("size")) != ("test_replicas_are_bitwise_equal", 2):
        request.getfixturevalue("no_type_checks")


@every_row
@pytest.mark.parametrize("size", [2, 3, 5])
def test_replicas_are_bitwise_equal(row: Row, size: int) -> None:
    testing.check_replicas(row.make, size)


@each(row for row in TABLE if row.conserves)
@two_and_more
def test_nothing_is_lost(row: Row, size: int) -> None:
    testing.check_nothing_lost(row.make, size, row.tolerance)


@every_row
def test_one_object_serves_all_ranks(row: Row) -> None:
    """It has settings only: each rank gets the bits of an object of its own."""
    shared = row.make()
    fleets = [testing.Fleet(make, 3) for make in (lambda: shared, row.make)]
    for step in range(4):
        own = [testing.gradients(rank, step) for rank in range(3)]
        found, expected = ([*fleet.step(own), *fleet.errors()] for fleet in fleets)
        assert all(map(torch.equal, found, expected)), step


@every_row
@two_and_more
def test_a_reloaded_state_goes_on_bit_for_bit(row: Row, size: int) -> None:
    testing.check_state(row.make, size)


@every_row
@two_and_more
def test_what_a_dropped_step_sent_is_a_rank_s_own_again(row: Row, size: int) -> None:
    """Bit for bit; NaN and inf count as zero."""
    for make in filter(None, (row.make, row.dense_limit)):
        testing.check_dropped_step(make, size, row.conserves)


@every_row
@pytest.mark.filterwarnings("ignore:.*sends .* tensors dense")
def test_a_step_inside_autocast_has_the_same_bits(row: Row) -> None:
    def ends(transport: Any, inside: bool) -> Any:
        model = torch.nn.ParameterList(like.clone() for like in testing.LIKE)
        correction = row.make().correction
        momentum: Any = (
            {} if correction is None else {"momentum": correction.momentum, "nesterov": correction.nesterov}
        )
        optimizer = DGCSGD(model.parameters(), lr=0.1, **momentum)
        wrapped = DistributedOptimizer(optimizer, model.named_parameters(), row.make(), transport=transport)
        for step in range(2):
            for p, gradient in zip(model, testing.gradients(transport.rank, step), strict=True):
                p.grad = gradient
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                wrapped.step()
        return [*(p.detach() for p in model), *wrapped.errors()]

    found, expected = (LockstepWorld(2).run(partial(ends, inside=inside)) for inside in (True, False))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@each(row for row in TABLE if row.dense_limit)
@one_and_more
def test_reaches_dense(row: Row, size: int) -> None:
    assert row.dense_limit is not None
    limit, dense = testing.Fleet(row.dense_limit, size), testing.Fleet(DenseCompressor, size)
    for step in range(3):
        own = [testing.gradients(rank, step) for rank in range(size)]
        expected = dense.step(own)[0]
        largest = max(float(testing.flat(g).abs().max()) for g in own)
        assert float((limit.step(own)[0] - expected).abs().max()) <= row.tolerance * largest * size


@every_row
def test_a_state_with_nan_is_refused(row: Row) -> None:
    fleet, other = testing.Fleet(row.make, 2), testing.Fleet(row.make, 2, seed=1)
    for step in range(2):
        fleet.step([testing.gradients(rank, step) for rank in range(2)])
    state = fleet.states[0].state_dict()
    for path, tensor in tree_leaves_with_path(state):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
            kept = tensor.clone()
            tensor.view(-1)[-1] = float("nan")
            with pytest.raises(ValueError, match="has NaN"):
                other.states[0].load_state_dict(state)
                pytest.fail(f"{path} was taken")
            tensor.copy_(kept)
    other.states[0].load_state_dict(state)


@every_row
@one_and_more
def test_zeros_stay_zero(row: Row, size: int) -> None:
    fleet = testing.Fleet(row.make, size)
    for _ in range(2):
        mean = fleet.step([testing.LIKE] * size)[0]
        assert bool(torch.isfinite(mean).all()) and (not mean.any() or not row.at_zero)


@every_row
@one_and_more
def test_the_smallest_buckets_have_finite_means(row: Row, size: int) -> None:
    for shapes in SMALLEST:
        with case(shapes):
            fleet = testing.Fleet(row.make, size, [torch.zeros(shape, dtype=torch.float32) for shape in shapes])
            own = [testing.gradients(rank, 0, shapes) for rank in range(size)]
            mean = fleet.step(own)[0]
            if mean.numel() == 1 and row.one_element:
                expected = row.first_step * sum(testing.flat(g) for g in own) / size
                torch.testing.assert_close(mean, expected, rtol=2.0**-7, atol=1e-6)
            assert bool(torch.isfinite(mean).all())


SMALLEST: tuple[tuple[tuple[int, ...], ...], ...] = (((1,),), ((1, 1),), ((0, 4),), ((0, 4), (3, 5)), ((),))


@each(row for row in TABLE if not row.by_shape)
def test_layout_of_the_gradient_plays_no_part(row: Row) -> None:
    """channels_last and transposed parameters: the same elements, in the parameter's own order of memory."""
    plain = torch.zeros(4, 6, 5, 3, dtype=torch.float32)
    for like in (plain.to(memory_format=torch.channels_last), plain.permute(3, 0, 2, 1)):
        order = sorted(range(4), key=like.stride, reverse=True)
        fleet, reference = testing.Fleet(row.make, 2, [like]), testing.Fleet(row.make, 2, [like.permute(order)])
        for step in range(3):
            own = [testing.gradients(rank, step, (like.shape,)) for rank in range(2)]
            assert torch.equal(fleet.step(own)[0], reference.step([[g.permute(order)] for (g,) in own])[0])


@each(row for row in TABLE if row.by_shape)
def test_order_in_memory_plays_no_part(row: Row) -> None:
    """Tensors of one shape, contiguous, channels_last and transposed, give the same, up to the order of sums.

    So do their states, which each loads from the other before the last step.
    """
    plain = torch.zeros(8, 6, 5, 3, dtype=torch.float32)
    transposed = torch.zeros(3, 8, 5, 6, dtype=torch.float32).permute(1, 3, 2, 0)
    other = (plain.to(memory_format=torch.channels_last), transposed)
    for like in (*other, torch.zeros(5, 3, 6, 8, dtype=torch.float32).permute(3, 2, 0, 1)):
        fleet, reference = testing.Fleet(row.make, 2, [like]), testing.Fleet(row.make, 2, [plain])
        for step in range(4):
            if step == 3:
                for pair in zip(fleet.states, reference.states, strict=True):
                    saved = [states.state_dict() for states in pair]
                    for states, of_the_other in zip(pair, reversed(saved), strict=True):
                        states.load_state_dict(of_the_other)
            own = [testing.gradients(rank, step, (plain.shape,)) for rank in range(2)]
            mean, expected = fleet.step(own)[0], reference.step(own)[0].view(plain.shape)
            found = fleet.buckets[0].segments[0].of(mean)
            torch.testing.assert_close(found, expected, rtol=0, atol=max(1e-4, 4 * row.tolerance))


@every_row
def test_half_precision_gradients(row: Row) -> None:
    for dtype, size in ((torch.float16, 3), (torch.bfloat16, 2)):
        fleet = testing.Fleet(row.make, size, [torch.zeros(shape, dtype=dtype) for shape in testing.SHAPES])
        for step in range(2):
            means = fleet.step([[g.to(dtype) for g in testing.gradients(rank, step)] for rank in range(size)])
            with case(dtype, size):
                assert means[0].dtype == dtype and bool(torch.isfinite(means[0]).all())
                assert all(torch.equal(means[0], mean) for mean in means)
        assert all(e.dtype == torch.float32 for c in fleet.states for e in c.errors()), dtype


def named(tensor: int, rank: int) -> str:
    return f"the gradient of p{tensor} on rank {rank} has NaN or inf, or is 2**64 or more"


@every_row
def test_nonfinite_gradients_are_named_alike_on_every_rank(row: Row) -> None:
    for size, bad in ((1, float("nan")), (2, -float("inf")), (3, float("nan"))):
        with case(size, "ranks", bad):
            fleet = testing.Fleet(row.make, size)
            own = [testing.gradients(rank, 0) for rank in range(size)]
            own[size - 1][2][1, 2, 3] = bad
            fleet.step(own)
            assert fleet.nonfinite == [named(2, size - 1)] * size
            assert all(bool(torch.isfinite(error).all()) for error in fleet.errors())
            mean = fleet.step([testing.gradients(rank, 1) for rank in range(size)])[0]
            assert fleet.nonfinite == [None] * size and bool(torch.isfinite(mean).all())


@every_row
@pytest.mark.parametrize("size", [1, 2, 5])
def test_metered_bytes_are_the_formula_s(row: Row, size: int) -> None:
    fleet = testing.Fleet(row.make, size)
    for step in range(2):
        fleet.step([testing.gradients(rank, step) for rank in range(size)])
    for rank, (meter, bucket) in enumerate(zip(fleet.world.meters, fleet.buckets, strict=True)):
        assert meter.payload_bytes == 2 * row.payload(bucket, size, rank), rank


@every_row
def test_the_ratio_tells_whether_bytes_are_saved(row: Row) -> None:
    """Below 1 where less than 2 bytes per element are sent, and only where less than dense fp32's 4 are."""
    assert 0 < row.make().compress_ratio <= 1  # before anything is planned
    shapes = ((40, 60), (30, 5, 5))
    for size in (1, 3):
        fleet = testing.Fleet(row.make, size, [torch.zeros(shape) for shape in shapes])
        for step in range(2):
            fleet.step([testing.gradients(rank, step, shapes) for rank in range(size)])
        bytes_per_element = fleet.world.meters[0].payload_bytes / 2 / fleet.buckets[0].numel
        ratio = fleet.states[0].compress_ratio
        assert ratio < 1 or bytes_per_element >= 2
        assert ratio >= 1 or bytes_per_element < 4


@every_row
@pytest.mark.usefixtures("no_type_checks")
def test_converges_on_a_quadratic(row: Row) -> None:
    """min over x of the mean over ranks of |x - c_r|^2 / 2: x must come to the mean of c_r."""
    shapes = ((10, 8), (5,))
    targets = [testing.gradients(rank, 99, shapes) for rank in range(2)]
    best: Any = sum(testing.flat(t) for t in targets) / 2
    x = [torch.zeros(shape, dtype=torch.float32) for shape in shapes]
    fleet = testing.Fleet(row.make, 2, x)
    for step in range(100):
        mean = fleet.step([[a - b for a, b in zip(x, target, strict=True)] for target in targets])[0]
        lr = 0.2 * (1 - row.momentum) * 0.01 ** (step / 100)
        for part, change in zip(x, mean.split([80, 5]), strict=True):
            part -= lr * change.view(part.shape)
    share = row.left or (0.4 if row.momentum else 0.1)
    left = float((testing.flat(x) - best).norm()) / float(best.norm())
    assert left < share, f"{left:.3f} of the distance is left: if the method may leave more, give its Row `left`"


@every_row
def test_enormous_gradients_leave_no_trace(row: Row) -> None:
    for make, (huge, who) in product(filter(None, (row.make, row.dense_limit)), ((3e38, [1]), (-3e38, [0, 1, 2]))):
        fleet = testing.Fleet(make, 3)
        fleet.step([testing.gradients(rank, 0) for rank in range(3)])
        for step in range(1, 3):
            own, before = [testing.gradients(rank, step) for rank in range(3)], fleet.errors()
            for rank in who:
                own[rank][0].fill_(huge)
                own[rank][2][1, 2, 3] = own[rank][4][7:90] = huge
            mean = fleet.step(own)[0]
            (nonfinite,) = set(fleet.nonfinite)
            assert nonfinite is not None or bool(torch.isfinite(mean).all())
            if row.keeps:
                assert nonfinite is not None and f"gradient of p0 on rank {who[0]} " in nonfinite
                for old, new, given in zip(before, fleet.errors(), own, strict=True):
                    counted = torch.cat([torch.where(g.abs() < 1e38, g, 0.0).view(-1) for g in given])
                    assert torch.equal(new.float(), old.float() + counted)
            assert all(bool(torch.isfinite(error).all()) for error in fleet.errors())
        for step in range(3, 5):
            means = fleet.step([testing.gradients(rank, step) for rank in range(3)])
            assert fleet.nonfinite == [None] * 3
            assert bool(torch.isfinite(means[0]).all()) and bool(means[0].any())
            assert all(torch.equal(means[0], mean) for mean in means)
        assert all(float(error.abs().max()) < 1e3 for error in fleet.errors())


@each(EXCHANGES)
@pytest.mark.parametrize("size", [4, 8, pytest.param(16, marks=pytest.mark.proof)])
def test_further_numbers_of_ranks_keep_the_laws(row: Row, size: int) -> None:
    testing.check_replicas(row.make, size)
    testing.check_state(row.make, size)
    testing.check_dropped_step(row.make, size, row.conserves)
    if row.conserves:  # a sum of more ranks is rounded more often
        testing.check_nothing_lost(row.make, size, testing.ROUNDING * size / 4)
    # NaN, also in a tensor of a single element, of which most ranks have no part
    fleet = testing.Fleet(row.make, size)
    for tensor, culprit in ((3, 0), (1, size - 1), (4, size // 2)):
        own = [testing.gradients(rank, tensor) for rank in range(size)]
        own[culprit][tensor].view(-1)[-1] = float("nan")
        fleet.step(own)
        assert fleet.nonfinite == [named(tensor, culprit)] * size


class Whole(RandomKCompressor):
    def __init__(self) -> None:
        super().__init__(0.5)


def broken(change: Callable[..., Any]) -> type[Whole]:
    class Broken(Whole):
        def exchange(self, bucket: Any, state: Any, *given: Any) -> Any:
            mean, kept, flags = yield from super().exchange(bucket, state, *given)
            return change(state.rank, mean, kept, flags)

    return Broken


class Restarted(State):
    def loaded(self, bucket: Any, tables: Any) -> Any:
        return replace(super().loaded(bucket, tables), steps=0)


class Restarts(Whole):
    def init(self, bucket: Any, size: int, rank: int) -> Restarted:
        return Restarted(**vars(super().init(bucket, size, rank)))


class Shared(State):
    def saved(self, bucket: Any) -> Any:
        parts = {s.name: s.of(self.local["count"]) for s in bucket.segments}
        return {**super().saved(bucket), "count": parts}


class Shares(Whole):
    def init(self, bucket: Any, size: int, rank: int) -> Shared:
        return Shared(**{**vars(super().init(bucket, size, rank)), "local": {"count": bucket.flat.clone()}})

    def reduce(self, bucket: Any, state: Any) -> Any:
        state.local["count"].add_(1.0)
        return (yield from super().reduce(bucket, state))


class KeepsDropped(Whole):
    def reduce(self, bucket: Any, state: Any) -> Any:
        reduced = yield from super().reduce(bucket, state)
        return replace(reduced, dropped=reduced.state)


NONE_BAD = Flags(values=[0])
BROKEN: list[tuple[Callable[[], Compressor], str]] = [
    (broken(lambda rank, mean, kept, flags: (mean + 1e-6 * rank, kept, flags)), "equal replicas"),
    (broken(lambda rank, mean, kept, flags: (mean, 0.999 * kept, flags)), "nothing lost"),
    (Restarts, "state"),
    (Shares, "state: steps change one that was saved"),
    (KeepsDropped, "dropped steps: what was sent"),
    (
        broken(lambda rank, mean, kept, flags: (mean, kept, Flags(values=[0] * len(flags.values)))),
        "dropped steps: .* reported",
    ),
]


@pytest.mark.parametrize("make", [Whole, DenseCompressor, TwoPhaseCompressor, DoubleSqueezeCompressor])
def test_a_correct_compressor_passes(make: Any) -> None:
    testing.check_compressor(make)


def test_a_broken_law_is_named() -> None:
    for make, law in BROKEN:
        with case(law), pytest.raises(AssertionError, match=law):
            testing.check_compressor(make)
    testing.check_compressor(BROKEN[1][0], conserves=False)  # what is lost is not asked for
