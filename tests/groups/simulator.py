"""Replica groups on a simulated network with a clock, and faults that are drawn from a seed.

The coordinator and the members are the ones of `dgc.groups`. What a member trains is a set of numbered steps. The
law can thus say of each step where it is: in the common model, in the progress or the residual of its member, or
dropped with a word about it.
"""

import heapq
import itertools
import json
import random
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isclose
from typing import Any, TypeAlias

from dgc.groups.coordinator import Coordinator, Settings
from dgc.groups.member import (
    Broken,
    Connect,
    Exchange,
    Heal,
    Healed,
    Limit,
    Member,
    Outcome,
    Receive,
    Send,
)
from dgc.groups.messages import (
    Beat,
    Begin,
    FromMember,
    Hello,
    Message,
    Prepared,
    Refused,
    Tag,
    Void,
    Welcome,
)

SETTINGS = Settings(quorum=2, grace=2.0, timeout=8.0, lost=2.0, beat=0.5)
COORDINATOR = "coordinator"


Steps: TypeAlias = Counter[int]  # with the share with which a step was exchanged, or 1


def samples_of(step: int) -> int:
    """So many samples does a step have if groups are weighted."""
    return 1 + step * 7 % 5


class SetNumbers:
    """The numbers of a member, whose model is a set of steps. An exchange sends two thirds of them.

    Args:
        weighted: Whether its progress counts by its samples.
        shares: The shares with which the steps of all members were exchanged.

    Attributes:
        dropped: Own steps that were given up.
        sent: Own steps by the round that has counted them, of the last decisions about it.
        lost: Own steps in rounds of which the member has said that the run goes on without them.
    """

    def __init__(self, weighted: bool, shares: dict[int, set[float]]) -> None:
        self.weighted, self.shares = weighted, shares
        self.z0: Steps = Counter()
        self.z: Steps = Counter()
        self.s: Steps | None = None
        self.outer = 0
        self.residual: Steps = Counter()
        self.before: Steps = Counter()
        self.means: Steps = Counter()
        self.dropped: Steps = Counter()
        self.sent: dict[int, set[int]] = {}
        self.lost = set[int]()
        self.share = 1.0

    def train(self, step: int) -> None:
        self.z = self.z + Counter([step])

    def samples(self) -> int:
        """Of the steps of its progress."""
        return sum(map(samples_of, self.z - self.z0))

    def weight(self, round: int) -> int:
        return self.samples() if self.weighted else 1

    def prepare(self, round: int, share: float) -> None:
        self.before, self.share = self.residual, share

    def commit(self, round: int) -> int:
        exchanged = self.z if self.s is None else self.s
        self.sent[round] = {*(exchanged - self.z0), *self.before} - {*self.residual}
        self.z0, self.outer = self.z0 + self.means, self.outer * 31 + round
        self.z = self.z0 if self.s is None else self.z0 + (self.z - self.s)
        self.s = None
        return self.digest()

    def committed(self, tag: Tag) -> None:
        pass

    def void(self) -> None:
        self.residual, self.s = self.before, None

    def doubt(self) -> None:
        self.s = self.z

    def heal(self, state: Any, keeps: bool) -> int:
        own = self.z - self.z0
        self.z0, self.outer = state
        if not keeps:
            given_up = own + self.residual
            self.dropped += Counter({step: n for step, n in given_up.items() if step not in self.z0})
            own, self.residual = Counter(), Counter()
        self.z = self.z0 + own
        return self.digest()

    def lose(self, first: int, last: int) -> None:
        """The member says that the run goes on without these rounds."""
        for round in range(first, last + 1):
            self.lost |= self.sent.pop(round, set())

    def state(self) -> Any:
        return self.z0, self.outer

    def digest(self) -> int:
        return hash((tuple(sorted(self.z0.items())), self.outer))

    def is_once(self, step: int, number: float) -> bool:
        """Whether a step with this number is there once."""
        return any(isclose(number, share) for share in self.shares[step])

    def places(self, undecided: bool) -> Steps:
        """How often steps are in the common model, the progress, the residual or dropped.

        undecided: As if the exchange that runs, or has no decision yet, were void.
        """
        return self.z0 + (self.z - self.z0) + (self.before if undecided else self.residual) + self.dropped


def exchange_sets(round: int, numbers: Sequence[Any]) -> list[int]:
    """The exchange of a round. Returns the digests of the participants."""
    check_shares(numbers)
    sent: Steps = Counter()
    for own in numbers:
        every = own.residual + Counter(dict.fromkeys(own.z - own.z0, own.share))
        for step in own.z - own.z0:
            own.shares[step].add(own.share)
        own.residual = Counter({step: n for step, n in every.items() if (step + round) % 3 == 0})
        sent += every - own.residual
    for own in numbers:
        own.means = Counter(sent)
    return [hash((own.digest(), tuple(sorted(sent.items())))) for own in numbers]


def check_shares(numbers: Sequence[Any]) -> None:
    """Raise AssertionError if the shares of the participants are not those of their samples."""
    samples = [own.samples() for own in numbers]
    for own, number in zip(numbers, samples, strict=True):
        expected = len(samples) * number / sum(samples) if own.weighted and any(samples) else 1.0
        assert isclose(own.share, expected), f"a share of {own.share}, not {expected}"


@dataclass
class Node:
    """A member's process."""

    name: str
    numbers: Any
    member: Member
    life: Generator[Any, Any, Any]
    speed: float
    run: str = ""  # as the coordinator has named it
    connection: int = 0  # 0: none
    inbox: deque[Message] = field(default_factory=deque)
    waits_for: Any = None
    deadline: float = 0.0
    began: float = 0.0  # its outer step
    paused: bool = False
    alive: bool = True
    owed: list[Callable[[], None]] = field(default_factory=list)  # what happens when it is no longer paused
    arrivals: dict[str, float] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    met: float = 0.0  # when it took part in its last committed round
    pauses: float = 0.0
    heals: int = 0
    longest: float = 0.0  # outer step, for each time that it was begun again after healing


class World:
    """A run of `rounds` seconds with faults, and then without them until all members have met.

    Args:
        seed: Of the schedule.
        size: Members at the start.
        make: Makes the numbers of a member. None: sets of steps.
        exchange: Exchanges the numbers of the participants of a round.
        faults: Of the schedule, at most.
        inner: Inner steps between outer steps.
        weighted: Whether members count by their samples.
        loads, exchanges: Seconds in which a member loads a state, and exchanges: at least, at most.
    """

    def __init__(
        self,
        seed: int,
        size: int | None = None,
        *,
        make: Callable[[], Any] | None = None,
        exchange: Callable[[int, Sequence[Any]], list[int]] = exchange_sets,
        faults: int = 6,
        inner: int = 2,
        settings: Settings = SETTINGS,
        loses_file: bool = False,
        weighted: bool = False,
        loads: tuple[float, float] = (0.1, 1.5),
        exchanges: tuple[float, float] = (0.05, 0.5),
    ):
        self.loads, self.exchanges = loads, exchanges
        self.random, self.settings = random.Random(seed), settings
        self.shares: dict[int, set[float]] = defaultdict(lambda: {1.0})
        self.make = make or partial(SetNumbers, weighted, self.shares)
        self.exchange, self.inner = exchange, inner
        self.loses_file = loses_file
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order, self.connections, self.steps = itertools.count(), itertools.count(1), itertools.count()
        self.nodes: dict[str, Node] = {}
        self.cut: set[frozenset[str]] = set()
        self.slow: set[str] = set()
        self.stored: str | None = None
        self.starts = 0
        self.coordinator: Coordinator | None = None
        self.attempts: dict[Tag, dict[str, Node]] = {}
        self.states: dict[Tag, Any] = {}  # the state of each tag, as the first member has it
        self.has_gone_back = False
        self.is_quiet = False
        self.log: list[str] = []
        self.start_coordinator()
        self.tick()
        for _ in range(size or self.random.randint(2, 5)):
            self.start_member()
        self.faults = self.random.randint(1, faults)
        for _ in range(self.faults):
            self.at(self.random.uniform(1, 40), self.fault)

    # --- time -------------------------------------------------------------------------------------

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), what))

    def run(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            self.now, _, what = heapq.heappop(self.events)
            what()
        self.now = until

    # --- coordinator --------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        def save(state: dict[str, Any]) -> None:
            self.stored = json.dumps(state)

        def add(tag: Tag) -> None:
            assert self.stored is not None
            state = json.loads(self.stored)
            save({**state, "line": [*state["line"], tag]})

        def log(text: str) -> None:
            self.log.append(f"{self.now:.2f} {text}")
            self.has_gone_back |= "goes back" in text

        self.starts += 1
        saved = None if self.stored is None else json.loads(self.stored)
        self.coordinator = Coordinator(
            self.settings, save, add, saved, run=f"run{self.starts}", epoch=self.starts, log=log
        )

    def stop_coordinator(self) -> None:
        self.coordinator = None
        for node in self.nodes.values():
            self.lose(node)
        if self.loses_file:
            self.stored = None

    def tick(self) -> None:
        self.at(self.settings.beat, self.tick)
        if self.coordinator is not None:
            self.deliver(self.coordinator.tick(self.now))
        for node in self.nodes.values():
            if node.connection and node.alive and not node.paused:
                self.to_coordinator(node, Beat())

    def deliver(self, sent: Sequence[tuple[str, Message]]) -> None:
        for name, message in sent:
            node = self.nodes.get(name)
            if node is not None and node.connection and self.reaches(name, COORDINATOR):
                self.on_arrival(node, "down", partial(self.receive, node, message))

    def on_arrival(self, node: Node, way: str, what: Callable[[], None]) -> None:
        """Messages of one connection keep their order, and are lost with it."""
        delay = self.random.uniform(0.005, 0.1) * (10 if node.name in self.slow else 1)
        node.arrivals[way] = arrival = max(node.arrivals.get(way, 0.0), self.now + delay)
        connection = node.connection

        def arrive() -> None:
            if node.connection == connection and self.reaches(node.name, COORDINATOR):
                what()

        self.at(arrival - self.now, arrive)

    def to_coordinator(self, node: Node, message: FromMember) -> None:
        def arrive() -> None:
            if self.coordinator is not None:
                self.deliver(self.coordinator.handle(self.now, node.name, message))

        self.on_arrival(node, "up", arrive)

    def reaches(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self.cut

    def lose(self, node: Node) -> None:
        """The connection to the coordinator is lost, as the member sees it."""
        node.connection = 0
        node.inbox.clear()
        if isinstance(node.waits_for, Receive):
            self.resume(node, None)

    # --- members ------------------------------------------------------------------------------------

    def start_member(self) -> Node:
        name = f"m{len(self.nodes)}"
        numbers = self.make()
        log = partial(self.hear, name, numbers)
        member = Member(numbers, numbers.digest(), self.random.choice([1, 3, 100]), log)
        node = Node(name, numbers, member, iter(()), self.random.uniform(0.5, 2.0))  # type: ignore[arg-type]
        node.life = self.live(node)
        self.nodes[name] = node
        self.check_state(node)
        self.at(self.random.uniform(0, 2), lambda: self.resume(node, None))
        return node

    def hear(self, name: str, numbers: Any, text: str) -> None:
        """What a member says."""
        self.log.append(f"{self.now:.2f} {name}: {text}")
        if isinstance(numbers, SetNumbers) and (rounds := re.search(r"without rounds? (\d+)(?: to (\d+))?", text)):
            first, last = rounds.groups()
            numbers.lose(int(first), int(last or first))

    def live(self, node: Node) -> Generator[Any, Any, None]:
        yield from node.member.join()
        while True:
            for _ in range(self.inner):
                yield node.speed * self.random.uniform(0.5, 1.5)
                step = next(self.steps)
                node.numbers.train(step)
                node.steps.append(step)
                node.member.is_fresh = False
            node.began, node.pauses, node.heals = self.now, 0.0, 0
            outcome = yield from node.member.outer_step()
            node.outcomes[outcome] += 1
            if outcome is Outcome.COMMITTED:
                node.met = self.now
            node.longest = max(node.longest, (self.now - node.began - node.pauses) / (1 + node.heals))

    def check_state(self, node: Node) -> None:
        """No two members differ in a committed state, and it has every step once."""
        state = self.states.setdefault(node.member.tag, node.numbers.state())
        assert node.numbers.same(state) if hasattr(node.numbers, "same") else node.numbers.state() == state, (
            f"{node.name} has another state of {node.member.tag}"
        )
        if isinstance(node.numbers, SetNumbers):
            twice = [step for step, n in node.numbers.z0.items() if not node.numbers.is_once(step, n)]
            assert not twice, f"steps {twice} are counted {[node.numbers.z0[s] for s in twice]} times"

    def receive(self, node: Node, message: Message) -> None:
        if not node.alive:
            return
        if isinstance(message, Refused):
            assert not message.reason, message.reason
            node.connection = 0
        if isinstance(message, Welcome):
            node.run = message.run
            return
        node.inbox.append(message)
        if node.paused:
            return
        if isinstance(message, Void) and isinstance(node.waits_for, Exchange):
            if node.waits_for.begin.tag == message.tag:
                self.resume(node, Broken())
        elif isinstance(node.waits_for, Receive):
            self.resume(node, node.inbox.popleft())

    def resume(self, node: Node, reply: Any) -> None:
        """Continue a member until it waits for something."""
        if not node.alive:
            return
        if node.paused:
            node.owed.append(lambda: self.resume(node, reply))
            return
        node.waits_for = None
        while True:
            before = node.member.tag
            effect = node.life.send(reply)
            if node.member.tag != before:
                self.check_state(node)
            reply = None
            match effect:
                case float():
                    self.at(effect, lambda: self.resume(node, None))
                    return
                case Limit():
                    node.deadline = self.now + self.settings.grace + self.settings.timeout
                case Connect():
                    reply = self.connect(node)
                case Send(message):
                    if node.connection:
                        self.to_coordinator(node, message)
                    if isinstance(message, Prepared) and not self.is_quiet and self.random.random() < 0.03:
                        self.at(self.random.uniform(0, 0.2), self.fault_before_a_decision(node))
                case Receive():
                    if node.inbox:
                        reply = node.inbox.popleft()
                    elif node.connection:
                        self.wait(node, effect, lambda: None)
                        return
                case Exchange(begin):
                    self.wait(node, effect, Broken)
                    self.attend(node, begin)
                    return
                case Heal():
                    node.waits_for = effect
                    self.heal(node, effect)
                    return

    def wait(self, node: Node, effect: Any, over: Callable[[], Any]) -> None:
        node.waits_for = effect

        def end() -> None:
            if node.waits_for is effect:
                self.resume(node, over())

        self.at(max(0.0, node.deadline - self.now), end)

    def connect(self, node: Node) -> bool:
        if node.connection:
            return True
        if self.coordinator is None or not self.reaches(node.name, COORDINATOR):
            return False
        node.connection = next(self.connections)
        node.arrivals.clear()
        node.inbox.clear()
        self.to_coordinator(node, Hello(node.run, ((node.name, 1),), node.member.tag, node.member.digest))
        return True

    # --- between members ----------------------------------------------------------------------------

    def attend(self, node: Node, begin: Begin) -> None:
        """A participant begins its exchange. It takes place when all of them are there."""
        names, here = [name for name, _ in begin.members], self.attempts.setdefault(begin.tag, {})
        here[node.name] = node
        away = [n for n in names if not self.nodes[n].alive or not self.reaches(n, node.name)]
        if away:
            self.later(node, Broken(tuple(away)))
        waiting = [
            n
            for n in names
            if n in here and isinstance(of := here[n].waits_for, Exchange) and of.begin.tag == begin.tag
        ]
        pairs = itertools.combinations(names, 2)
        if waiting == names and all(self.reaches(*pair) for pair in pairs):
            digests = self.exchange(begin.tag.round, [here[n].numbers for n in names])
            for n, digest in zip(names, digests, strict=True):
                breaks = not self.is_quiet and self.random.random() < 0.03
                self.later(here[n], Broken((self.random.choice(names),)) if breaks else digest)

    def later(self, node: Node, reply: Any) -> None:
        """The exchange of a node ends after some time, unless it has ended before."""
        effect = node.waits_for
        delay = self.random.uniform(*self.exchanges) * (10 if node.name in self.slow else 1)

        def end() -> None:
            if node.waits_for is effect:
                self.resume(node, reply)

        self.at(delay, end)

    def heal(self, node: Node, effect: Heal) -> None:
        source = self.nodes[effect.source]
        found = None
        if source.alive and not source.paused and self.reaches(node.name, source.name):
            if source.member.tag.round >= effect.tag.round:
                found = Healed(source.member.line, source.numbers.state())
        delay = self.random.uniform(*self.loads) * (3 if node.name in self.slow else 1)
        node.pauses, node.heals = node.pauses + delay, node.heals + 1

        def end() -> None:
            is_cut = not source.alive or not self.reaches(node.name, source.name)
            self.resume(node, None if is_cut else found)

        self.at(delay, end)

    # --- faults -------------------------------------------------------------------------------------

    def fault(self) -> None:
        if self.is_quiet:
            return
        alive = [node for node in self.nodes.values() if node.alive]
        node = self.random.choice(alive)
        length = self.random.choice([0.3, 2.0, 6.0, 20.0]) * self.random.uniform(0.5, 1.5)
        kinds = ["kill", "pause", "cut", "cut coordinator", "slow", "join", "coordinator"]
        kind = self.random.choice(kinds)
        self.log.append(f"{self.now:.2f} {kind} {node.name} {length:.1f}")
        match kind:
            case "kill" if len(alive) > 2:
                self.kill(node)
            case "pause":
                self.pause(node, length)
            case "cut":
                others = [other.name for other in alive if other is not node]
                self.cut_off(node, [self.random.choice(others)] if others else [], length)
            case "cut coordinator":
                self.cut_off(node, [COORDINATOR], length)
            case "slow":
                self.slow.add(node.name)
                self.at(length, lambda: self.slow.discard(node.name))
            case "join":
                self.start_member()
            case "coordinator" if self.coordinator is not None:
                self.stop_coordinator()
                self.at(length, self.start_coordinator)
            case _:
                pass

    def fault_before_a_decision(self, node: Node) -> Callable[[], None]:
        """What leaves a prepared member in doubt: the coordinator restarts, or the link to it is cut."""
        length = self.random.choice([0.5, 5.0, 15.0])
        if self.random.random() < 0.5:
            return lambda: self.cut_off(node, [COORDINATOR], length)

        def restart() -> None:
            if self.coordinator is not None:
                self.stop_coordinator()
                self.at(length, self.start_coordinator)

        return restart

    def kill(self, node: Node) -> None:
        node.alive = False
        self.forget_connection(node)
        node.connection = 0

    def forget_connection(self, node: Node) -> None:
        """The coordinator may see at once that a connection has ended, or by its silence."""
        if self.coordinator is not None and node.connection and self.random.random() < 0.7:
            coordinator, connection = self.coordinator, node.connection

            def end() -> None:
                if self.coordinator is coordinator and node.connection in (0, connection):
                    self.deliver(coordinator.gone(self.now, node.name))

            self.at(self.random.uniform(0, 0.3), end)

    def pause(self, node: Node, length: float) -> None:
        if node.paused:
            return
        node.paused = True

        def end() -> None:
            node.paused = False
            node.pauses += length
            owed, node.owed = node.owed, []
            for what in owed:
                what()
            if not owed and node.inbox and isinstance(node.waits_for, Receive):
                self.resume(node, node.inbox.popleft())
            elif isinstance(node.waits_for, Exchange):
                if any(isinstance(m, Void) and m.tag == node.waits_for.begin.tag for m in node.inbox):
                    self.resume(node, Broken())

        self.at(length, end)

    def cut_off(self, node: Node, others: Sequence[str], length: float) -> None:
        links = {frozenset((node.name, other)) for other in others} - self.cut
        self.cut |= links
        self.at(length, lambda: self.cut.difference_update(links))
        if COORDINATOR in others and links:
            connection = node.connection
            self.forget_connection(node)

            def notice() -> None:
                if node.connection == connection:
                    self.lose(node)

            self.at(self.random.uniform(0, 2), notice)

    # --- the law ------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let all members meet, without faults. Raises AssertionError if the law does not hold."""
        self.run(45.0)
        self.is_quiet = True
        self.run(quiet := 75.0)  # longer than all faults
        assert self.coordinator is not None
        committed = self.coordinator.committed.round
        self.run(quiet + 35.0 + 5 * self.loads[1])
        alive = [node for node in self.nodes.values() if node.alive]
        if len(alive) >= self.settings.quorum:
            assert self.coordinator.committed.round >= committed + 2, "the rounds do not go on"
            for node in alive:
                behind = self.coordinator.committed.round - node.member.tag.round
                # a slow one may be loading at this moment, and the others faster
                assert behind <= 2 or self.loads[1] > 2, f"{node.name} is {behind} rounds behind"
                assert node.met > quiet, f"{node.name} has taken part in no round since {node.met:.0f} s"
        for node in self.nodes.values():
            limit = self.settings.grace + self.settings.timeout
            assert node.longest <= limit + 1e-6, f"{node.name} waited for {node.longest:.1f} s"
        self.check_mass(alive)

    def check_mass(self, alive: Sequence[Node]) -> None:
        """Every step of a living member is in one place, and a step of a dead member at most once in the model."""
        for node in alive:
            if not isinstance(node.numbers, SetNumbers):
                return
            undecided = node.member.doubt is not None or isinstance(node.waits_for, Exchange)
            places = node.numbers.places(undecided)
            twice = [step for step, n in places.items() if not node.numbers.is_once(step, n)]
            assert not twice, f"{node.name} has steps {twice} twice"
            no_loss = not self.loses_file and not self.has_gone_back
            assert not (no_loss and node.numbers.lost), f"{node.name} has lost rounds that the coordinator knows"
            lost = {step for step in node.steps if not places[step]} - node.numbers.lost
            assert not lost, f"{node.name} has lost its steps {lost} and not said so"
