"""The invariants of compressors, checked with simulated ranks in one process. docs/extending.md shows their use.

equal replicas    every rank gets the same mean gradient, bit for bit
nothing lost      mean over ranks of (gradient + old error) = mean gradient + mean over ranks of new error
state             a compressor that loads a copy of another one's state continues as that one, bit for bit
dropped steps     every rank reports a NaN by parameter and rank, and what a rank sent returns to its error
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dgc.comm.lockstep import LockstepWorld
from dgc.comm.requests import Conversation
from dgc.core.bucket import Bucket, make_bucket
from dgc.core.protocol import Compressor
from dgc.core.results import Result, check_means
from dgc.core.state import with_tensors
from dgc.engine.state import BucketStates

Make = Callable[[], Compressor]
SHAPES: tuple[tuple[int, ...], ...] = ((40, 25), (3, 3), (7, 11, 13), (1,), (2000,))
LIKE = [torch.zeros(shape, dtype=torch.float32) for shape in SHAPES]
ROUNDING = 4 * 2.0**-24


class Fleet:
    """Simulated ranks with one compressor and one bucket each, of tensors like these, named from p{first} on, in
    epoch 0."""

    def __init__(self, make: Make, size: int, like: Sequence[Tensor] = LIKE, seed: int = 0, first: int = 0):
        self.world = LockstepWorld(size, seed=seed)
        self.states = [BucketStates(make()) for _ in range(size)]
        named = [(f"p{i}", tensor) for i, tensor in enumerate(like, first)]
        self.buckets = [make_bucket("bucket", named) for _ in range(size)]
        self.nonfinite: list[str | None] = []  # each rank's report of the last step
        for rank, (states, bucket) in enumerate(zip(self.states, self.buckets, strict=True)):
            states.add(bucket, size, rank)
            states.begin_epoch(0)

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Each rank's list of gradients -> each rank's mean, flat and dense. A non-finite step is dropped."""
        for bucket, own in zip(self.buckets, gradients, strict=True):
            for segment, gradient in zip(bucket.segments, own, strict=True):
                segment.of(bucket.flat).copy_(gradient)
        ranks = list(zip(self.states, self.buckets, strict=True))
        results = self.world.converse("bucket", [checked_mean(states, bucket) for states, bucket in ranks])
        self.nonfinite = [nonfinite for _, nonfinite in results]
        for (states, bucket), (result, nonfinite) in zip(ranks, results, strict=True):
            if nonfinite is not None:
                states.rollback(bucket)
            result.write_to(bucket)
        return [bucket.flat.clone() for bucket in self.buckets]

    def errors(self) -> list[Tensor]:
        """Each rank's residual [n] in float64; zero if it has none."""
        zero = torch.zeros(self.buckets[0].numel, dtype=torch.float64)
        return [sum((e.double() for e in states.errors()), zero) for states in self.states]


def checked_mean(states: BucketStates, bucket: Bucket) -> Conversation[tuple[Result, str | None]]:
    """Average a bucket. Returns the mean, and why it must not be used, or None."""
    result = yield from states.reduce(bucket)
    return result, (yield from check_means([(bucket, result)]))


def gradients(rank: int, step: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def check_compressor(make: Make, *, conserves: bool = True, tolerance: float = ROUNDING) -> None:
    """Checks the invariants with 1, 2 and 3 ranks.

    Args:
        make: Returns a new compressor.
        conserves: Check that nothing is lost. False for compressors without a residual, and for those that apply
            momentum before compression.
        tolerance: Largest loss of a step, relative to the largest gradient plus error.

    Raises:
        AssertionError: An invariant does not hold.

    Example:
        >>> check_compressor(lambda: SparseCompressor(0.5, "residual"))
    """
    for size in (1, 2, 3):
        check_replicas(make, size)
        check_state(make, size)
        check_dropped_step(make, size, conserves)
        if conserves:
            check_nothing_lost(make, size, tolerance)


def check_replicas(make: Make, size: int) -> None:
    fleet = Fleet(make, size)
    for step in range(5):
        first, *others = (m.view(torch.int32) for m in fleet.step([gradients(r, step) for r in range(size)]))
        assert all(torch.equal(first, other) for other in others), f"equal replicas: {size} ranks get other means"


def check_nothing_lost(make: Make, size: int, tolerance: float = ROUNDING) -> None:
    fleet = Fleet(make, size)
    for step in range(6):
        own = [gradients(rank, step) for rank in range(size)]
        given = [e + flat(g) for e, g in zip(fleet.errors(), own, strict=True)]
        mean = fleet.step(own)[0].double()
        lost = float((mean + sum(fleet.errors()) / size - sum(given) / size).abs().max())
        assert lost <= tolerance * max(float(g.abs().max()) for g in given), f"nothing lost: {lost:.3g} is"


def check_state(make: Make, size: int) -> None:
    for last in ("applied", "dropped"):
        fleet, other = Fleet(make, size), Fleet(make, size, seed=1)
        for step in range(4):
            own = [gradients(rank, step) for rank in range(size)]
            if step == 3 and last == "dropped":
                own[-1][4][3:50] = torch.nan
            fleet.step(own)
        saved = [states.state_dict() for states in fleet.states]
        before = with_tensors(torch.clone, saved)
        for states, new in zip(saved, other.states, strict=True):
            new.load_state_dict(states)
        for step in range(4, 8):
            own = [gradients(rank, step) for rank in range(size)]
            here, there = ([f.step(own)[0], *f.errors()] for f in (fleet, other))
            assert all(map(torch.equal, here, there)), (
                f"state: after loading one of a step that was {last}, it differs"
            )
        assert all(map(torch.equal, tensors_of(saved), tensors_of(before))), (
            "state: steps change one that was saved and loaded: copy tensors in saved() and loaded()"
        )


def tensors_of(state: object) -> list[Tensor]:
    found: list[Tensor] = []
    with_tensors(found.append, state)
    return found


def check_dropped_step(make: Make, size: int, conserves: bool = True) -> None:
    fleet = Fleet(make, size)
    for step in range(3):
        fleet.step([gradients(rank, step) for rank in range(size)])
    before, own = fleet.errors(), [gradients(rank, 9) for rank in range(size)]
    own[-1][4][3:50] = torch.nan
    fleet.step(own)
    report, who = str(fleet.nonfinite[0]), f"p4 on rank {size - 1} "
    assert fleet.nonfinite == [report] * size and who in report, f"dropped steps: {fleet.nonfinite} are reported"
    states = fleet.states[0]
    has_residual = any(True for _ in states.errors())
    for old, gradient, new in zip(before, own, fleet.errors(), strict=True):
        assert bool(new.isfinite().all()), "dropped steps: the residual is not finite"
        if conserves and has_residual:
            expected = old.float() + flat(gradient).nan_to_num(0.0, 0.0, 0.0)
            # the error of a server is added in another order
            limit = ROUNDING * float(expected.abs().max()) if states.compressor.keeps_server_errors else 0.0
            difference = float((new.float() - expected).abs().max())
            assert difference <= limit, "dropped steps: what was sent does not return to the error"
