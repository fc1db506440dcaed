"""The outer step of a member: a generator that yields what it needs from outside, and is resumed with it.

    z0     the model after the last committed state that the member has
    z      its model now; z0 - z is its pseudo-gradient
    s      z when an exchange was prepared whose decision the member does not know yet

    exchange    copy the error states; the means of z0 - z over the participants arrive, nothing is applied. With
                weights, z0 - z is multiplied by the member's share
    commit      z0 = outer(z0, means);  z = z0, or z0 + (z - s) after a late decision
    void        the error states of the copy; z0 and z stay
    heal        z0 and outer state of another member.  z = z0 + (z - the own z0) with the member's error states,
                if it missed at most `max_staleness` rounds, else z = z0 without them

A state has its *line*: the committed states before it, and itself. If the coordinator has lost its file, a member
that does not know a decision learns from the line of a state that it loads whether the attempt was committed. When
it takes part in another attempt, the one before is void: nobody who is there has a later state. Those who have one
may come later. Rounds of their line that are not in the line of the state that they load are lost. If they have
more rounds than the others, those load theirs, and drop their own progress if a round in it was void for them.

`Numbers` has these operations. The runtime and the simulator of the tests drive the same generator.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias

from dgc.groups.messages import (
    START,
    Addresses,
    Ask,
    Begin,
    Commit,
    Failed,
    FromCoordinator,
    FromMember,
    GoOn,
    Has,
    Leave,
    Line,
    Missed,
    Prepared,
    Ready,
    Refused,
    Tag,
    Unknown,
    Void,
)


class Numbers(Protocol):
    """The models of a member and its error states, see the module."""

    def weight(self, round: int) -> int:
        """Of the progress that a round would exchange."""

    def prepare(self, round: int, share: float) -> None:
        """Copy the error states, before the exchange of a round in which the progress is multiplied by `share`."""

    def commit(self, round: int) -> int:
        """Apply the means of the exchange of a round. Return a digest of z0 and the outer state."""

    def committed(self, tag: Tag) -> None:
        """The state after `commit` or `heal` has this tag: others may load it."""

    def void(self) -> None:
        """Undo the exchange."""

    def doubt(self) -> None:
        """Remember s, because training goes on without the decision."""

    def heal(self, state: Any, keeps: bool) -> int:
        """Take over the state of another member. keeps: the member's own progress. Return the digest."""


# --- what an outer step yields ----------------------------------------------------------------------


@dataclass(frozen=True)
class Connect:
    """Connect to the coordinator unless that is done. Resumed with whether it is."""


@dataclass(frozen=True)
class Limit:
    """Let all that follows end after the time for a round: grace and time-out of the coordinator."""


@dataclass(frozen=True)
class Send:
    """Send to the coordinator. Resumed with None, also if it is not reached."""

    message: FromMember


@dataclass(frozen=True)
class Receive:
    """The next message of the coordinator. None: it is not reached, or the time is over."""


@dataclass(frozen=True)
class Exchange:
    """Exchange with the participants. Resumed with the digest of state and means, or Broken."""

    begin: Begin


@dataclass(frozen=True)
class Heal:
    """Load the state of a member. Resumed with a Healed, or None: it could not be loaded."""

    tag: Tag
    source: str
    addresses: Addresses


Effect: TypeAlias = Connect | Limit | Send | Receive | Exchange | Heal


@dataclass(frozen=True)
class Broken:
    """The exchange has failed, or is void. suspects: members that were not reached."""

    suspects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Healed:
    """The state of another member, which may be newer than the one that was asked for."""

    line: Line
    state: Any


class Outcome(Enum):
    """How an outer step has ended."""

    COMMITTED = "committed"
    ALONE = "alone"  # without an exchange that counts
    IN_DOUBT = "in doubt"  # prepared, and the decision is not known


MAX_HEALS = 3  # in one outer step
KEPT = 1000  # tags of a line


class Member:
    """A member, over all its outer steps.

    Args:
        numbers: Its models.
        digest: Of the state that it begins with, the one before the first round.
        max_staleness: Rounds that it may have missed and keep its own progress.
        log: Called with what has happened, for people.

    Attributes:
        line, digest: Of the committed state that it has.
        doubt: The attempt whose decision it does not know, if any.
        counted: The round whose state its progress is counted from.
    """

    def __init__(
        self,
        numbers: Numbers,
        digest: int,
        max_staleness: int = 3,
        log: Callable[[str], None] = lambda text: None,
    ):
        self.numbers, self.digest = numbers, digest
        self.line: Line = (START,)
        self.max_staleness, self._log = max_staleness, log
        self.doubt: Tag | None = None
        self._void: tuple[Tag, ...] = ()  # attempts that it was prepared for
        self.is_fresh = True  # without progress of its own: it has trained nothing yet
        self._ready = 0

    @property
    def tag(self) -> Tag:
        """The committed state that it has."""
        return self.line[-1]

    @property
    def _alone(self) -> Outcome:
        return Outcome.IN_DOUBT if self.doubt else Outcome.ALONE

    def join(self) -> Generator[Effect, Any, Outcome]:
        """Load the last committed state, unless the member has it. For a member that begins."""
        return self.outer_step(only_heals=True)

    def outer_step(self, only_heals: bool = False) -> Generator[Effect, Any, Outcome]:
        """Take part in a round, if there is one."""
        yield Limit()
        if not (yield Connect()):
            return self._alone
        if self.doubt is not None and not (yield from self._resolve()):
            return self._alone
        heals = 0
        yield self._next_ready(only_heals)
        while True:
            message = yield Receive()
            match message:
                case None | Refused():
                    yield Send(Leave())
                    return self._alone
                case GoOn(ready, reason) if ready == self._ready:
                    if not only_heals:
                        self._log(f"no round: {reason}")
                    return self._alone
                case Missed(ready) if ready == self._ready:
                    heals += 1
                    if heals > MAX_HEALS or not (yield from self._heal(message)):
                        yield Send(Leave())
                        return self._alone
                    yield self._next_ready(only_heals)
                case Begin(ready) if ready == self._ready:
                    outcome = yield from self._take_part(message)
                    if outcome is not None:
                        return outcome
                case _:
                    pass  # an answer to an earlier step

    def _next_ready(self, only_heals: bool) -> Send:
        self._ready += 1
        return Send(Ready(self._ready, only_heals, self.numbers.weight(self.tag.round + 1)))

    def _take_part(self, begin: Begin) -> Generator[Effect, Any, Outcome | None]:
        """An attempt. None: it is void, and the member waits for another one."""
        if self.doubt is not None:
            yield from self._obey(Void(self.doubt))
        self.numbers.prepare(begin.tag.round, begin.share)
        digest = yield Exchange(begin)
        if isinstance(digest, Broken):
            self.numbers.void()
            yield Send(Failed(begin.tag, digest.suspects))
            return None
        yield Send(Prepared(begin.tag, digest))
        self.doubt = begin.tag
        decision = yield from self._decision()
        if decision is None or isinstance(decision, Unknown):
            self.numbers.doubt()
            yield Send(Leave())
            return Outcome.IN_DOUBT
        yield from self._obey(decision)
        return Outcome.COMMITTED if isinstance(decision, Commit) else None

    def _decision(self) -> Generator[Effect, Any, FromCoordinator | None]:
        """Wait for the decision about the attempt in doubt. None: it is not known in time."""
        while True:
            message = yield Receive()
            if message is None or isinstance(message, Refused):
                return None
            if isinstance(message, Commit | Void | Unknown) and message.tag == self.doubt:
                return message

    def _resolve(self) -> Generator[Effect, Any, bool]:
        """Ask for the decision about an earlier attempt. Returns whether there is an answer."""
        assert self.doubt is not None
        yield Send(Ask(self.doubt))
        decision = yield from self._decision()
        if decision is not None:
            yield from self._obey(decision)
        return decision is not None

    def _obey(self, decision: FromCoordinator) -> Generator[Effect, Any, None]:
        doubt = self.doubt
        assert doubt is not None
        match decision:
            case Commit():
                self.doubt = None
                digest = self.numbers.commit(doubt.round)
                self._take((*self.line[1 - KEPT :], doubt), digest)
                yield Send(Has(self.tag, self.digest))
            case Void():
                self.doubt, self._void = None, (*self._void[1 - KEPT :], doubt)
                self.numbers.void()
            case _:
                pass  # Unknown: the member stays in doubt

    def _take(self, line: Line, digest: int) -> None:
        self.line, self.digest = line, digest
        self.numbers.committed(self.tag)

    def _heal(self, missed: Missed) -> Generator[Effect, Any, bool]:
        healed = yield Heal(missed.tag, missed.source, missed.addresses)
        if healed is None:
            self._log(f"the state of {missed.source} could not be loaded")
            return False
        known, doubt = set(healed.line), self.doubt
        if doubt is not None:
            yield from self._obey(Commit(doubt) if doubt in known else Void(doubt))
        lost = [tag.round for tag in self.line if tag.round >= healed.line[0].round and tag not in known]
        if lost:
            which = f"round {lost[0]}" if len(lost) == 1 else f"rounds {lost[0]} to {lost[-1]}"
            self._log(f"the run goes on without {which} of this group: the steps in it are lost")
        age = healed.line[-1].round - (lost[0] - 1 if lost else self.tag.round)
        keeps = not self.is_fresh and age <= self.max_staleness and known.isdisjoint(self._void)
        if not self.is_fresh:
            what = "its own steps are kept" if keeps else "its own steps since then are dropped"
            self._log(f"{age} rounds were missed: {what}")
        self._take(healed.line, self.numbers.heal(healed.state, keeps))
        yield Limit()
        yield Send(Has(self.tag, self.digest))
        return True
