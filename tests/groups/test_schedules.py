"""The law of replica groups, on drawn schedules of faults: members are equal after every committed round, no step
is counted twice, none of a living member is lost, and every schedule ends.

`python -m pytest -m proof tests/groups` runs 1,000 schedules.
"""

from collections.abc import Callable, Generator
from typing import Any

import pytest
from groups.simulator import SetNumbers, World

from dgc.groups.coordinator import Coordinator
from dgc.groups.member import Member
from dgc.groups.messages import Commit, FromCoordinator

FEW, MANY = 50, 1000


@pytest.mark.parametrize("first", range(0, FEW, 10))
def test_the_law_holds_on_drawn_schedules(first: int) -> None:
    for seed in range(first, first + 10):
        World(seed).finish()


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_the_law_holds_on_a_thousand_schedules() -> None:
    rounds = faults = 0
    for seed in range(MANY):
        world = World(seed, faults=12)
        world.finish()
        assert world.coordinator is not None
        rounds, faults = rounds + world.coordinator.committed.round, faults + world.faults
    print(f"\n{MANY} schedules, {rounds} committed rounds, {faults} faults")


def test_a_coordinator_that_loses_its_file_counts_nothing_twice() -> None:
    for seed in range(10):
        World(seed, loses_file=True).finish()


def _numbers_attempts_again(patch: pytest.MonkeyPatch) -> None:
    begin = Coordinator.__init__

    def begin_after_the_last_decision(self: Coordinator, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._next, self._known_since = self.committed.attempt, 0

    patch.setattr(Coordinator, "__init__", begin_after_the_last_decision)


def _saves_no_decision(patch: pytest.MonkeyPatch) -> None:
    store = Coordinator._store
    patch.setattr(Coordinator, "_store", lambda self: store(self) if self.attempt is None else None)


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
        p, is_late = self.p, self.s is not None
        digest = commit(self, round)
        self.p = p if is_late else self.p
        return digest

    patch.setattr(SetNumbers, "commit", late)


def _drops_progress_after_a_late_decision(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SetNumbers, "doubt", lambda self: None)


def _does_not_heal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "_is_current", lambda self, member: True)


RULES = [
    _numbers_attempts_again,
    _saves_no_decision,
    _applies_before_the_decision,
    _keeps_error_states_of_void_attempts,
    _counts_progress_from_the_old_model,
    _drops_progress_after_a_late_decision,
    _does_not_heal,
]


@pytest.mark.parametrize("rule", RULES)
def test_the_law_fails_if_a_rule_is_broken(
    rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(200):
            World(seed).finish()
