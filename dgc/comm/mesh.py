"""A transport over TCP connections between every two ranks of a set that may change from exchange to exchange.

torch.distributed's groups suit ranks that stay: they are made together through a store, an operation that waits
for a dead or stopped rank cannot be ended, and its threads keep the tensors until a time-out. Here any thread can
end an exchange (`MeshTransport.close`), and the next one has other ranks.

Sums are added in the order of the ranks, by the rank that owns a piece of the tensor, so that all have equal bits.
An all-reduce sends 2 (n - 1) / n of the tensor from each rank. Every message has a checksum.
"""

import json
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from typing_extensions import assert_never

from dgc.comm.digest import digest_of
from dgc.comm.presence import family_of, own_ip
from dgc.comm.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Exchange,
    Group,
    Op,
    ReduceScatter,
    Reply,
    Request,
    as_bytes,
)
from dgc.comm.transport import GroupedTransport

FRAME = struct.Struct("<8sQ")  # key of a message and its length; then its bytes and SEAL
SEAL = struct.Struct("<I")  # digest of all of a message
PART_BYTES = 2**18  # of a sum: a part is used again while it is in the processor's cache
SMALL_BYTES = 2**12  # a message of at most this length is sent at once, and not by a thread
CHUNK = struct.Struct("<II")  # length and digest of a part of a stream
CHUNK_BYTES = 2**20
LONGEST_LINE = 4096  # bytes of the first line of a connection
ANSWER_TIME = 5.0  # seconds for a connection, and for its first line


class MeshError(ConnectionError):
    """An exchange has failed. ranks: those that were not reached, as far as that is known."""

    def __init__(self, reason: str, ranks: Sequence[int] = ()):
        super().__init__(reason)
        self.ranks = tuple(ranks)


class Listener:
    """Listens for other ranks. A connection begins with a line of JSON, whose "want" names what it is for.

    Args:
        handlers: By what is wanted, called in a thread of its own with the first line and the connection.
        other: Another machine of the ranks, by which the network is chosen. Nothing: this machine alone.

    Attributes:
        address: Where it listens.
    """

    def __init__(
        self, handlers: Mapping[str, Callable[[dict[str, Any], socket.socket], None]], other: str = ""
    ) -> None:
        ip = own_ip(other)
        self._handlers = dict(handlers)
        self._socket = socket.create_server((ip, 0), family=family_of(ip))
        self.address: tuple[str, int] = (ip, self._socket.getsockname()[1])
        Thread(target=self._accept, name="dgc-listener", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # it is closed
            Thread(target=self._serve, args=(connection,), name="dgc-connection", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(ANSWER_TIME)
            first = json.loads(read_line(connection))
            handler = self._handlers.get(first["want"])
            if handler is not None:
                handler(first, connection)  # which closes the connection, or keeps it
                return
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not from a rank
        connection.close()


def read_line(connection: socket.socket) -> bytes:
    """The first line. What follows it stays in the connection."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = connection.recv(1)
        if not part or len(line) > LONGEST_LINE:
            raise ConnectionError("no first line")
        line += part
    return bytes(line)


def dial(address: tuple[str, int], limit: float, **first: object) -> socket.socket:
    """Connect to a Listener, and send the first line. limit: seconds."""
    connection = socket.create_connection(address, max(0.01, limit))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(json.dumps(first).encode() + b"\n")
    return connection


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill a memory. Raises ConnectionError if the connection ends before."""
    while view:
        got = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if not got:
            raise ConnectionError("the connection has ended")
        view = view[got:]


def send_stream(connection: socket.socket, data: bytes) -> None:
    """Send data in parts with a checksum each."""
    view = memoryview(data)
    for first in range(0, len(view), CHUNK_BYTES):
        part = view[first : first + CHUNK_BYTES]
        connection.sendall(CHUNK.pack(len(part), digest_of(part)))
        while part:  # the time limit of `sendall` is for all of it, and a link may be slow
            part = part[connection.send(part) :]


def receive_stream(connection: socket.socket, length: int, progress: Callable[[int], None]) -> bytearray:
    """Receive data of `send_stream`. progress: called with the number of bytes so far.

    Raises:
        ConnectionError: The connection ended, or the data have changed in transit.
    """
    data, done = bytearray(length), 0
    head = bytearray(CHUNK.size)
    while done < length:
        receive_into(connection, memoryview(head))
        size, checksum = CHUNK.unpack(head)
        if not 0 < size <= min(CHUNK_BYTES, length - done):
            raise ConnectionError("a part has a wrong length")
        part = memoryview(data)[done : done + size]
        receive_into(connection, part)
        if digest_of(part) != checksum:
            raise ConnectionError("a part has a wrong checksum: it changed in transit")
        done += size
        progress(done)
    return data


class Meeting:
    """Connections of other ranks that have come for an exchange, until this rank begins it. See `connect_all`."""

    def __init__(self) -> None:
        self._come: dict[tuple[int, int], socket.socket] = {}  # by the number of the exchange and the rank
        self._changed = Condition()
        self._void = -1  # exchanges up to this one are void

    def arrive(self, first: Mapping[str, Any], connection: socket.socket) -> None:
        """Keep a connection: a handler of Listener."""
        number, rank = int(first["number"]), int(first["rank"])
        with self._changed:
            if number <= self._void:
                connection.close()
                return
            self._come[number, rank] = connection
            self._changed.notify_all()

    def void(self, number: int) -> None:
        """End the wait for an exchange, and for those before."""
        with self._changed:
            self._void = max(self._void, number)
            for key in [key for key in self._come if key[0] <= number]:
                self._come.pop(key).close()
            self._changed.notify_all()

    def is_void(self, number: int) -> bool:
        return number <= self._void

    def connect_all(
        self, number: int, rank: int, addresses: Sequence[tuple[str, int]], deadline: float
    ) -> dict[int, socket.socket]:
        """Connect with the other ranks of exchange `number`. Each rank connects to those before it.

        Raises:
            MeshError: Some are not there by the deadline, of time.monotonic(), or the exchange is void.
        """
        connected: dict[int, socket.socket] = {}
        try:
            for other in range(rank):
                try:
                    limit = min(ANSWER_TIME, deadline - time.monotonic())
                    connected[other] = dial(addresses[other], limit, want="mesh", number=number, rank=rank)
                except OSError as error:
                    raise MeshError(f"rank {other} is not reached: {error}", [other]) from error
            with self._changed:
                while missing := [r for r in range(rank + 1, len(addresses)) if (number, r) not in self._come]:
                    if number <= self._void:
                        raise MeshError("the exchange is void")
                    if (left := deadline - time.monotonic()) <= 0:
                        raise MeshError(f"ranks {missing} have not come", missing)
                    self._changed.wait(left)
                connected |= {r: self._come.pop((number, r)) for r in range(rank + 1, len(addresses))}
        except BaseException:
            for connection in connected.values():
                connection.close()
            raise
        return connected


@dataclass(eq=False)
class MeshWork:
    """Launched requests.

    Attributes:
        flats: The elements of sums, which are stored in place, by number of the request.
        seals: The digest of this rank's piece of an all-reduce, by number of the request.
        unsent: Messages that are not with the system yet.
    """

    name: str
    requests: tuple[Request, ...]
    flats: dict[int, Tensor] = field(default_factory=dict)
    seals: dict[int, int] = field(default_factory=dict)
    unsent: int = 0


class Arrived(NamedTuple):
    """A message. data: None if it was received into the place of a mean. seal: its digest."""

    data: bytearray | None
    seal: int


class MeshTransport(GroupedTransport):
    """A transport over one connection to each other rank. Each rank counts as a machine of its own.

    Args:
        rank: This rank.
        connections: To each other rank.

    Attributes:
        deadline: When waiting ends, of time.monotonic(). It may be set anew for each exchange.
        digest_of_sums: Of the results of all all-reduces so far, without another pass over them. It may be set.

    Raises MeshError in `launch`, `poll` and `wait` after a connection has failed, the deadline or `close`.
    """

    local_rank, local_size, point_to_point = 0, 1, True

    def __init__(self, rank: int, connections: Mapping[int, socket.socket], deadline: float):
        self.rank, self.size, self.deadline = rank, len(connections) + 1, deadline
        self._connections = dict(connections)
        self.digest_of_sums = 0
        self._received: dict[tuple[int, bytes], deque[Arrived]] = {}
        self._places: dict[tuple[int, bytes], memoryview] = {}  # of means that will arrive
        self._free: dict[int, list[bytearray]] = {}  # memory of messages that were used, by its length
        # all-reduces whose sum is not made yet, in the order of launches, and the messages that are its parts
        self._sums: dict[tuple[MeshWork, int], list[tuple[int, bytes]]] = {}
        self._parts: set[tuple[int, bytes]] = set()  # of these
        self._unsent = dict.fromkeys(connections, 0)  # messages that are not with the system yet
        self._awaited: tuple[int, bytes] | None = None  # the message that a rank waits for. None: its own are sent
        self._changed = Condition()
        self._reason: MeshError | None = None
        self._queues: dict[int, SimpleQueue[Any]] = {}
        self._threads: list[Thread] = []
        for other, connection in self._connections.items():
            connection.settimeout(None)
            self._queues[other] = SimpleQueue()
        for other, connection in self._connections.items():  # the first thread may close all of them
            for work in (self._send, self._receive):
                self._threads.append(Thread(target=work, args=(other, connection), name="dgc-mesh", daemon=True))
        for thread in self._threads:
            thread.start()

    def members(self, group: Group) -> list[int]:
        return [self.rank] if group == "local" else list(range(self.size))

    @property
    def is_broken(self) -> bool:
        return self._reason is not None

    def close(self, reason: str = "the exchange is void", ranks: Sequence[int] = ()) -> None:
        """End all that is in flight, also in other threads. The other ranks see it too."""
        with self._changed:
            if self._reason is not None:
                return
            self._reason = MeshError(reason, ranks)
            self._changed.notify_all()
        for queue in self._queues.values():
            queue.put(None)
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def join(self) -> None:
        """After `close`: wait until no thread uses the memory of requests any more."""
        for thread in self._threads:
            thread.join()

    # --- threads ----------------------------------------------------------------------------------

    def _send(self, other: int, connection: socket.socket) -> None:
        try:
            while (item := self._queues[other].get()) is not None:
                work, head, data, known = item
                connection.sendall(head)
                if data is not None:
                    # whole: parts would let the threads take turns with Python's lock
                    connection.sendall(data)
                    connection.sendall(SEAL.pack(digest_of(data, crc32(head)) if known is None else known))
                with self._changed:
                    self._unsent[other] -= 1
                    work.unsent -= 1
                    if self._awaited is None and not work.unsent:
                        self._changed.notify_all()
        except OSError as error:
            self.close(f"rank {other} is not reached: {error}", [other])

    def _receive(self, other: int, connection: socket.socket) -> None:
        head, tail = bytearray(FRAME.size), bytearray(SEAL.size)
        try:
            while True:
                receive_into(connection, memoryview(head))
                key, length = FRAME.unpack(head)
                data: bytearray | None = None
                with self._changed:
                    place = self._places.get((other, key))
                    if place is not None and len(place) == length:
                        del self._places[other, key]
                    else:
                        free = self._free.get(length)
                        data = free.pop() if free else bytearray(length)
                        place = memoryview(data)
                receive_into(connection, place)
                receive_into(connection, memoryview(tail))
                seal = digest_of(place, crc32(head))
                if SEAL.unpack(tail) != (seal,):
                    raise ConnectionError("a message has a wrong checksum: it changed in transit")
                with self._changed:
                    self._received.setdefault((other, key), deque()).append(Arrived(data, seal))
                    if self._awaited == (other, key) or (other, key) in self._parts:
                        self._changed.notify_all()
        except (OSError, MemoryError) as error:
            self.close(f"rank {other} is not reached: {error}", [other])

    # --- requests ---------------------------------------------------------------------------------

    def launch(self, name: str, requests: Sequence[Request], communicator: str = "") -> MeshWork:
        self._check()
        work = MeshWork(name, tuple(requests))
        for i, request in enumerate(requests):
            if isinstance(request, AllReduce):
                self._await_means(work, i)
            for other, part in self._first_parts(work, i, request).items():
                self._put(work, other, f"{name}.{i}", part)
        return work

    def _await_means(self, work: MeshWork, i: int) -> None:
        """Let the means of other ranks' pieces be received where they belong.

        A mean arrives after its rank has received this rank's piece, so that the memory of that is free.
        """
        work.flats[i] = flat = work.requests[i].tensor.reshape(-1)  # type: ignore[union-attr]
        ranks = self._sources(work.requests[i])
        if not ranks:
            return
        self._sums[work, i] = parts = [(rank, _key(f"{work.name}.{i}")) for rank in ranks]
        with self._changed:
            self._parts.update(parts)
            if flat.is_cpu:
                for rank in ranks:
                    piece = _memory(self._pieces(work, i)[rank])
                    self._places[rank, _key(f"{work.name}.{i}.mean")] = piece

    def _first_parts(self, work: MeshWork, i: int, request: Request) -> dict[int, Tensor]:
        """What this rank sends to each other rank when a request is launched."""
        others = [rank for rank in self.members(request.group) if rank != self.rank]
        match request:
            case AllGather(tensor):
                return dict.fromkeys(others, tensor)
            case AllReduce(tensor) | ReduceScatter(tensor):
                work.flats.setdefault(i, tensor.reshape(-1))
                pieces = self._pieces(work, i)
                return {other: pieces[other] for other in others}
            case AllToAll(tensor, splits):
                parts = tensor.split(list(splits))
                return {other: parts[other] for other in others}
            case Broadcast(tensor, root):
                return dict.fromkeys(others, tensor) if self.members(request.group)[root] == self.rank else {}
            case Exchange(sends):
                return {other: part for other, part in sends.items() if other != self.rank}
            case _:
                assert_never(request)

    def _pieces(self, work: MeshWork, i: int) -> Sequence[Tensor]:
        """The parts of a sum, each of which one rank adds up."""
        request, flat = work.requests[i], work.flats[i]
        n = len(self.members(request.group))
        return flat.tensor_split(n) if isinstance(request, AllReduce) else flat.chunk(n)

    def _put(self, work: MeshWork, other: int, name: str, part: Tensor, seal: int | None = None) -> None:
        """Send a message to a rank. seal: its digest, if it is known."""
        data = _memory(part.cpu().contiguous())
        head = FRAME.pack(_key(name), len(data))
        if len(data) > SMALL_BYTES or self._unsent[other]:
            self._queue(work, other, head, data, seal)
            return
        message = memoryview(head + data + SEAL.pack(digest_of(data, crc32(head))))
        sent = 0
        try:
            with suppress(BlockingIOError):
                sent = self._connections[other].send(message, socket.MSG_DONTWAIT)
        except OSError as error:
            self.close(f"rank {other} is not reached: {error}", [other])
        else:
            if sent < len(message):
                self._queue(work, other, message[sent:], None, None)

    def _queue(self, work: MeshWork, other: int, *message: Any) -> None:
        with self._changed:
            self._unsent[other] += 1
            work.unsent += 1
        self._queues[other].put((work, *message))

    def poll(self, work: MeshWork) -> bool:
        with self._changed:
            self._check()
            for i, request in enumerate(work.requests):
                has_sum = isinstance(request, AllReduce) and (work, i) not in self._sums
                name = f"{work.name}.{i}.mean" if has_sum else f"{work.name}.{i}"
                if not all((other, _key(name)) in self._received for other in self._sources(request)):
                    return False
                # the second half of an all-reduce begins in `wait`
        return True

    def _sources(self, request: Request) -> list[int]:
        """The ranks from which this one receives something for a request."""
        others = [rank for rank in self.members(request.group) if rank != self.rank]
        match request:
            case AllGather() | AllReduce() | ReduceScatter() | AllToAll():
                return others
            case Broadcast(_, root):
                sender = self.members(request.group)[root]
                return [] if sender == self.rank else [sender]
            case Exchange(_, receives):
                return [other for other in receives if other != self.rank]
            case _:
                assert_never(request)

    def wait(self, work: MeshWork) -> tuple[Reply, ...]:
        # all pieces are added up and sent before this rank waits for one
        for i in range(len(work.requests)):
            if (work, i) in self._sums:
                self._send_mean(work, i)
        replies = tuple(self._reply(work, i, request) for i, request in enumerate(work.requests))
        with self._changed:  # then the memory of the requests may change
            self._awaited = None
            self._wait_until(lambda: not work.unsent, "nothing of what was sent is taken in time", ())
        return replies

    def _send_mean(self, work: MeshWork, i: int) -> None:
        """Add up this rank's piece of an all-reduce, and send it to the others."""
        parts = self._sums.pop((work, i))
        request = work.requests[i]
        assert isinstance(request, AllReduce)
        own, name = self._reduced(work, i, request.op), f"{work.name}.{i}.mean"
        with self._changed:
            self._parts.difference_update(parts)
        data = _memory(own.cpu())
        work.seals[i] = seal = digest_of(data, crc32(FRAME.pack(_key(name), len(data))))
        for other in self._sources(request):
            self._put(work, other, name, own, seal)

    def _complete_sum(self) -> tuple[MeshWork, int] | None:
        """An all-reduce all parts of which have come, the first one of them."""
        return next((of for of, parts in self._sums.items() if all(key in self._received for key in parts)), None)

    def _reduced(self, work: MeshWork, i: int, op: Op) -> Tensor:
        """This rank's piece of a sum, in its place, in the order of the ranks."""
        own, name = self._pieces(work, i)[self.rank], f"{work.name}.{i}"
        ranks = self.members(work.requests[i].group)
        total, memory = own, None
        for rank in ranks:
            if rank == 0 == self.rank:
                continue
            part, data = (own, None) if rank == self.rank else self._take(rank, name, own)
            if rank == 0:
                total, memory = part, data
                continue
            is_last = rank == ranks[-1]
            # in parts that stay in the processor's cache
            length = PART_BYTES // own.element_size() if own.is_cpu else max(1, own.numel())
            for t, p, o in zip(total.split(length), part.split(length), own.split(length), strict=True):
                if op in ("mean", "sum"):
                    t += p
                else:
                    (torch.minimum if op == "min" else torch.maximum)(t, p, out=t)
                if is_last and op == "mean":
                    torch.div(t, self.size, out=o)
                elif is_last and total is not own:
                    o.copy_(t)
            self._reuse(data)
        self._reuse(memory)
        return own

    def _reply(self, work: MeshWork, i: int, request: Request) -> Reply:
        ranks, name = self.members(request.group), f"{work.name}.{i}"

        def taken(rank: int, own: Tensor, like: Tensor | None = None) -> Tensor:
            return own if rank == self.rank else self._take(rank, name, own if like is None else like)[0]

        match request:
            case AllGather(tensor):
                return tuple(taken(rank, tensor) for rank in ranks)
            case AllReduce(tensor):
                if len(ranks) > 1:
                    for rank, piece in enumerate(self._pieces(work, i)):
                        seal = work.seals[i] if rank == self.rank else self._take_mean(rank, f"{name}.mean", piece)
                        self.digest_of_sums = crc32(SEAL.pack(seal), self.digest_of_sums)
                return work.flats[i].view(tensor.shape)
            case ReduceScatter(tensor, op):
                return tensor if len(ranks) == 1 else self._reduced(work, i, op)
            case AllToAll(tensor, splits):
                parts = tensor.split(list(splits))
                return tuple(
                    taken(rank, parts[rank], tensor.new_empty(number))
                    for rank, number in zip(ranks, request.expected, strict=True)
                )
            case Broadcast(tensor, root):
                return taken(ranks[root], tensor)
            case Exchange(sends, receives):
                for other, buffer in receives.items():
                    buffer.copy_(sends[other] if other == self.rank else taken(other, buffer))
                return receives
            case _:
                assert_never(request)

    def _take_mean(self, other: int, name: str, piece: Tensor) -> int:
        """Put the mean of a rank's piece into its place. Returns its digest."""
        found = self._next(other, name)
        if found.data is not None:
            mean, data = self._as_tensor(other, name, found.data, piece)
            piece.copy_(mean)
            self._reuse(data)
        return found.seal

    def _take(self, other: int, name: str, like: Tensor) -> tuple[Tensor, bytearray]:
        """The next message of a rank, as a tensor like another one, and its memory."""
        data = self._next(other, name).data
        assert data is not None
        return self._as_tensor(other, name, data, like)

    def _next(self, other: int, name: str) -> Arrived:
        key, late = (other, _key(name)), f"rank {other} has sent nothing in time"
        while True:
            with self._changed:
                self._awaited = key
                self._wait_until(lambda: key in self._received or self._complete_sum() is not None, late, [other])
                if key in self._received:
                    found = self._received[key].popleft()
                    if not self._received[key]:
                        del self._received[key]
                    return found
                complete = self._complete_sum()
            if complete is not None:  # in the time in which this rank would wait
                self._send_mean(*complete)

    def _as_tensor(self, other: int, name: str, data: bytearray, like: Tensor) -> tuple[Tensor, bytearray]:
        if len(data) != like.numel() * like.element_size():
            raise MeshError(
                f"rank {other} has sent {len(data)} bytes of {name}, not {like.numel() * like.element_size()}",
                [other],
            )
        if not data:
            return torch.empty_like(like), data
        found = torch.frombuffer(data, dtype=torch.uint8).view(like.dtype).view(like.shape)
        return found.to(like.device), data

    def _reuse(self, data: bytearray | None) -> None:
        """Receive later messages into the memory of one that is not needed any more."""
        if data:
            with self._changed:
                self._free.setdefault(len(data), []).append(data)

    def _wait_until(self, condition: Callable[[], bool], late: str, ranks: Sequence[int]) -> None:
        """Wait, with the lock. late, ranks: for the error after the deadline."""
        while not condition():
            self._check()
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise MeshError(late, ranks)
            self._changed.wait(left)

    def _check(self) -> None:
        if self._reason is not None:
            raise MeshError(str(self._reason), self._reason.ranks)


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on a CPU, without a copy."""
    data: Any = as_bytes(tensor.detach()).numpy() if tensor.numel() else b""
    return memoryview(data)


def _key(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=8).digest()
