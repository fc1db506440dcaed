"""Connects a replica group with the coordinator and the other groups, and drives its outer steps.

Rank 0 of a group talks to the coordinator. What it hears goes to all ranks of the group, which run the same
generator (`dgc.groups.member`) with their own parts of the model. Each exchanges and loads its part with the rank
of the same place in other groups. What one rank cannot do counts as failed on all of them.
"""

import socket
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from typing_extensions import assert_never

from dgc.comm.collectives import all_gather_object, broadcast_object
from dgc.comm.lines import LineClient
from dgc.comm.mesh import (
    ANSWER_TIME,
    Listener,
    Meeting,
    MeshError,
    MeshTransport,
    dial,
    read_line,
    receive_stream,
    send_stream,
)
from dgc.comm.transport import Transport
from dgc.core.arguments import FLAG, WHOLE, require
from dgc.gossip.hierarchical_gossip import HierarchicalGossip
from dgc.gossip.protocol import Gossip
from dgc.groups.disk import Disk, Saved, pack, unpack
from dgc.groups.member import (
    Broken,
    Connect,
    Effect,
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
    START,
    Addresses,
    Beat,
    Begin,
    FromCoordinator,
    Hello,
    Line,
    Refused,
    Tag,
    Void,
    Welcome,
    decode,
    encode,
)
from dgc.groups.serve import PORT
from dgc.groups.steps import GroupSteps
from dgc.local.steps import OuterSteps
from dgc.units import human_bytes

CONNECT_TIME = 2.0  # seconds that an outer step waits for a coordinator that does not answer
BEAT, LOST = 0.25, 5.0  # seconds between two signs of this group; of silence of the coordinator, or of a source
LAST = 2**63  # above all attempts
ALIKE = 3  # tries to load one state on all ranks of a group


def connect(
    address: str,
    folder: str | Path | None = None,
    *,
    name: str = "",
    max_staleness: int = 3,
    weighted: bool = False,
    log: Callable[[str], None] | None = None,
) -> "Groups":
    """Let the ranks of this process group be a group of outer steps that meets others in rounds.

    Args:
        address: "host:port" of `python -m dgc.groups serve`.
        folder: Where the last committed state is kept, on a disk of this machine. None: only in memory, and a
            group that starts again loads it from another one.
        name: Of the group in messages. Nothing: the name of the machine, and a number.
        max_staleness: Rounds that the group may have missed and keep its own progress.
        weighted: Weigh the progress of a group in a round by the samples or tokens that it has counted since its
            last round, see `Groups.count`. Otherwise all groups count alike.
        log: Called on rank 0 with what has happened. None: print.

    Example:
        >>> from dgc.groups import connect
        >>> groups = connect("10.0.0.1:29444", folder="state")
    """
    require("a whole number of 0 or more rounds", WHOLE, least=0, max_staleness=max_staleness)
    require("True or False", FLAG, weighted=weighted)
    host, _, port = address.rpartition(":") if ":" in address else (address, "", str(PORT))
    if not host or not port.isdigit():
        raise ValueError(f"address must be host:port of `python -m dgc.groups serve`, not {address!r}")
    if any(not c.isprintable() or c.isspace() for c in name):
        raise ValueError(f"name must be one word, not {name!r}")
    own = name or socket.gethostname().split(".")[0]
    folder = None if folder is None else Path(folder)
    unique = f"{own}-{uuid.uuid4().hex[:6]}"
    return Groups((host, int(port)), folder, unique, max_staleness, weighted, log or _print)


def _print(text: str) -> None:
    print(f"groups: {text}", flush=True)


class Groups:
    """A group's connection. Pass it to `LocalOptimizer(..., groups=)`, once.

    Attributes:
        name: Of this start of the group.
        outcomes: Number of outer steps by their end.
        longest: Seconds of the longest outer step, without loading a state.
        healed: (bytes, seconds) of the last state that was loaded from another group.
    """

    def __init__(
        self,
        address: tuple[str, int],
        folder: Path | None,
        name: str,
        max_staleness: int,
        weighted: bool,
        log: Callable[[str], None],
    ):
        self.weighted = weighted
        self.address, self.folder, self.name = address, folder, name
        self._max_staleness, self._say = max_staleness, log
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.longest = 0.0
        self.healed: tuple[int, float] | None = None
        self.run = ""
        self.members: tuple[str, ...] = ()  # of the last committed round
        self._link: LineClient | None = None
        self.addresses: Addresses = ()  # of the ranks of this group
        self._meeting = Meeting()
        self._mesh: MeshTransport | None = None
        self._mesh_of: Any = None  # the members of the mesh
        self._attempt = -1  # the one that is exchanged
        self._lock = Lock()
        self._grace = self._timeout = ANSWER_TIME
        self._deadline = self._until = 0.0  # of this outer step, of an exchange
        self._healing = 0.0  # seconds, of this outer step
        self._steps: GroupSteps | None = None
        self._disk: Disk | None = None
        self._member: Member | None = None

    # --- what an optimizer needs --------------------------------------------------------------------

    def method(self, method: Gossip) -> Gossip:
        """The method with this group as its worker.

        Raises:
            ValueError: It exchanges in another way than by outer steps.
        """
        if isinstance(method, HierarchicalGossip) and isinstance(method.base, OuterSteps):
            return HierarchicalGossip(GroupSteps(method.base, self), averages_gradients=method.averages_gradients)
        if isinstance(method, OuterSteps):
            return GroupSteps(method, self)
        raise ValueError(
            f"groups meet in outer steps, and {type(method).__name__} exchanges in other ways: use "
            "dgc.local.OuterSteps, or HierarchicalGossip(OuterSteps(...)) in a group of several ranks"
        )

    def begin(self, steps: GroupSteps, inside: Transport, settings: str) -> None:
        """Take the outer steps of this rank. Collective in the group."""
        if self._steps is not None:
            raise ValueError("these groups belong to another optimizer: call dgc.groups.connect for each")
        self._steps, self._inside, self._settings = steps, inside, settings
        self.place = inside.rank
        self._disk = None if self.folder is None else Disk(self.folder, self.place, self._log)
        handlers = {"mesh": self._meeting.arrive, "state": self._serve_state, "void": self._hear_void}
        self._listener = Listener(handlers, self.address[0])
        found = self._gathered((self.name, self._listener.address))
        self.name, self.addresses = found[0][0], tuple(address for _, address in found)

    def join(self) -> None:
        """Begin with the state on the disk, if there is one, and load the last committed one. Collective."""
        steps = self._own_steps
        self._member = Member(self, self._common_digest(steps.digest()), self._max_staleness, self._log)
        offers = self._gathered([] if self._disk is None else self._disk.saved())
        for offer in [offer for offer in offers[0] if all(offer in of for of in offers)]:
            state = None if self._disk is None else self._disk.load(Saved(*offer), steps.z.device)
            if all(self._gathered(state is not None)):
                assert state is not None
                self.run, self._member.line = offer[0], _line_of(state)
                self._member.digest = self.heal(state["state"], keeps=False)
                self._log(f"begins with round {self.tag.round} from {self.folder}")
                break
        outcome = self._drive(self._member.join())
        if outcome is Outcome.ALONE and self._link is None and self.place == 0:
            self._log(f"no coordinator at {self.address[0]}:{self.address[1]}: trains alone, and tries again")

    def count(self, items: int) -> None:
        """Count the samples or tokens of a step of this rank, before it. For groups that are weighted."""
        require("a whole number of 0 samples or tokens or more", WHOLE, least=0, items=items)
        self._own_steps.count(items)

    def outer_step(self) -> None:
        """An outer step. Collective in the group."""
        assert self._member is not None
        self._member.is_fresh = False
        start, self._healing = time.monotonic(), 0.0
        outcome = self._drive(self._member.outer_step())
        self.longest = max(self.longest, time.monotonic() - start - self._healing)
        self.outcomes[outcome] += 1

    @property
    def size(self) -> int:
        """Number of groups in the last round, 1 before the first one."""
        return max(1, len(self.members))

    def metrics(self) -> dict[str, float]:
        rounds = self.outcomes[Outcome.COMMITTED]
        return {"round": float(self.tag.round), "members": float(len(self.members)), "rounds": float(rounds)}

    def close(self) -> None:
        self._drop_mesh()
        if self._disk is not None and self._member is not None:
            last = Saved(self.run, self.tag)
            if self._disk.last != last and self.tag != START:
                self._disk.save(last, self._committed_state)
        self.wait_for_disk()
        if self._link is not None:
            self._link.close()
        self._listener.close()
        self._meeting.void(LAST)

    def wait_for_disk(self) -> None:
        """Wait until the state that is being saved is written."""
        if self._disk is not None:
            self._disk.wait()

    @property
    def tag(self) -> Tag:
        """The committed state that this group has."""
        return START if self._member is None else self._member.tag

    @property
    def digest(self) -> int:
        """The digest of that state, equal in all groups that have it."""
        assert self._member is not None
        return self._member.digest

    # --- effects ------------------------------------------------------------------------------------

    def _drive(self, step: Generator[Effect, Any, Outcome]) -> Outcome:
        """Do what an outer step asks for, until its end."""
        reply: Any = None
        while True:
            try:
                effect = step.send(reply)
            except StopIteration as stop:
                outcome: Outcome = stop.value
                return outcome
            reply = self._do(effect)

    def _do(self, effect: Effect) -> Any:
        match effect:
            case Connect():
                found = self._from_first(self._connect)
                if found is not None and found != (self.run, self._grace, self._timeout):
                    self.run, self._grace, self._timeout = found
                    self._limit()
                return found is not None
            case Limit():
                return self._limit()
            case Send(message):
                if self.place == 0 and self._link is not None:
                    self._link.send(self.name.encode() + b" " + encode(message))
                return None
            case Receive():
                return self._from_first(self._receive)
            case Exchange(begin):
                return self._exchange(begin)
            case Heal(tag, source, addresses):
                return self._heal(tag, source, addresses)
            case _:
                assert_never(effect)

    def _limit(self) -> None:
        self._deadline = time.monotonic() + self._grace + self._timeout

    def _connect(self) -> tuple[str, float, float] | None:
        """The run, grace and time-out of the coordinator. None: it is not reached."""
        if self._link is not None and self._link.is_open:
            return self.run, self._grace, self._timeout
        assert self._member is not None
        sign = self.name.encode() + b" " + encode(Beat())
        try:
            self._link = LineClient(self.address, CONNECT_TIME, sign, BEAT, LOST, self._heard)
        except OSError:
            self._link = None
            return None
        hello = Hello(self.run, self.addresses, self._member.tag, self._member.digest, self._settings)
        self._link.send(self.name.encode() + b" " + encode(hello))
        while (line := self._link.receive(time.monotonic() + ANSWER_TIME)) is not None:
            answer = decode(line)
            if isinstance(answer, Refused):
                raise ValueError(f"the coordinator refuses this group: {answer.reason}")
            if isinstance(answer, Welcome):
                return answer.run, answer.grace, answer.timeout
        self._link.close()
        return None

    def _receive(self) -> FromCoordinator | None:
        assert self._link is not None
        line = self._link.receive(self._deadline)
        return None if line is None else decode(line)  # type: ignore[return-value]

    def _heard(self, line: bytes) -> None:
        """In the thread of the connection: end the exchange of an attempt that is void."""
        try:
            message = decode(line)
        except ValueError:
            return  # the outer step raises it
        if isinstance(message, Void):
            self._void(message.tag.attempt)
            for address in self.addresses[1:]:
                try:
                    dial(address, ANSWER_TIME, want="void", number=message.tag.attempt).close()
                except OSError:
                    continue  # a rank that has ended

    def _hear_void(self, first: dict[str, Any], connection: socket.socket) -> None:
        connection.close()
        self._void(int(first["number"]))

    def _void(self, attempt: int) -> None:
        self._meeting.void(attempt)
        with self._lock:
            if self._attempt == attempt and self._mesh is not None:
                self._mesh.close()

    def _exchange(self, begin: Begin) -> int | Broken:
        names = [name for name, _ in begin.members]
        own: int | None = None
        suspects: tuple[str, ...] = ()
        failure = ""
        # the coordinator gives an exchange half of the time-out
        self._until = min(self._deadline, time.monotonic() + self._timeout / 2)
        try:
            own = self._own_steps.exchange_with(self._mesh_for(begin), begin.tag.round)
        except MeshError as error:
            suspects, failure = tuple(names[rank] for rank in error.ranks), str(error)
        found = self._gathered((own, suspects, failure))
        with self._lock:
            self._attempt = -1
        if any(digest is None for digest, _, _ in found):
            self._drop_mesh()
            failures = [(of, why) for digest, of, why in found if digest is None]
            self._log(f"the exchange of round {begin.tag.round} has failed: {failures[0][1]}")
            return Broken(next((of for of, _ in failures if of), ()))
        self._names = tuple(names)
        return hash_of([digest for digest, _, _ in found])

    def _mesh_for(self, begin: Begin) -> MeshTransport:
        """The connections to the other members. They are used again if all of them committed the round before."""
        number = begin.tag.attempt
        if self._mesh is not None and self._mesh_of == begin.members and not self._mesh.is_broken:
            self._mesh.deadline = self._until
        else:
            self._drop_mesh()
            rank = [name for name, _ in begin.members].index(self.name)
            addresses = [addresses[self.place] for _, addresses in begin.members]
            connections = self._meeting.connect_all(number, rank, addresses, self._until)
            self._mesh, self._mesh_of = MeshTransport(rank, connections, self._until), begin.members
        with self._lock:
            self._attempt = number
        if self._meeting.is_void(number):  # it became void before it could be closed
            self._mesh.close()
        return self._mesh

    def _drop_mesh(self) -> None:
        if self._mesh is not None:
            self._mesh.close("this rank has left the exchange")
            self._mesh.join()  # the memory of its buckets is used again
        self._mesh = self._mesh_of = None

    # --- states of other members --------------------------------------------------------------------

    def _serve_state(self, first: dict[str, Any], connection: socket.socket) -> None:
        """Send the last committed state, in a thread of its own."""
        packed = Event()

        def beat() -> None:
            with suppress(OSError):
                while not packed.wait(BEAT):
                    connection.sendall(b"\n")

        connection.settimeout(LOST)
        beats = Thread(target=beat, name="dgc-packs", daemon=True)
        with connection:
            beats.start()
            try:
                data = self._packed_state()
            finally:
                packed.set()
                beats.join()
            if data is not None:
                connection.sendall(f"{len(data)}\n".encode())
                send_stream(connection, data)

    def _packed_state(self) -> bytes | None:
        """The last committed state. None: there is none at this moment."""
        steps = self._own_steps
        with steps.lock:
            member = self._member
            if member is None or self._in_commit:
                return None
            content = self._committed_state()
        return pack(content)

    def _committed_state(self) -> dict[str, Any]:
        """What other groups load, and the disk keeps."""
        assert self._member is not None
        return {"line": [list(tag) for tag in self._member.line], "state": self._own_steps.committed_state()}

    def _heal(self, tag: Tag, source: str, addresses: Addresses) -> Healed | None:
        start = time.monotonic()
        try:
            for _ in range(ALIKE):
                found = self._load(source, addresses)
                line = None if found is None else _line_of(found)
                tags = self._gathered(None if line is None else line[-1])
                if None in tags or Tag(*min(tags)).round < tag.round:
                    return None
                if len(set(tags)) == 1:
                    assert found is not None and line is not None
                    seconds = time.monotonic() - start
                    self._log(
                        f"loaded round {tags[0][0]} from {source}: {human_bytes(self._bytes)} in {seconds:.1f} s"
                    )
                    self.healed = self._bytes, seconds
                    return Healed(line, found["state"])
            return None
        finally:
            self._healing += time.monotonic() - start

    def _load(self, source: str, addresses: Addresses) -> dict[str, Any] | None:
        """The state of a member's rank of this place."""
        shown = time.monotonic()

        def progress(done: int) -> None:
            nonlocal shown
            if time.monotonic() - shown > ANSWER_TIME:
                shown = time.monotonic()
                self._log(f"loads the state of {source}: {100 * done // length} % of {human_bytes(length)}")

        try:
            with dial(addresses[self.place], ANSWER_TIME, want="state") as connection:
                connection.settimeout(LOST)  # of silence: a stopped member is found by it
                while not (line := read_line(connection).strip()):
                    pass  # it packs its state
                self._bytes = length = int(line)
                data = receive_stream(connection, length, progress)
            return unpack(data, self._own_steps.z.device)
        except (OSError, ValueError) as error:
            self._log(f"could not load the state of {source}: {error}")
            return None

    # --- the numbers of all ranks of the group --------------------------------------------------------

    _in_commit = False  # z0 is newer than the tag
    _saves = False  # all ranks have written the state before

    def weight(self, round: int) -> int:
        own = self._own_steps.weight(round)
        return sum(self._gathered(own)) if self.weighted else own

    def prepare(self, round: int, share: float) -> None:
        self._own_steps.prepare(round, share)

    def commit(self, round: int) -> int:
        self.members = self._names
        return self._changes(lambda: self._own_steps.commit(round))

    def void(self) -> None:
        self._drop_mesh()
        self._own_steps.void()

    def doubt(self) -> None:
        self._own_steps.doubt()

    def heal(self, state: Any, keeps: bool) -> int:
        self._drop_mesh()
        return self._changes(lambda: self._own_steps.heal(state, keeps))

    def _changes(self, change: Callable[[], int]) -> int:
        self.before_a_change()
        with self._own_steps.lock:
            self._in_commit = True
            own = change()
        found = self._gathered((own, self._disk is None or self._disk.is_idle))
        self._saves = all(is_idle for _, is_idle in found)
        return hash_of([digest for digest, _ in found])

    def before_a_change(self) -> None:
        """Wait until the state that goes to the disk is copied."""
        if self._disk is not None:
            self._disk.before_a_change()

    def committed(self, tag: Tag) -> None:
        """The member has a new tag: other members may load the state, and it is saved unless the disk is slow."""
        self._in_commit = False
        if self._disk is not None and self._saves:
            self._disk.save(Saved(self.run, tag), self._committed_state)

    # --- inside the group ---------------------------------------------------------------------------

    @property
    def _own_steps(self) -> GroupSteps:
        assert self._steps is not None
        return self._steps

    def _log(self, text: str) -> None:
        if self.place == 0:
            self._say(text)

    def _common_digest(self, own: int) -> int:
        return hash_of(self._gathered(own))

    def _gathered(self, own: Any) -> list[Any]:
        return [own] if self._inside.size == 1 else all_gather_object(self._inside, own, "groups.gathered")

    def _from_first(self, work: Callable[[], Any]) -> Any:
        """The result of rank 0, on all ranks. An error there is one on all of them."""
        if self._inside.size == 1:
            return work()
        result: Any = None
        if self.place == 0:
            try:
                result = work()
            except ValueError as error:
                result = error
        result = broadcast_object(self._inside, result, 0, "groups.first")
        if isinstance(result, ValueError):
            raise result
        return result


def _line_of(state: dict[str, Any]) -> Line:
    return tuple(Tag(*map(int, tag)) for tag in state["line"])


def hash_of(digests: list[Any]) -> int:
    """One digest of the digests of all ranks of a group."""
    if len(digests) == 1:
        return int(digests[0])
    return int.from_bytes(sha256(repr(digests).encode()).digest()[:6], "big")
