"""Replica groups: what the coordinator answers, message by message."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dgc.groups import coordinator
from dgc.groups.coordinator import Coordinator, Settings
from dgc.groups.messages import (
    START,
    Ask,
    Begin,
    Commit,
    Failed,
    FromCoordinator,
    GoOn,
    Has,
    Hello,
    Leave,
    Missed,
    Prepared,
    Ready,
    Refused,
    Tag,
    Unknown,
    Void,
    Welcome,
    decode,
    encode,
)

SETTINGS = Settings(quorum=2, grace=10.0, timeout=60.0)
ADDRESSES = (("10.0.0.1", 1234), ("10.0.0.1", 1235))


class Led:
    """A coordinator whose messages are kept for each member."""

    def __init__(self, *names: str, settings: Settings = SETTINGS, saved: Any = None):
        self.now, self.saved = 0.0, saved
        self.told: dict[str, list[FromCoordinator]] = {}
        self.own = Coordinator(settings, self._save, self._add, saved, run="run")
        for name in names:
            self.say(name, Hello("", ADDRESSES, START, 7))
        self.told.clear()

    def _save(self, state: dict[str, Any]) -> None:
        self.saved = state

    def _add(self, tag: Tag) -> None:
        self.saved = {**self.saved, "line": [*self.saved["line"], list(tag)]}

    def _keep(self, sent: Sequence[tuple[str, FromCoordinator]]) -> None:
        for name, message in sent:
            self.told.setdefault(name, []).append(message)

    def say(self, name: str, message: Any) -> None:
        self._keep(self.own.handle(self.now, name, message))

    def lose(self, name: str) -> None:
        self._keep(self.own.gone(self.now, name))

    def after(self, seconds: float, *alive: str) -> None:
        self.now += seconds
        for name in alive:
            self.own.members[name].heard = self.now
        self._keep(self.own.tick(self.now))

    def last(self, name: str) -> Any:
        return self.told[name][-1]

    def begin(self, *names: str) -> Tag:
        for name in names:
            self.say(name, Ready(1))
        return Tag(*self.last(names[0]).tag)


def test_a_round_begins_when_all_living_members_are_ready() -> None:
    led = Led("a", "b", "c")
    led.say("a", Ready(1))
    led.say("b", Ready(4))
    assert not led.told
    led.say("c", Ready(2))
    members = tuple((name, ADDRESSES) for name in "abc")
    assert [led.last(name) for name in "abc"] == [Begin(n, led.last("a").tag, members) for n in (1, 4, 2)]


def test_a_round_begins_without_those_who_are_not_ready_in_time() -> None:
    led = Led("a", "b", "c")
    led.say("a", Ready(1))
    led.say("b", Ready(1))
    led.after(9, "a", "b", "c")
    assert not led.told
    led.after(1, "a", "b", "c")
    assert [name for name, _ in led.last("a").members] == ["a", "b"] and "c" not in led.told


def test_a_member_alone_is_told_at_once_to_go_on() -> None:
    led = Led("a")
    led.say("a", Ready(3))
    assert isinstance(led.last("a"), GoOn) and led.last("a").ready == 3


def test_a_member_waits_for_a_quorum_half_of_the_time_out() -> None:
    led = Led("a", "b")
    led.say("a", Ready(1))
    led.after(29, "a", "b")
    assert not led.told
    led.after(1, "a", "b")
    assert isinstance(led.last("a"), GoOn)


def test_a_decision_is_saved_before_it_is_told() -> None:
    led = Led("a", "b")
    tag = led.begin("a", "b")
    led.say("a", Prepared(tag, 5))
    assert led.saved["line"] == [[0, 0]]
    led.say("b", Prepared(tag, 5))
    assert led.saved["line"] == [[0, 0], list(tag)]
    assert led.last("a") == led.last("b") == Commit(tag)


def test_the_state_is_stored_anew_after_many_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line would grow without end."""
    monkeypatch.setattr(coordinator, "KEPT", 3)
    led, lengths = Led("a"), list[int]()
    led.own.settings = Settings(quorum=1)
    for number in range(1, 8):
        led.say("a", Ready(number))
        led.say("a", Prepared(led.last("a").tag, 5))
        led.say("a", Has(led.own.committed, number))
        lengths.append(len(led.saved["line"]))
    assert lengths == [2, 3, 3, 4, 5, 3, 4] and led.saved["line"][-1] == list(led.own.committed)


def shares(led: Led, *names: str) -> list[float]:
    return [led.last(name).share for name in names]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1, 1, 1), [1.0, 1.0, 1.0]),
        ((2, 1, 1), [1.5, 0.75, 0.75]),
        ((0, 3, 3), [0, 1.5, 1.5]),
        ((0,) * 3, [1.0] * 3),
    ],
)
def test_members_are_told_their_weight_beside_the_mean_of_all(weights: Any, expected: list[float]) -> None:
    led = Led("a", "b", "c")
    for name, weight in zip("abc", weights, strict=True):
        led.say(name, Ready(1, weight=weight))
    assert shares(led, *"abc") == expected


def test_shares_are_of_those_who_repeat_a_round() -> None:
    led = Led("a", "b", "c")
    for name, weight in zip("abc", (1, 3, 8), strict=True):
        led.say(name, Ready(1, weight=weight))
    led.lose("c")
    assert shares(led, "a", "b") == [0.5, 1.5]


def test_a_member_of_an_older_version_is_refused() -> None:
    line = (
        b'{"kind": "Hello", "run": "", "addresses": [], "tag": [0, 0], "digest": 7, "settings": "", "version": 1}'
    )
    led = Led("a")
    led.say("b", decode(line))
    reason = led.last("b").reason
    assert "speaks version 4 of the protocol, and the member 1" in reason and "the same version of dgc" in reason
    assert "b" not in led.own.members


def test_a_failed_exchange_is_repeated_with_the_same_members_first() -> None:
    led = Led("a", "b", "c")
    tag = led.begin("a", "b", "c")
    led.say("a", Failed(tag, ("c",)))
    assert Void(tag) in led.told["b"] and [name for name, _ in led.last("b").members] == ["a", "b", "c"]
    led.say("a", Failed(led.last("b").tag, ("c",)))
    assert [name for name, _ in led.last("b").members] == ["a", "b"] and isinstance(led.last("c"), GoOn)


def test_a_round_is_repeated_without_a_dead_member() -> None:
    led = Led("a", "b", "c")
    tag = led.begin("a", "b", "c")
    led.say("a", Prepared(tag, 5))
    led.lose("b")
    assert led.told["a"][-2] == Void(tag) and [name for name, _ in led.last("a").members] == ["a", "c"]


def test_a_silent_member_counts_as_dead() -> None:
    led = Led("a", "b", "c")
    tag = led.begin("a", "b", "c")
    led.after(5.5, "a", "b")
    assert "c" not in led.own.members and Void(tag) in led.told["a"]


@pytest.mark.parametrize("end", [lambda led: led.lose("b"), lambda led: led.say("b", Leave())])
def test_the_contribution_of_a_prepared_member_counts_if_it_dies_or_leaves(end: Any) -> None:
    led = Led("a", "b")
    tag = led.begin("a", "b")
    led.say("b", Prepared(tag, 5))
    end(led)
    led.say("a", Prepared(tag, 5))
    assert led.last("a") == Commit(tag)


def test_an_attempt_ends_with_its_time() -> None:
    led = Led("a", "b", "c")
    tag = led.begin("a", "b", "c")
    led.after(30, "a", "b", "c")
    assert all(led.told[name][-2] == Void(tag) and isinstance(led.last(name), GoOn) for name in "abc")


def test_members_with_other_bits_must_load_the_model_of_most() -> None:
    led = Led("a", "b", "c")
    tag = led.begin("a", "b", "c")
    for name, digest in zip("abc", (5, 6, 5), strict=True):
        led.say(name, Prepared(tag, digest))
    assert [name for name, _ in led.last("a").members] == ["a", "c"] and isinstance(led.last("b"), GoOn)
    again = led.last("a").tag
    led.say("a", Prepared(again, 5))
    led.say("c", Prepared(again, 5))
    led.say("a", Has(again, 9))
    led.say("b", Ready(2))
    assert led.last("b") == Missed(2, again, "a", ADDRESSES)


def test_a_member_whose_committed_state_has_other_bits_must_load_it() -> None:
    led = Led("a", "b")
    tag = led.begin("a", "b")
    for name in "ab":
        led.say(name, Prepared(tag, 5))
    led.say("a", Has(tag, 9))
    led.say("b", Has(tag, 10))
    led.say("b", Ready(2))
    assert isinstance(led.last("b"), Missed)


def committed(led: Led, *names: str) -> Tag:
    """Let some members commit a round."""
    tag = exchanging(led, *names)
    for name in names:
        led.say(name, Prepared(tag, 5))
    for name in names:
        led.say(name, Has(tag, tag.attempt))
    return tag


def exchanging(led: Led, *names: str) -> Tag:
    for name in names:
        led.say(name, Ready(1))
    led.after(10, *led.own.members)
    return Tag(*led.last(names[0]).tag)


def late(seconds: float = 600.0) -> Led:
    """A coordinator of a and b, whose second round was committed while c loaded the state of the first one."""
    led = Led("a", "b", "c", settings=Settings(quorum=2, grace=10.0, timeout=60.0, loading=seconds))
    old = committed(led, "a", "b")
    led.say("c", Ready(1))
    assert isinstance(led.last("c"), Missed)
    committed(led, "a", "b")
    led.say("c", Has(old, old.attempt))
    led.say("c", Ready(2))
    return led


def test_rounds_are_put_off_if_a_state_was_old_when_it_was_loaded() -> None:
    led = late()
    assert led.last("c") == Missed(2, led.own.committed, led.last("c").source, ADDRESSES)
    for name in "ab":
        led.say(name, Ready(2))
        assert led.last(name) == GoOn(2, "c must load the state")


def test_a_member_takes_part_as_soon_as_it_has_loaded_the_state_for_which_rounds_were_put_off() -> None:
    led = late()
    led.say("a", Ready(2))
    now = led.own.committed
    led.say("c", Has(now, now.attempt))
    led.say("c", Ready(3))
    led.begin("a", "b")
    assert [name for name, _ in led.last("c").members] == ["a", "b", "c"]


def test_rounds_are_put_off_no_longer_for_a_member_that_has_the_last_state() -> None:
    """It need not be ready, and the run may have gone back to the state that it had."""
    led = late()
    now = led.own.committed
    led.say("c", Has(now, now.attempt))
    led.told.clear()
    led.say("a", Ready(2))
    assert "a" not in led.told and exchanging(led, "a", "b").round == now.round + 1


def test_rounds_are_put_off_if_one_was_exchanged_when_a_state_was_loaded() -> None:
    led = Led("a", "b", "c")
    old = committed(led, "a", "b")
    led.say("c", Ready(1))
    tag = exchanging(led, "a", "b")
    led.say("c", Has(old, old.attempt))
    led.say("c", Ready(2))
    assert isinstance(led.last("c"), Missed) and led.last("c").ready == 1
    for name in "ab":
        led.say(name, Prepared(tag, 5))
        led.say(name, Has(tag, 9))
    assert led.last("c").ready == 2
    led.say("a", Ready(2))
    assert led.last("a") == GoOn(2, "c must load the state")


def test_a_state_that_becomes_old_while_it_waits_for_an_exchange_is_loaded_after_it() -> None:
    led = Led("a", "b", "c")
    old = committed(led, "a", "b")
    led.say("c", Ready(1))
    committed(led, "a", "b")
    tag = exchanging(led, "a", "b")
    led.say("c", Has(old, old.attempt))
    led.say("c", Ready(2))
    assert led.last("c").ready == 1
    for name in "ab":
        led.say(name, Prepared(tag, 5))
        led.say(name, Has(tag, 9))
    assert led.last("c") == Missed(2, tag, led.last("c").source, ADDRESSES)


ENDS: dict[str, Callable[[Led], None]] = {
    "it dies": lambda led: led.lose("c"),
    "it leaves": lambda led: led.say("c", Leave()),
    "the time is over": lambda led: led.after(20, "a", "b", "c"),
}


@pytest.mark.parametrize("end", ENDS)
def test_rounds_go_on_without_a_member_for_which_they_were_put_off(end: str) -> None:
    led = late(seconds=20)
    ENDS[end](led)
    assert exchanging(led, "a", "b").round == 3


def test_rounds_are_not_put_off_again_for_a_member_that_was_too_slow() -> None:
    led = late(seconds=20)
    old = led.own.committed
    led.after(20, "a", "b", "c")
    committed(led, "a", "b")
    led.say("c", Has(old, old.attempt))
    led.say("c", Ready(3))
    assert isinstance(led.last("c"), Missed) and exchanging(led, "a", "b").round == 4


def test_a_round_is_between_two_times_for_which_rounds_are_put_off() -> None:
    """Members that come one after another cannot stop the run."""
    led = late()
    led.say("d", Hello("", ADDRESSES, START, 8))
    led.say("d", Ready(1))
    old = led.last("d").tag
    led.say("c", Leave())
    led.own.members["d"].is_late = True
    led.say("d", Ready(2))
    assert isinstance(led.last("d"), Missed) and exchanging(led, "a", "b").round == old.round + 1


@pytest.mark.parametrize(("digest", "kind"), [(7, GoOn), (8, Missed)])
def test_a_new_member_asks_for_the_last_committed_state(digest: int, kind: type) -> None:
    led = Led("a", "b")
    led.say("c", Hello("", ADDRESSES, START, digest))
    assert isinstance(led.last("c"), Welcome)
    led.say("c", Ready(1, only_heals=True))
    assert isinstance(led.last("c"), kind)


def test_a_member_that_was_declared_dead_must_connect_again() -> None:
    led = Led("a", "b")
    led.lose("a")
    led.say("a", Ready(1))
    assert led.last("a") == Refused("")


def test_a_member_that_has_a_committed_round_of_another_run_is_refused() -> None:
    led = Led("a", "b")
    committed(led, "a", "b")
    led.say("c", Hello("other", ADDRESSES, Tag(3, 3), 7))
    assert "of the run other" in led.last("c").reason


def test_a_member_without_a_committed_round_may_have_begun_in_another_run() -> None:
    led = Led("a", "b")
    committed(led, "a", "b")
    led.say("c", Hello("other", ADDRESSES, START, 7))
    assert led.last("c").run == led.own.run


def test_a_run_without_a_committed_round_gives_way_to_one_that_has_some() -> None:
    """The coordinator has lost its file, and a member that begins has come before the others."""
    led = Led("a", "b")
    void = led.begin("a", "b")
    led.say("c", Hello("other", ADDRESSES, Tag(5, 5), 8))
    assert led.last("c").run == led.own.run == "other" and led.own.committed == Tag(5, 5)
    assert led.told["a"][-2:] == led.told["b"][-2:] == [Void(void), Refused("")]
    led.say("a", Hello("run", ADDRESSES, START, 7))
    led.say("a", Ready(2, only_heals=True))
    assert isinstance(led.last("a"), Missed) and led.last("a").source == "c"


def test_decisions_of_a_run_before_it_was_taken_up_are_not_known() -> None:
    led = Led("a")
    led.say("c", Hello("other", ADDRESSES, Tag(5, 5), 8))
    led.say("c", Ask(Tag(6, 6)))
    assert led.last("c") == Unknown(Tag(6, 6))


def test_a_coordinator_that_starts_again_knows_its_decisions() -> None:
    led = Led("a", "b")
    tag = committed(led, "a", "b")
    undecided = Tag(tag.round + 1, tag.attempt + 1)
    again = Led("a", saved=led.saved)
    for asked in (tag, undecided):
        again.say("a", Ask(asked))
    assert again.told["a"] == [Commit(tag), Void(undecided)]


def test_a_coordinator_without_its_file_knows_that_it_does_not_know() -> None:
    led = Led("a", "b")
    tag = led.begin("a", "b")
    again = Led()
    again.own = Coordinator(SETTINGS, led._save, led._add, run="new", epoch=2)
    again.say("a", Hello("run", ADDRESSES, START, 7))
    again.say("a", Ask(tag))
    assert again.own.run == "run" and again.last("a") == Unknown(tag)


def test_without_its_file_an_attempt_is_void_if_a_member_comes_with_a_later_state() -> None:
    """It would not count from the last committed state."""
    led = Led()
    led.own = Coordinator(SETTINGS, led._save, led._add, run="new", epoch=2)
    for name in "ab":
        led.say(name, Hello("run", ADDRESSES, Tag(4, 4), 7))
    tag = led.begin("a", "b")
    led.say("c", Hello("run", ADDRESSES, Tag(5, 5), 8))
    for name in "ab":
        assert [type(message) for message in led.told[name][-2:]] == [Void, Missed]
        led.say(name, Prepared(tag, 5))
    assert led.own.committed == Tag(5, 5) and led.last("a") == Void(tag)


def test_the_run_goes_back_if_all_that_had_the_last_state_are_lost() -> None:
    led = Led("a", "b")
    tag = committed(led, "a", "b")
    led.lose("a")
    led.lose("b")
    for name in "cd":
        led.say(name, Hello("run", ADDRESSES, START, 7))
    led.after(30, "c", "d")
    led.begin("c", "d")
    assert led.own.committed == START and led.last("c").tag.round == 1 and led.last("c").tag != tag


@pytest.mark.parametrize(
    "message",
    [
        Hello("run", ADDRESSES, Tag(3, 2**40), 2**63),
        Begin(1, Tag(3, 5), (("a", ADDRESSES), ("b", ()))),
        Failed(Tag(3, 5), ("a", "b")),
        Has(Tag(1, 2), 3),
        Leave(),
    ],
)
def test_messages_pass_through_their_text(message: Any) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"kind": "Beat", "x": 1}', b'{"kind": "exit"}', b"\xff"])
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="no message of this version"):
        decode(line)


@pytest.mark.parametrize(
    "settings", [{"quorum": 0}, {"grace": -1.0}, {"timeout": 0.0}, {"beat": 5.0}, {"loading": -1.0}]
)
def test_settings_that_cannot_work_are_refused(settings: Any) -> None:
    with pytest.raises(ValueError):
        Settings(**settings)
