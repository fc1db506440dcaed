"""N simulated ranks in one process, for tests and simulation. Requests are combined in rank order.

`LockstepWorld.converse` runs one generator per rank in a single thread and launches each round in a shuffled order
of ranks. `LockstepWorld.run` runs one function per rank, each in its own thread, so training loops that use a
`Transport` work unchanged. One rank runs at a time. When it must wait for a message, the next rank that can
continue runs. The order is always the same. Torch's random generator is kept for each rank: a rank that has seeded
it draws the numbers of a process of its own, for example for dropout.
"""

import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from dgc.comm.conversation import RunningConversation
from dgc.comm.meter import TrafficMeter
from dgc.comm.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Conversation,
    Exchange,
    Group,
    Op,
    ReduceScatter,
    Reply,
    Request,
    T,
)

HINT = "; give every rank the same settings, and call begin_epoch(epoch) with the same epoch on every rank"


class LockstepError(RuntimeError):
    """The requests of ranks do not match, or a request is missing."""


@dataclass(eq=False)
class LockstepFlight:
    """The requests that ranks have launched under one name, and the replies once all ranks have launched."""

    name: str
    requests: dict[int, tuple[Request, ...]] = field(default_factory=dict)
    replies: list[tuple[Reply, ...]] | None = None


class LockstepTransport:
    """One rank's end of a `LockstepWorld`."""

    point_to_point = True

    def __init__(self, world: "LockstepWorld", rank: int):
        self._world = world
        self.rank, self.size = rank, world.size
        self.local_size = world.local_size
        self.local_rank = rank % world.local_size

    def group_size(self, group: Group) -> int:
        return len(self._world.members(group, self.rank))

    def group_rank(self, group: Group) -> int:
        return self._world.members(group, self.rank).index(self.rank)

    def open_lane(self, lane: str) -> None:
        self._world.open_lane(self.rank, lane)

    def launch(self, name: str, requests: Sequence[Request], lane: str = "") -> LockstepFlight:
        return self._world.launch(self.rank, name, tuple(requests), lane)

    def poll(self, flight: LockstepFlight) -> bool:
        return self._world.poll(self.rank, flight)

    def wait(self, flight: LockstepFlight) -> tuple[Reply, ...]:
        return self._world.wait(self.rank, flight)


class LockstepWorld:
    """Simulated ranks. `transports` holds the transport of each rank, `meters` the meter of each rank.

    Args:
        size: Number of ranks.
        local_size: Ranks per machine; it must divide `size`. Default: all ranks on one machine.
        seed: Seed of the launch order in `converse`.
        strict: Require that the ranks launch the collectives of each lane in the same order, as torch.distributed
            does. False: requests match by name alone, as in Horovod and MPI.

    Raises:
        ValueError: `local_size` does not divide `size`.

    Example:
        world = LockstepWorld(4)
        sums = world.run(lambda transport: all_reduce(transport, torch.ones(3), "sum"))  # one result per rank
    """

    def __init__(self, size: int, local_size: int | None = None, seed: int = 0, strict: bool = True):
        self.size, self.local_size = size, local_size or size
        self._strict = strict
        if size % self.local_size:
            raise ValueError(f"local_size must divide the number of ranks, {size}, but it is {self.local_size}")
        self.transports = [LockstepTransport(self, rank) for rank in range(size)]
        self.meters = [TrafficMeter() for _ in range(size)]
        self._random = random.Random(seed)
        self._open: dict[str, list[LockstepFlight]] = {}  # flights that some ranks have not launched, by name
        self._orders: dict[str, LaunchOrder] = {}
        self._lock = threading.RLock()
        self._turns = [threading.Condition(self._lock) for _ in range(size)]
        self._turn: int | None = None  # the rank that runs now, inside `run`
        self._failed: int | None = None
        self._ended: set[int] = set()
        self._waiting: dict[int, LockstepFlight] = {}

    def members(self, group: Group, rank: int) -> list[int]:
        if group == "world":
            return list(range(self.size))
        if group == "local":
            first = rank - rank % self.local_size
            return list(range(first, first + self.local_size))
        return list(range(rank % self.local_size, self.size, self.local_size))

    def converse(self, name: str, conversations: Sequence[Conversation[T]]) -> list[T]:
        """Run one conversation per rank to its end. Return the results by rank."""
        order = list(range(self.size))
        self._random.shuffle(order)
        running: dict[int, RunningConversation[T]] = {}
        for rank in order:
            transport, meter = self.transports[rank], self.meters[rank]
            running[rank] = RunningConversation(name, conversations[rank], transport, meter)
        while not all(r.done for r in running.values()):
            before = [(r.rounds, r.done) for r in running.values()]
            self._random.shuffle(order)
            for rank in order:
                running[rank].advance()
            if before == [(r.rounds, r.done) for r in running.values()]:
                ended = sorted(rank for rank, r in running.items() if r.done)
                raise LockstepError(f"{name}: ranks {ended} ended, the others wait for another round")
        return [running[rank].finish() for rank in range(self.size)]

    def run(self, body: Callable[[LockstepTransport], T]) -> list[T]:
        """Run `body` once per rank, each in a thread. Return the results by rank. An error ends all ranks."""
        results: list[Any] = [None] * self.size
        errors: dict[int, BaseException] = {}

        def work(rank: int) -> None:
            with self._lock:
                self._await_turn(rank)
            try:
                results[rank] = body(self.transports[rank])
            except BaseException as error:
                errors[rank] = error
                self._failed = rank if self._failed is None else self._failed
            with self._lock:
                self._ended.add(rank)
                self._pass_turn(rank)

        self._turn, self._failed = 0, None
        self._ended.clear()
        self._waiting.clear()
        self._open.clear()
        self._orders.clear()
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._turn = None
        if self._failed is not None:
            raise errors[self._failed]
        return results

    def _await_turn(self, rank: int) -> None:
        while self._turn != rank:
            self._turns[rank].wait()

    def _pass_turn(self, rank: int) -> None:
        """Let the next rank run that can continue, because its replies are available or it must raise an error."""
        after = ((rank + i) % self.size for i in range(1, self.size + 1))
        running = [r for r in after if r not in self._ended]
        free = (r for r in running if r not in self._waiting or self._waiting[r].replies is not None)
        first = running[0] if running else rank
        self._turn = first if self._failed is not None else next(free, first)
        self._turns[self._turn].notify()

    def _let_others_run(self, rank: int) -> None:
        random_state = torch.get_rng_state()
        self._pass_turn(rank)
        self._await_turn(rank)
        torch.set_rng_state(random_state)

    def open_lane(self, rank: int, lane: str) -> None:
        with self._lock:
            self._orders.setdefault(lane, LaunchOrder(lane)).open(rank)

    def launch(self, rank: int, name: str, requests: tuple[Request, ...], lane: str = "") -> LockstepFlight:
        with self._lock:
            # ranks of a machine may have no request in a round
            if self._strict and not (requests and all(isinstance(request, Exchange) for request in requests)):
                if lane == "":
                    self.open_lane(rank, lane)
                elif lane not in self._orders or not self._orders[lane].is_open(rank):
                    raise LockstepError(f"{name}: rank {rank} has not opened the lane {lane!r}")
                self._orders[lane].launch(rank, name)
            queue = self._open.setdefault(name, [])
            flight = next((f for f in queue if rank not in f.requests), None)
            if flight is None:
                flight = LockstepFlight(name)
                queue.append(flight)
            flight.requests[rank] = requests
            if len(flight.requests) == self.size:
                queue.remove(flight)
                flight.replies = self._execute(name, [flight.requests[r] for r in range(self.size)])
            return flight

    def poll(self, rank: int, flight: LockstepFlight) -> bool:
        """Whether the replies are available. If not, the other ranks run first, so that a polling loop ends."""
        with self._lock:
            if flight.replies is None and self._turn is not None:
                self._let_others_run(rank)
                if self._failed is not None:
                    raise LockstepError(f"{flight.name}: rank {self._failed} has failed")
            return flight.replies is not None

    def wait(self, rank: int, flight: LockstepFlight) -> tuple[Reply, ...]:
        with self._lock:
            if flight.replies is None and self._turn is not None:
                self._waiting[rank] = flight
                self._let_others_run(rank)
                del self._waiting[rank]
            if flight.replies is None:
                missing = sorted(set(range(self.size)) - set(flight.requests))
                raise LockstepError(f"{flight.name}: rank {rank} waits for ranks {missing}")
            return flight.replies[rank]

    def _execute(self, name: str, requests: list[tuple[Request, ...]]) -> list[tuple[Reply, ...]]:
        replies: list[dict[int, Reply]] = [{} for _ in range(self.size)]
        for group in get_args(Group):
            for members in dict.fromkeys(tuple(self.members(group, rank)) for rank in range(self.size)):
                own = {r: [i for i, request in enumerate(requests[r]) if request.group == group] for r in members}
                check_places(name, group, own)
                for i in own[members[0]]:
                    matching = {rank: requests[rank][i] for rank in members}
                    check_agreement(name, matching)
                    for rank, reply in zip(members, execute(list(matching.values())), strict=True):
                        replies[rank][i] = reply
        invalidate(request for of_rank in requests for request in of_rank)
        return [tuple(r[i] for i in sorted(r)) for r in replies]


class LaunchOrder:
    """Checks that all ranks launch the collectives of one lane in the same order.

    Args:
        lane: Name of the lane, for error messages.
    """

    def __init__(self, lane: str):
        self._lane = lane
        self._names: list[str] = []  # in the order of the first rank that launched each
        self._launched: dict[int, int] = {}  # number of launches by rank

    def open(self, rank: int) -> None:
        self._launched.setdefault(rank, 0)

    def is_open(self, rank: int) -> bool:
        return rank in self._launched

    def launch(self, rank: int, name: str) -> None:
        """Record a launch.

        Raises:
            LockstepError: Another rank has launched another collective in this place.
        """
        place = self._launched[rank]
        self._launched[rank] += 1
        if place == len(self._names):
            self._names.append(name)
        elif self._names[place] != name:
            raise LockstepError(
                f"rank {rank} launches {name} as number {place} of lane {self._lane!r}, where another rank has "
                f"launched {self._names[place]}: a transport that matches by order would mix up their tensors"
            )


def check_places(name: str, group: str, places: Mapping[int, Sequence[int]]) -> None:
    """Check that the ranks of a group have sent their requests to it at the same places among all requests.

    Transports name a request by its place.

    Raises:
        LockstepError: A place differs. The message names both ranks.
    """
    (first, expected), *others = places.items()
    for rank, own in others:
        if len(own) != len(expected):
            raise LockstepError(
                f"{name}: ranks sent different numbers of requests: rank {rank} sent {len(own)} to the group "
                f"{group!r}, rank {first} sent {len(expected)}{HINT}"
            )
        if own != expected:
            raise LockstepError(
                f"{name}: requests to the group {group!r} are at the places {own} of rank {rank}, and {expected} "
                f"of rank {first}"
            )


def check_agreement(name: str, requests: Mapping[int, Request]) -> None:
    """Check that the requests of a group's ranks match.

    Kind, dtype, operation and root must be equal, and the shape if the kind requires it.

    Raises:
        LockstepError: A request differs. The message names both ranks.
    """
    (first, expected), *others = ((rank, _signature(request)) for rank, request in requests.items())
    for rank, signature in others:
        if signature != expected:
            raise LockstepError(f"{name}: rank {rank} sent {signature}, rank {first} sent {expected}{HINT}")


def _signature(request: Request) -> tuple[object, ...]:
    """The properties that must be equal on all ranks."""
    kind = (type(request).__name__, request.group)
    match request:
        case AllReduce(tensor, op) | ReduceScatter(tensor, op):
            return (*kind, tuple(tensor.shape), tensor.dtype, op)
        case AllGather(tensor):
            return (*kind, tuple(tensor.shape), tensor.dtype)
        case Broadcast(tensor, root):
            return (*kind, tuple(tensor.shape), tensor.dtype, root)
        case AllToAll(tensor):
            return (*kind, tensor.dtype)
        case Exchange():
            return kind


def execute(requests: Sequence[Any]) -> list[Reply]:
    """Return the replies to one request of each rank, ordered by rank in the group."""
    size = len(requests)
    match requests[0]:
        case AllReduce(_, op):
            total = reduce_in_order([r.tensor for r in requests], op)
            return [total.clone() for _ in requests]
        case AllGather():
            return [tuple(r.tensor.clone() for r in requests) for _ in requests]
        case ReduceScatter(_, op):
            total = reduce_in_order([r.tensor for r in requests], op)
            if total.numel() % size:
                raise LockstepError(f"{total.numel()} elements cannot be scattered over {size} ranks")
            return [share.clone() for share in total.chunk(size)]
        case Broadcast(_, root):
            return [requests[root].tensor.clone() for _ in requests]
        case AllToAll():
            shares = [r.tensor.split(list(r.splits)) for r in requests]
            for to, request in enumerate(requests):
                for source, expected in enumerate(request.expected):
                    if (sent := shares[source][to].numel()) != expected:
                        raise LockstepError(
                            f"rank {source} sends {sent} elements to rank {to}, which expects {expected}{HINT}"
                        )
            return [tuple(shares[source][to].clone() for source in range(size)) for to in range(size)]
        case Exchange():
            for to, request in enumerate(requests):
                for source in range(size):
                    if (to in requests[source].sends) != (source in request.receives):
                        raise LockstepError(f"rank {source}'s sends and rank {to}'s receives do not match")
            for to, request in enumerate(requests):
                for source, buffer in request.receives.items():
                    sent = requests[source].sends[to]
                    if (buffer.shape, buffer.dtype) != (sent.shape, sent.dtype):
                        raise LockstepError(
                            f"rank {source} sends {tuple(sent.shape)} {sent.dtype} to rank {to}, which expects "
                            f"{tuple(buffer.shape)} {buffer.dtype}"
                        )
                    buffer.copy_(sent)
            return [request.receives for request in requests]
    raise AssertionError(requests[0])


def reduce_in_order(tensors: Sequence[Tensor], op: Op) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if op in ("mean", "sum"):
            total += tensor
        else:
            total = torch.minimum(total, tensor) if op == "min" else torch.maximum(total, tensor)
    return total / len(tensors) if op == "mean" else total


@torch.no_grad()
def invalidate(launched: Iterable[Request]) -> None:
    """Fill launched floating-point tensors with NaN, because a transport may overwrite them."""
    for request in launched:
        for tensor in request.sends.values() if isinstance(request, Exchange) else (request.tensor,):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
