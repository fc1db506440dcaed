"""The law of replica groups, on drawn schedules of faults: members are equal after every committed round, no step
is counted twice, none of a living member is lost, and every schedule ends.

`python -m pytest -m proof tests/groups` runs 1,000 schedules.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from groups.simulator import SetNumbers, World, check_shares, exchange_sets, samples_of
from local.test_outer_steps import COMPRESSIONS
from optim.nets import net
from torch.utils._pytree import tree_flatten

from dgc.comm.lockstep import LockstepWorld
from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import AllGather
from dgc.core.dense import DenseCompressor
from dgc.gossip.model import FlatModel
from dgc.groups.coordinator import Coordinator, Sent
from dgc.groups.member import Member
from dgc.groups.messages import Commit, FromCoordinator, Tag
from dgc.groups.steps import GroupSteps
from dgc.local import Nesterov, OuterSteps

FEW, MANY = 50, 1000
SLOW: Any = {"loads": (6.0, 12.0)}  # seconds: others commit several rounds meanwhile
SLOW_EXCHANGES: Any = {**SLOW, "exchanges": (1.0, 3.0)}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("first", range(0, FEW, 10))
def test_the_law_holds_on_drawn_schedules(first: int, weighted: bool) -> None:
    for seed in range(first, first + 10):
        World(seed, weighted=weighted).finish()


@pytest.mark.parametrize("slow", [SLOW, SLOW_EXCHANGES], ids=["loads", "loads and exchanges"])
@pytest.mark.parametrize("first", range(0, FEW, 10))
def test_the_law_holds_if_loading_takes_longer_than_rounds(first: int, slow: Any) -> None:
    """A member that loads again and again would take part in no round."""
    for seed in range(first, first + 10):
        World(seed, **slow).finish()


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kind",
    ["groups", "weighted groups", "groups that load slowly", "weighted groups whose coordinator loses its file"],
)
def test_the_law_holds_on_a_thousand_schedules(kind: str) -> None:
    rounds = faults = 0
    options = SLOW if "slowly" in kind else {"weighted": "weighted" in kind, "loses_file": "loses" in kind}
    for seed in range(MANY):
        world = World(seed, faults=12, **options)
        world.finish()
        assert world.coordinator is not None
        rounds, faults = rounds + world.coordinator.committed.round, faults + world.faults
    print(f"\n{MANY} schedules of {kind}, {rounds} committed rounds, {faults} faults")


# members that have the last state come after others, or after rounds without them, or nobody knows a decision
LOSSES = [32, 55, 77, 120, 143, 155, 176, 501, 596, 644, 853, 997]


@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_is_counted_twice_and_all_that_is_lost_is_said_if_the_coordinator_loses_its_file(
    weighted: bool,
) -> None:
    for seed in [*range(10), *LOSSES]:
        for faults in (6, 12):
            World(seed, faults=faults, loses_file=True, weighted=weighted).finish()


@pytest.mark.parametrize("seed", [538, 632, 653, 674])
def test_nothing_is_dropped_if_a_loaded_state_shows_that_a_round_was_committed(seed: int) -> None:
    world = World(seed, loses_file=True)
    world.finish()
    assert not any(node.numbers.lost or node.numbers.dropped for node in world.nodes.values())


class Alone:
    """A group that no coordinator leads."""

    weighted = True

    def begin(self, steps: GroupSteps, inside: Any, settings: str) -> None:
        pass

    def join(self) -> None:
        pass

    def outer_step(self) -> None:
        pass

    def before_a_change(self) -> None:
        pass

    def close(self) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}


class RealNumbers:
    """A small model with its exchange and outer optimizer. A step adds numbers that depend on it alone.

    Attributes:
        steps: What the runtime uses.
        sets: The steps in it, by which the weights of `steps` are checked.
    """

    weighted = True

    def __init__(self, compression: Callable[[], Any]):
        self.sets = SetNumbers(True, defaultdict(set))
        model = FlatModel(list(net().named_parameters()))
        self.steps = GroupSteps(OuterSteps(2, outer=Nesterov(), compression=compression()), Alone())
        self.steps.start(model, LockstepWorld(1).transports[0], TrafficMeter(), "simulated")
        self.steps.begin_step()
        self.digest, self.samples = self.steps.digest, self.sets.samples

    @property
    def share(self) -> float:
        return 1.0 if self.steps._own_share is None else self.steps._own_share

    def state(self) -> Any:
        return self.steps.committed_state(), self.sets.state()

    def weight(self, round: int) -> int:
        assert self.steps.weight(round) == self.sets.samples()
        return self.steps.weight(round)

    def prepare(self, round: int, share: float) -> None:
        self.steps.prepare(round, share)
        self.sets.prepare(round, share)

    def commit(self, round: int) -> int:
        self.sets.commit(round)
        return self.steps.commit(round)

    def void(self) -> None:
        self.steps.void()
        self.sets.void()

    def doubt(self) -> None:
        self.steps.doubt()
        self.sets.doubt()

    def heal(self, state: Any, keeps: bool) -> int:
        self.sets.heal(state[1], keeps)
        return self.steps.heal(state[0], keeps)

    def train(self, step: int) -> None:
        self.sets.train(step)
        self.steps.count(samples_of(step))
        z = self.steps.z
        z.add_(torch.randn(z.shape, generator=torch.Generator().manual_seed(step)), alpha=0.01)

    def committed(self, tag: Any) -> None:
        pass

    def same(self, state: Any) -> bool:
        own, other = (tree_flatten(of)[0] for of in (self.state()[0], state[0]))
        return len(own) == len(other) and all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(own, other, strict=True)
        )


def exchange_real(round: int, numbers: Sequence[Any]) -> list[int]:
    def exchange(ranks: Any) -> int:
        ranks.digest_of_sums = 0  # of MeshTransport
        return int(numbers[ranks.rank].steps.exchange_with(ranks, round))

    check_shares(numbers)
    exchange_sets(round, [own.sets for own in numbers])
    return LockstepWorld(len(numbers)).run(exchange)


@pytest.mark.parametrize("schedule", [{"seed": 11, "size": 3}, {"seed": 212, "loses_file": True}], ids=str)
@pytest.mark.parametrize("name", ["dense", "2 bits", "rank 1", "4 bits"])
@pytest.mark.usefixtures("no_type_checks")
def test_real_models_stay_equal_on_a_drawn_schedule(name: str, schedule: Any) -> None:
    make = partial(RealNumbers, COMPRESSIONS[name])
    World(**schedule, make=make, exchange=exchange_real, inner=3).finish()


class OnOneRank(DenseCompressor):
    """Adds a number to the mean of the first rank alone."""

    def reduce(self, bucket: Any, state: Any) -> Any:
        reduced = yield from super().reduce(bucket, state)
        (ranks,) = yield (AllGather(torch.zeros(1)),)
        bucket.flat[0] += next(self.changes) if len(ranks) > 1 else 0
        return reduced

    changes = iter(range(100))


@pytest.mark.usefixtures("no_type_checks")
def test_means_that_do_not_follow_from_sums_are_compared() -> None:
    """What its base class says of its means is not true of another `reduce`."""
    members = [RealNumbers(OnOneRank) for _ in range(2)]
    for step, (own, share) in enumerate(zip(members, (0.5, 1.5), strict=True)):
        own.train(step)
        own.prepare(1, share)
    assert len(set(exchange_real(1, members))) == 2


def _numbers_attempts_again(patch: pytest.MonkeyPatch) -> None:
    begin = Coordinator.__init__

    def begin_after_the_last_decision(self: Coordinator, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._next, self._known_since = self.committed.attempt, 0

    patch.setattr(Coordinator, "__init__", begin_after_the_last_decision)


def _saves_no_decision(patch: pytest.MonkeyPatch) -> None:
    def keep(self: Coordinator, tag: Tag) -> None:
        self.line = [*self.line, tag]

    patch.setattr(Coordinator, "_keep_decision", keep)


def _applies_before_the_decision(patch: pytest.MonkeyPatch) -> None:
    def decide(self: Member) -> Generator[Any, Any, FromCoordinator]:
        assert self.doubt is not None
        return Commit(self.doubt)
        yield

    patch.setattr(Member, "_decision", decide)


def _keeps_error_states_of_void_attempts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SetNumbers, "void", lambda self: setattr(self, "s", None))


def _counts_progress_from_the_old_model(patch: pytest.MonkeyPatch) -> None:
    commit = SetNumbers.commit

    def late(self: SetNumbers, round: int) -> int:
        own, is_late = self.z - self.z0, self.s is not None
        digest = commit(self, round)
        self.z = self.z0 + own if is_late else self.z
        return digest

    patch.setattr(SetNumbers, "commit", late)


def _drops_progress_after_a_late_decision(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SetNumbers, "doubt", lambda self: None)


def _weighs_all_its_steps(patch: pytest.MonkeyPatch) -> None:
    """Not those since its last round."""
    patch.setattr(SetNumbers, "weight", lambda self, round: sum(map(samples_of, self.z)))


def _weighs_all_members_alike(patch: pytest.MonkeyPatch) -> None:
    begin = Coordinator._begin

    def alike(self: Coordinator, names: Iterable[str], *arguments: Any) -> list[Sent]:
        for member in self.members.values():
            member.weight = 1
        return begin(self, names, *arguments)

    patch.setattr(Coordinator, "_begin", alike)


def _does_not_heal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "_is_current", lambda self, member: True)


def _puts_no_round_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "_puts_off", lambda self, now, name: False)


def _keeps_progress_that_may_be_in_the_state_of_another(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "_void", property(lambda self: (), lambda self, value: None), raising=False)


def _says_nothing_of_lost_rounds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SetNumbers, "lose", lambda self, first, last: None)


RULES = [
    _numbers_attempts_again,
    _saves_no_decision,
    _applies_before_the_decision,
    _keeps_error_states_of_void_attempts,
    _counts_progress_from_the_old_model,
    _drops_progress_after_a_late_decision,
    _does_not_heal,
    _weighs_all_its_steps,
    _weighs_all_members_alike,
    _puts_no_round_off,
]
LOSE_FILE = [
    _keeps_progress_that_may_be_in_the_state_of_another,
    _says_nothing_of_lost_rounds,
]


@pytest.mark.parametrize("rule", RULES)
def test_the_law_fails_if_a_rule_is_broken(
    rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule(monkeypatch)
    options = SLOW if rule is _puts_no_round_off else {"weighted": True}
    with pytest.raises(AssertionError):
        for seed in range(200):
            World(seed, **options).finish()


@pytest.mark.parametrize("rule", LOSE_FILE)
def test_the_law_fails_if_a_rule_for_a_lost_file_is_broken(
    rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule(monkeypatch)
    with pytest.raises(AssertionError, match="times|twice|not said so"):
        for seed in LOSSES:
            World(seed, faults=12, loses_file=True).finish()
