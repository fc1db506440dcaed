"""N simulated ranks in one process, for tests and simulation. Requests are combined in rank order."""

import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_never

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
from dgc.comm.transport import GroupedTransport, Groups

HINT = "; give every rank the same settings, and call begin_epoch(epoch) with the same epoch on every rank"


class LockstepError(RuntimeError):
    """The requests of ranks do not match, or a request is missing."""


@dataclass(eq=False)
class LockstepWork:
    """The requests that ranks have launched under one name, and the replies once all have."""

    name: str
    requests: dict[int, tuple[Request, ...]] = field(default_factory=dict)
    replies: list[tuple[Reply, ...]] | None = None


class LockstepTransport(GroupedTransport):
    """One rank's end of a `LockstepWorld`."""

    point_to_point = True

    def __init__(self, world: "LockstepWorld", rank: int):
        self._world = world
        self.rank, self.size = rank, world.size
        self.local_size = world.local_size
        self.local_rank = rank % world.local_size

    def members(self, group: Group) -> list[int]:
        return self._world.groups[self.rank].members[group]

    def open_communicator(self, communicator: str, kinds: Sequence[Group] | None = None) -> None:
        with self._world.lock:
            self._world.launched.setdefault((communicator, self.rank), 0)

    def launch(self, name: str, requests: Sequence[Request], communicator: str = "") -> LockstepWork:
        world, rank = self._world, self.rank
        with world.lock:
            # ranks of a machine may have no request in a round
            if world.strict and not (requests and all(isinstance(request, Exchange) for request in requests)):
                if communicator == "":
                    self.open_communicator(communicator)
                elif (communicator, rank) not in world.launched:
                    raise LockstepError(f"{name}: rank {rank} has not opened the communicator {communicator!r}")
                world.check_order(communicator, rank, name)
            queue = world.incomplete.setdefault(name, [])
            work = next((f for f in queue if rank not in f.requests), None)
            if work is None:
                work = LockstepWork(name)
                queue.append(work)
            work.requests[rank] = tuple(requests)
            if len(work.requests) == self.size:
                queue.remove(work)
                work.replies = world.execute(name, [work.requests[r] for r in range(self.size)])
            return work

    def poll(self, work: LockstepWork) -> bool:
        """If the replies are not available, the other ranks run first, so that a polling loop ends."""
        world = self._world
        with world.lock:
            if work.replies is None and world.turn is not None:
                world.let_others_run(self.rank)
                if world.failed is not None:
                    raise LockstepError(f"{work.name}: rank {world.failed} has failed")
            return work.replies is not None

    def wait(self, work: LockstepWork) -> tuple[Reply, ...]:
        world, rank = self._world, self.rank
        with world.lock:
            if work.replies is None and world.turn is not None:
                world.waiting[rank] = work
                world.let_others_run(rank)
                del world.waiting[rank]
            if work.replies is None:
                missing = sorted(set(range(self.size)) - set(work.requests))
                raise LockstepError(f"{work.name}: rank {rank} waits for ranks {missing}")
            return work.replies[rank]


class LockstepWorld:
    """Simulated ranks. `transports` holds the transport of each rank, `meters` the meter of each rank.

    Args:
        size: Number of ranks.
        local_size: Ranks per machine; it must divide `size`. Default: all ranks on one machine.
        seed: Seed of the launch order in `converse`.
        strict: Require that the ranks launch the collectives of each communicator in the same order, as
            torch.distributed does. False: requests match by name alone, as in Horovod and MPI.

    Raises:
        ValueError: `local_size` does not divide `size`.

    Example:
        world = LockstepWorld(4)
        sums = world.run(lambda transport: all_reduce(transport, torch.ones(3), "sum"))  # one result per rank
    """

    def __init__(self, size: int, local_size: int | None = None, seed: int = 0, strict: bool = True):
        self.size, self.local_size = size, local_size or size
        self.strict = strict
        if size % self.local_size:
            raise ValueError(f"local_size must divide the number of ranks, {size}, but it is {self.local_size}")
        machines = [list(range(first, first + self.local_size)) for first in range(0, size, self.local_size)]
        self.groups = [Groups(rank, machines) for rank in range(size)]
        self.transports = [LockstepTransport(self, rank) for rank in range(size)]
        self.meters = [TrafficMeter() for _ in range(size)]
        self._random = random.Random(seed)
        self.incomplete: dict[str, list[LockstepWork]] = {}  # works that some ranks have not launched, by name
        self.launched: dict[tuple[str, int], int] = {}  # by communicator and rank, the number of its collectives
        self._orders: dict[str, list[str]] = {}  # the names of the collectives of each communicator
        self.lock = threading.RLock()
        self._turns = [threading.Condition(self.lock) for _ in range(size)]
        self.turn: int | None = None  # the rank that runs now, inside `run`
        self.failed: int | None = None
        self._ended: set[int] = set()
        self.waiting: dict[int, LockstepWork] = {}

    def check_order(self, communicator: str, rank: int, name: str) -> None:
        """Raise LockstepError if another rank has launched another collective in this place of a communicator."""
        order, place = self._orders.setdefault(communicator, []), self.launched[communicator, rank]
        self.launched[communicator, rank] += 1
        if place == len(order):
            order.append(name)
        elif order[place] != name:
            raise LockstepError(
                f"rank {rank} launches {name} as number {place} of communicator {communicator!r}, where another "
                f"rank has launched {order[place]}: a transport that matches by order would mix up their tensors"
            )

    def converse(self, name: str, conversations: Sequence[Conversation[T]]) -> list[T]:
        """Run one conversation per rank, in one thread, each round in a shuffled order. Return results by rank."""
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
        """Run `body` once per rank, each in a thread. Return the results by rank. An error ends all ranks.

        One rank runs at a time. When it must wait for a message, the next rank that can continue runs, always in
        the same order. Torch's random generators are kept for each rank: a rank that has seeded them draws the
        numbers of a process of its own, for example for dropout.

        Ranks may share a GPU. Its work is complete before another rank runs, since ranks use streams of their own.
        Backward runs in the thread of its rank: autograd's thread of a GPU would wait in a hook of one rank, and
        could not run the hooks of the others.
        """
        results: list[Any] = [None] * self.size
        errors: dict[int, BaseException] = {}

        def work(rank: int) -> None:
            with self.lock:
                self._turns[rank].wait_for(lambda: self.turn == rank)
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = body(self.transports[rank])
            except BaseException as error:
                errors[rank] = error
                self.failed = rank if self.failed is None else self.failed
            with self.lock:
                self._ended.add(rank)
                self._pass_turn(rank)

        self.turn, self.failed = 0, None
        self._ended.clear()
        self.waiting.clear()
        self.incomplete.clear()
        self.launched.clear()
        self._orders.clear()
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.turn = None
        if self.failed is not None:
            raise errors[self.failed]
        return results

    def _pass_turn(self, rank: int) -> None:
        """Let the next rank run that can continue, because its replies are available or it must raise an error."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        after = ((rank + i) % self.size for i in range(1, self.size + 1))
        running = [r for r in after if r not in self._ended]
        free = (r for r in running if r not in self.waiting or self.waiting[r].replies is not None)
        first = running[0] if running else rank
        self.turn = first if self.failed is not None else next(free, first)
        self._turns[self.turn].notify()

    def let_others_run(self, rank: int) -> None:
        random_state = torch.get_rng_state()
        state_of_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._pass_turn(rank)
        self._turns[rank].wait_for(lambda: self.turn == rank)
        torch.set_rng_state(random_state)
        if state_of_gpu is not None:
            torch.cuda.set_rng_state(state_of_gpu)

    def execute(self, name: str, requests: list[tuple[Request, ...]]) -> list[tuple[Reply, ...]]:
        replies: list[dict[int, Reply]] = [{} for _ in range(self.size)]
        for group, partition in self.groups[0].partition.items():
            for members in partition:
                own = {r: {i: of for i, of in enumerate(requests[r]) if of.group == group} for r in members}
                check_agreement(name, group, own)
                for i in own[members[0]]:
                    for rank, reply in zip(members, execute([own[r][i] for r in members]), strict=True):
                        replies[rank][i] = reply
        invalidate(request for of_rank in requests for request in of_rank)
        return [tuple(r[i] for i in sorted(r)) for r in replies]


def check_agreement(name: str, group: str, requests: Mapping[int, Mapping[int, Request]]) -> None:
    """Raise LockstepError if two ranks differ in their requests to a group, by their places in the round."""
    (first, expected), *others = (
        (rank, {place: _signature(request) for place, request in own.items()}) for rank, own in requests.items()
    )
    for rank, own in others:
        if own != expected:
            raise LockstepError(
                f"{name}: to the group {group!r} rank {rank} sent {own}, rank {first} sent {expected}{HINT}"
            )


def _signature(request: Request) -> tuple[object, ...]:
    kind = (type(request).__name__, request.group)
    match request:
        case AllReduce(tensor, op_or_root) | ReduceScatter(tensor, op_or_root) | Broadcast(tensor, op_or_root):
            return (*kind, tuple(tensor.shape), tensor.dtype, op_or_root)
        case AllGather(tensor):
            return (*kind, tuple(tensor.shape), tensor.dtype)
        case AllToAll(tensor):
            return (*kind, tensor.dtype)
        case Exchange():
            return kind
        case _:
            assert_never(request)


def execute(requests: Sequence[Any]) -> list[Reply]:
    """Return the replies to one request of each rank, ordered by rank in the group."""
    size = len(requests)
    for request in requests:
        if isinstance(request, AllGather | AllToAll | ReduceScatter) and request.tensor.dim() != 1:
            raise LockstepError(
                f"{type(request).__name__} takes a one-dimensional tensor, not one of shape "
                f"{tuple(request.tensor.shape)}"
            )
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
                if (found := {r for r in range(size) if to in requests[r].sends}) != request.receives.keys():
                    source = min(found ^ request.receives.keys())
                    raise LockstepError(f"rank {source}'s sends and rank {to}'s receives do not match")
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
