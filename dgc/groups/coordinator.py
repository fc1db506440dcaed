"""The coordinator of replica groups: who takes part in a round, and whether it counts.

It has no sockets and no clock. `handle`, `gone` and `tick` are given the time, and return messages:

    gathering      members say Ready. When `quorum` of those with the last committed state are ready, the others
                   have `grace` seconds. Whoever has an older state is told so (Missed) and loads the last one.
    exchanging     Begin to the participants. They exchange, and say Prepared or Failed.
    decision       All are prepared with equal digests: the decision is saved first, then Commit. A failure, a
                   death or the end of time before that: Void to all, and another attempt without whoever is gone.

A member that is prepared can neither apply the means nor drop them until it knows the decision. If it dies then,
its contribution counts. If the coordinator ends before the decision is saved, the attempt is void, since attempts
are never numbered twice. If all members that had the last committed state are lost, the run goes back to the
newest state that a member has. If the file is lost, the run goes on from the newest state that a member has, also
if a member that begins comes first: a run without a committed round gives way to one that has some.

A member whose loading takes longer than a round has an old state again when it has loaded one. Rounds are put off
then until it has loaded another one, for at most `loading` seconds. Nobody waits: the others train on (GoOn).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dgc.core.arguments import NUMBER, WHOLE, require
from dgc.groups.messages import (
    START,
    VERSION,
    Addresses,
    Ask,
    Beat,
    Begin,
    Commit,
    Failed,
    FromCoordinator,
    FromMember,
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
)

Sent: TypeAlias = tuple[str, FromCoordinator]
KEPT = 10_000  # rounds whose decisions are kept
UP_TO_DATE = "the member has the last committed state"
EPOCH = 2**24  # attempts that one start of the coordinator may number


@dataclass(frozen=True)
class Settings:
    """Settings of the rounds.

    Args:
        quorum: Members without which there is no round.
        grace: Seconds for the others, after `quorum` members are ready.
        timeout: Seconds. A member waits half of it for a quorum, and a round has half of it for its exchange.
        lost: Seconds without a sign of a member after which it counts as dead.
        beat: Seconds between two signs.
        loading: Seconds for which rounds are put off at most, while a member loads a state once more. 0: never.
    """

    quorum: int = 2
    grace: float = 10.0
    timeout: float = 120.0
    lost: float = 5.0
    beat: float = 1.0
    loading: float = 600.0

    def __post_init__(self) -> None:
        require("a whole number of at least 1", WHOLE, least=1, quorum=self.quorum)
        names = ("grace", "timeout", "lost", "beat", "loading")
        seconds = {name: getattr(self, name) for name in names}
        require("a number of seconds", NUMBER, **seconds)
        if min(self.grace, self.loading) < 0 or self.timeout <= 0 or not 0 < self.beat < self.lost:
            raise ValueError(
                "grace and loading must be 0 or more, timeout positive, and beat positive and less than lost, not "
                f"{seconds}"
            )


@dataclass
class Known:
    """A member that is alive.

    Attributes:
        ready: The number of its Ready that has no answer yet.
        loads: The round whose state it was told to load.
        has_loaded: It has done so since its last Ready.
        is_late: When it had loaded a state, a round was committed or exchanged without it.
        is_too_slow: Rounds were put off for it in vain.
    """

    addresses: Addresses
    heard: float
    tag: Tag
    digest: int
    ready: int | None = None
    since: float = 0.0  # when it became ready
    only_heals: bool = False
    weight: int = 1
    loads: int | None = None
    has_loaded: bool = False
    is_late: bool = False
    is_too_slow: bool = False


@dataclass
class Attempt:
    """An attempt of a round. ready: of each participant, the number of its Ready."""

    tag: Tag
    ready: dict[str, int]
    deadline: float
    digests: dict[str, int] = field(default_factory=dict)
    failures: int = 0  # of earlier attempts of the round, without a death


class Coordinator:
    """Leads the rounds. `save` and `add` must have written their argument to the disk when they return.

    Args:
        settings: Of the rounds.
        save: Stores the state, plain values for JSON, of which another coordinator is made later.
        add: Adds a decision to the "line" of the state that was stored.
        saved: What the coordinator before has stored. None: a new run.
        run: Name of a new run, unlike all others.
        epoch: A number above that of every coordinator before, whose file may be lost.
        log: Called with what has happened, for people.
    """

    def __init__(
        self,
        settings: Settings,
        save: Callable[[dict[str, Any]], None],
        add: Callable[[Tag], None],
        saved: Mapping[str, Any] | None = None,
        *,
        run: str = "",
        epoch: int = 1,
        log: Callable[[str], None] = lambda text: None,
    ):
        self.settings, self._save, self._add, self._log = settings, save, add, log
        self.members: dict[str, Known] = {}
        self.attempt: Attempt | None = None
        self._is_new, self._given = saved is None, run
        self.run: str = "" if saved is None else saved["run"]
        self._common: str = "" if saved is None else saved["settings"]
        self.line: list[Tag] = [START] if saved is None else [Tag(*tag) for tag in saved["line"]]
        epoch = epoch if saved is None else max(epoch, saved["epoch"] + 1)
        self._known_since = epoch * EPOCH if saved is None else saved["since"]
        self._epoch, self._next = epoch, epoch * EPOCH
        self._digests: dict[Tag, int] = {}  # of states, as the first member that has each one says
        self._quorum_at: float | None = None
        self._sourceless_at: float | None = None  # since when nobody has the last committed state
        self._loading = set[str]()  # members for which rounds are put off
        self._loading_until = 0.0
        self._loading_ended: Tag | None = None  # the last committed state at that moment
        self._outcomes: list[tuple[Tag, tuple[str, ...]]] = []  # of this start, for reports
        self._store()

    @property
    def committed(self) -> Tag:
        """The last committed state."""
        return self.line[-1]

    def _store(self) -> None:
        line = [list(tag) for tag in self.line[-KEPT:]]
        known = {"run": self.run, "settings": self._common, "epoch": self._epoch, "since": self._known_since}
        self._save({**known, "line": line})
        self._added = 0

    def _keep_decision(self, tag: Tag) -> None:
        """Store a decision, before anybody is told."""
        self.line = [*self.line[-KEPT:], tag]
        self._added += 1
        if self._added < KEPT:
            self._add(tag)
        else:
            self._store()

    # --- events -----------------------------------------------------------------------------------

    def handle(self, now: float, sender: str, message: FromMember) -> list[Sent]:
        """Take a message of a member."""
        if isinstance(message, Hello):
            return self._meet(now, sender, message)
        member = self.members.get(sender)
        if member is None:  # it was declared dead: it must connect again
            return [(sender, Refused(""))]
        member.heard = now
        sent: list[Sent] = []
        match message:
            case Has(tag, digest):
                self._note(member, tag, digest)
            case Beat():
                pass
            case Ready(number, only_heals, weight):
                member.ready, member.since, member.only_heals, member.weight = number, now, only_heals, weight
                if member.has_loaded:
                    is_busy = self.attempt is not None and not only_heals
                    member.has_loaded, member.is_late = False, is_busy or not self._is_current(member)
            case Leave():
                member.ready, member.is_late = None, False
                if self.attempt is not None and sender in self.attempt.ready:
                    if sender not in self.attempt.digests:
                        sent += self._repeat(now, f"{sender} has left", {sender})
            case Ask(tag):
                sent += [(sender, answer) for answer in self._decision(tag)]
            case Prepared(tag, digest):
                if self.attempt is not None and self.attempt.tag == tag and sender in self.attempt.ready:
                    self.attempt.digests[sender] = digest
                    if len(self.attempt.digests) == len(self.attempt.ready):
                        sent += self._decide(now)
                else:  # it has become void meanwhile
                    sent += [(sender, answer) for answer in self._decision(tag)]
            case Failed(tag, suspects):
                if self.attempt is not None and self.attempt.tag == tag and sender in self.attempt.ready:
                    sent += self._fail(now, sender, suspects)
        return sent + self._consider(now)

    def gone(self, now: float, sender: str) -> list[Sent]:
        """A member's connection has ended."""
        if self.members.pop(sender, None) is None:
            return []
        sent: list[Sent] = []
        if self.attempt is not None and sender in self.attempt.ready and sender not in self.attempt.digests:
            sent += self._repeat(now, f"{sender} is gone", {sender})
        return sent + self._consider(now)

    def tick(self, now: float) -> list[Sent]:
        """Let time pass."""
        sent: list[Sent] = []
        for name, member in list(self.members.items()):
            if now - member.heard > self.settings.lost:
                self._log(f"{name} has been silent for {self.settings.lost:g} s")
                sent += self.gone(now, name)
        if self.attempt is not None and now >= self.attempt.deadline:
            late = self.attempt.ready.keys() - self.attempt.digests.keys()
            sent += self._repeat(now, f"no time is left for {', '.join(sorted(late))}", late)
        return sent + self._consider(now)

    # --- members ----------------------------------------------------------------------------------

    def _meet(self, now: float, sender: str, hello: Hello) -> list[Sent]:
        if hello.version != VERSION:
            reason = f"the coordinator speaks version {VERSION} of the protocol, and the member {hello.version}"
            return [(sender, Refused(f"{reason}: install the same version of dgc"))]
        if self._is_new and not self.run:
            self.run, self._common = hello.run or self._given, hello.settings
            self._store()
        sent: list[Sent] = []
        if hello.run not in ("", self.run) and hello.tag != START:
            if self.committed != START:
                reason = f"this coordinator leads the run {self.run}, and the member is of the run {hello.run}"
                return [(sender, Refused(f"{reason}: give it another folder, or another coordinator"))]
            sent += self._take_up(hello)
        if hello.settings != self._common:
            reason = "the member has other settings of its outer steps, another model or another number of ranks"
            return [*sent, (sender, Refused(f"{reason} than the run: start all groups with the same"))]
        known = self.members.get(sender)
        self.members[sender] = member = Known(hello.addresses, now, hello.tag, hello.digest)
        self._note(member, hello.tag, hello.digest)
        settings = self.settings
        sent.append((sender, Welcome(self.run, settings.grace, settings.timeout)))
        if hello.tag.attempt < self._known_since and hello.tag.round > self.committed.round:
            sent += self._go_on_from(hello.tag)
        if known is not None and self.attempt is not None and sender in self.attempt.ready:
            if sender not in self.attempt.digests:  # it has lost the attempt with its connection
                sent += self._repeat(now, f"{sender} has connected again", {sender})
        self._log(f"{sender} is here, with round {hello.tag.round}")
        return sent + self._consider(now)

    def _take_up(self, hello: Hello) -> list[Sent]:
        """Lead the run of a member, in place of one without a committed round. Its members connect again."""
        self._log(f"takes up the run {hello.run}, in place of {self.run}, which has no committed round")
        self.run, self._common = hello.run, hello.settings
        self._known_since = self._next
        sent = self._go_on_from(hello.tag)
        sent += [(name, Refused("")) for name in self.members]
        self.members.clear()
        return sent

    def _go_on_from(self, tag: Tag) -> list[Sent]:
        """The file was lost, and a member has a later state than all others. An attempt of them is void."""
        attempt, self.attempt, self.line = self.attempt, None, [tag]
        self._store()
        if attempt is None:
            return []
        return [(name, Void(attempt.tag)) for name in attempt.ready if name in self.members]

    def _note(self, member: Known, tag: Tag, digest: int) -> None:
        member.tag, member.digest = tag, digest
        if member.loads is not None and tag.round >= member.loads:
            member.loads, member.has_loaded = None, True
        self._digests.setdefault(tag, digest)
        for old in [tag for tag in self._digests if tag not in self.line[-8:] and tag != member.tag]:
            del self._digests[old]

    def _is_current(self, member: Known) -> bool:
        """Whether a member has the last committed state, bit for bit as the first one that had it."""
        return member.tag == self.committed and member.digest == self._digests.get(member.tag)

    # --- gathering --------------------------------------------------------------------------------

    def _consider(self, now: float) -> list[Sent]:
        """Begin a round, or answer those who would wait in vain."""
        settings, sent = self.settings, list[Sent]()
        busy = set() if self.attempt is None else self.attempt.ready.keys()
        current = [name for name, member in self.members.items() if self._is_current(member)]
        if current or busy:
            self._sourceless_at = None
        elif self._sourceless_at is None:
            self._sourceless_at = now
        if self._sourceless_at is not None and now - self._sourceless_at >= settings.timeout / 2:
            self._go_back()
            return self._consider(now)
        self._end_loading(now)
        for name, member in self.members.items():
            if member.ready is None or name in busy:
                continue
            if not self._is_current(member) and current:
                if self._puts_off(now, name) and self.attempt is not None:
                    continue  # the state is old as soon as the attempt has ended
                source = current[hash_of(name, member.ready) % len(current)]
                sent.append((name, self._missed(member, source)))
                member.loads = self.committed.round
            elif member.only_heals and self._is_current(member):
                sent.append((name, GoOn(member.ready, UP_TO_DATE)))
            elif len(self.members) < settings.quorum:
                sent.append((name, GoOn(member.ready, "there are fewer members than the quorum")))
            elif self.attempt is None and now - member.since >= settings.timeout / 2:
                sent.append((name, GoOn(member.ready, "no quorum in time")))
            elif self._loading and self._is_current(member):
                sent.append((name, GoOn(member.ready, f"{', '.join(sorted(self._loading))} must load the state")))
            else:
                continue
            member.ready = None
        if self.attempt is None:
            asked = {name for name, member in self.members.items() if member.ready is not None}
            ready = [name for name in current if name in asked and not self.members[name].only_heals]
            if len(ready) < settings.quorum:
                self._quorum_at = None
                return sent
            self._quorum_at = now if self._quorum_at is None else self._quorum_at
            if len(ready) == len(self.members) or now - self._quorum_at >= settings.grace:
                self._quorum_at = None
                sent += self._begin(ready, now + settings.timeout / 2)
        return sent

    def _end_loading(self, now: float) -> None:
        """Let rounds begin again, if they are put off, when nobody is late any more or the time is over."""
        if now >= self._loading_until:
            for name in self._loading & self.members.keys():
                self.members[name].is_late, self.members[name].is_too_slow = False, True
                self._log(f"{name} has not loaded a state in {self.settings.loading:g} s: rounds go on without it")
        for name in self._loading & self.members.keys():
            self.members[name].is_late &= not self._is_current(self.members[name])
        left = {name for name in self._loading if name in self.members and self.members[name].is_late}
        if self._loading and not left:
            self._loading_ended = self.committed
        self._loading = left

    def _puts_off(self, now: float, name: str) -> bool:
        """Whether rounds are put off for a member that has an old state. They are from now on if it is late.

        There is a round between two such times, so that members that come one after another cannot stop the run.
        """
        member = self.members[name]
        if member.is_late and not member.is_too_slow and name not in self._loading:
            if not self._loading and self.settings.loading and self.committed != self._loading_ended:
                self._loading_until = now + self.settings.loading
                self._loading.add(name)
                self._log(f"rounds are faster than {name} loads a state: they are put off until it has loaded one")
            elif self._loading:
                self._loading.add(name)
        return name in self._loading

    def _missed(self, member: Known, source: str) -> Missed:
        assert member.ready is not None
        return Missed(member.ready, self.committed, source, self.members[source].addresses)

    def _go_back(self) -> None:
        """All that had the last committed state are lost: go back to the newest one that a member has."""
        held = [member.tag for member in self.members.values()]
        self._sourceless_at = None
        if not held:
            return
        newest = max((tag for tag in held if tag in self.line), default=None) or max(held)
        self._log(f"nobody has round {self.committed.round}: the run goes back to round {newest.round}")
        self.line = [tag for tag in self.line if tag.round < newest.round] + [newest]
        self._digests.pop(newest, None)
        for member in self.members.values():
            if member.tag == newest:
                self._digests.setdefault(newest, member.digest)
        self._store()

    # --- exchanging -------------------------------------------------------------------------------

    def _begin(self, names: Iterable[str], deadline: float, failures: int = 0) -> list[Sent]:
        tag, self._next = Tag(self.committed.round + 1, self._next + 1), self._next + 1
        ready = {name: number for name in sorted(names) if (number := self.members[name].ready) is not None}
        self.attempt = Attempt(tag, ready, deadline, failures=failures)
        for name in ready:
            self.members[name].is_late = self.members[name].is_too_slow = False
        members = tuple((name, self.members[name].addresses) for name in ready)
        weights = {name: self.members[name].weight for name in ready}
        total = sum(weights.values())
        shares = {name: len(ready) * weight / total if total else 1.0 for name, weight in weights.items()}
        return [(name, Begin(number, tag, members, shares[name])) for name, number in ready.items()]

    def _fail(self, now: float, sender: str, suspects: Iterable[str]) -> list[Sent]:
        """A member's exchange has failed. The first time, with the suspects: whoever is dead shows it itself."""
        assert self.attempt is not None
        self.attempt.failures += 1
        without: set[str] = set()
        if self.attempt.failures > 1:
            named = [name for name in suspects if name in self.attempt.ready and name != sender]
            without = {named[-1] if named else sender}
        return self._repeat(now, f"the exchange of {sender} has failed", without)

    def _repeat(self, now: float, reason: str, without: Iterable[str]) -> list[Sent]:
        """The attempt is void. Begin another one without some members, if there are enough."""
        attempt, self.attempt = self.attempt, None
        assert attempt is not None
        self._log(f"round {attempt.tag.round} is void: {reason}")
        sent: list[Sent] = [(name, Void(attempt.tag)) for name in attempt.ready if name in self.members]
        out = set(without)
        left = [
            name
            for name, number in attempt.ready.items()
            if name in self.members and name not in out and self.members[name].ready == number
        ]
        if len(left) >= self.settings.quorum and now < attempt.deadline:
            sent += self._begin(left, attempt.deadline, attempt.failures)
            left = []
        for name in [*left, *(name for name in attempt.ready if name in out and name in self.members)]:
            member = self.members[name]
            if member.ready is not None:
                sent.append((name, GoOn(member.ready, reason)))
                member.ready = None
        return sent

    def _decide(self, now: float) -> list[Sent]:
        """All participants are prepared."""
        attempt = self.attempt
        assert attempt is not None
        found = list(attempt.digests.values())
        common = max(found, key=lambda digest: (found.count(digest), -found.index(digest)))
        if others := {name for name, digest in attempt.digests.items() if digest != common}:
            # whoever differs has another model: it must load the one of the others
            for name in others & self.members.keys():
                self.members[name].digest = ~self.members[name].digest
            return self._repeat(now, f"other bits on {', '.join(sorted(others))}", others)
        self._keep_decision(attempt.tag)
        self.attempt = None
        self._outcomes = [*self._outcomes[-KEPT:], (attempt.tag, tuple(attempt.ready))]
        self._log(f"round {attempt.tag.round} is committed by {', '.join(attempt.ready)}")
        sent: list[Sent] = []
        for name in attempt.ready:
            if name in self.members:
                self.members[name].ready = None
                sent.append((name, Commit(attempt.tag)))
        return sent

    def _decision(self, tag: Tag) -> list[FromCoordinator]:
        """What is known about an attempt. Nothing while it is undecided."""
        if self.attempt is not None and self.attempt.tag == tag:
            return []
        if tag in self.line:
            return [Commit(tag)]
        if tag.attempt < self._known_since or (tag.round <= self.line[0].round and len(self.line) >= KEPT):
            return [Unknown(tag)]
        return [Void(tag)]


def hash_of(name: str, number: int) -> int:
    """A number that spreads members over sources, the same in every process."""
    return sum(name.encode()) + number
