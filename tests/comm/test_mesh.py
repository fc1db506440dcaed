"""The transport over connections between every two ranks: replies, failures, and its first lines."""

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from environment import patient
from groups.sites import until

from dgc.comm.lines import LineClient, LineServer
from dgc.comm.lockstep import execute
from dgc.comm.mesh import (
    CHUNK_BYTES,
    FRAME,
    Listener,
    Meeting,
    MeshError,
    MeshTransport,
    MeshWork,
    _key,
    dial,
    read_line,
    receive_stream,
    send_stream,
)
from dgc.comm.requests import AllGather, AllReduce, AllToAll, Broadcast, Exchange, ReduceScatter


def meshes(size: int, seconds: float = 20) -> list[MeshTransport]:
    meetings = [Meeting() for _ in range(size)]
    listeners = [Listener({"mesh": meeting.arrive}) for meeting in meetings]
    addresses, deadline = [listener.address for listener in listeners], time.monotonic() + patient(seconds)
    with ThreadPoolExecutor(size) as pool:
        work = [pool.submit(meetings[r].connect_all, 1, r, addresses, deadline) for r in range(size)]
        made = [MeshTransport(r, of.result(), deadline) for r, of in enumerate(work)]
    for listener in listeners:
        listener.close()
    return made


def numbers(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Any:
    return (torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 50).to(dtype)


class SlowSocket(socket.socket):
    def settimeout(self, value: float | None) -> None:
        time.sleep(0.2)
        super().settimeout(value)


def test_a_connection_that_ends_while_others_are_prepared_fails_the_exchange() -> None:
    """A rank that dies at this moment must not end this one."""
    (ended, other), (open_, third) = socket.socketpair(), socket.socketpair()
    other.close()
    slow = SlowSocket(fileno=open_.detach())
    mesh = MeshTransport(0, {1: ended, 2: slow}, time.monotonic() + patient(5))
    with third, pytest.raises(MeshError):
        mesh.wait(mesh.launch("x", [AllGather(torch.zeros(1))]))


def to_neighbour(rank: int, size: int) -> Exchange:
    before, after = (rank - 1) % size, (rank + 1) % size
    return Exchange({after: numbers(rank, 4)}, {before: torch.empty(4)})


REQUESTS: dict[str, Callable[[int, int], Any]] = {
    "mean": lambda rank, size: AllReduce(numbers(rank, 7)),
    "mean of fewer elements than ranks": lambda rank, size: AllReduce(numbers(rank, 1)),
    "mean of none": lambda rank, size: AllReduce(numbers(rank, 0)),
    "sum of a matrix": lambda rank, size: AllReduce(numbers(rank, 12).view(3, 4), "sum"),
    "max of integers": lambda rank, size: AllReduce(numbers(rank, 5, torch.int64), "max"),
    "min": lambda rank, size: AllReduce(numbers(rank, 5), "min"),
    "bytes": lambda rank, size: AllGather(numbers(rank, 9, torch.uint8)),
    "half precision": lambda rank, size: AllGather(numbers(rank, 9, torch.bfloat16)),
    "shares": lambda rank, size: ReduceScatter(numbers(rank, 4 * size)),
    "broadcast": lambda rank, size: Broadcast(numbers(rank, 3), size - 1),
    "all to all": lambda rank, size: AllToAll(
        numbers(rank, size * (rank + 1)), (rank + 1,) * size, receives=tuple(range(1, size + 1))
    ),
    "exchange": to_neighbour,
}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_replies_have_the_bits_of_simulated_ranks(size: int) -> None:
    """All kinds in one round, twice under the same name."""
    every = meshes(size)
    kinds = [name for name in REQUESTS if size > 1 or name != "exchange"]
    expected = [execute([REQUESTS[name](rank, size) for rank in range(size)]) for name in kinds]

    def on(mesh: MeshTransport) -> Any:
        for _ in range(2):
            replies = mesh.wait(mesh.launch("x", [REQUESTS[name](mesh.rank, size) for name in kinds]))
        return replies

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(on, every))
    for replies, rank in zip(found, range(size), strict=True):
        for reply, of_ranks, name in zip(replies, expected, kinds, strict=True):
            torch.testing.assert_close(reply, of_ranks[rank], rtol=0, atol=0, msg=name)
    for mesh in every:
        mesh.close()


def test_the_root_of_a_broadcast_is_a_rank_of_its_group() -> None:
    """Each of these ranks is alone in its group."""
    every = meshes(2)
    for mesh in every:
        (reply,) = mesh.wait(mesh.launch("x", [Broadcast(numbers(mesh.rank, 3), 0, "local")]))
        assert torch.equal(reply, numbers(mesh.rank, 3))
    for mesh in every:
        mesh.close()


def test_any_thread_can_end_a_wait() -> None:
    one, other = meshes(2)
    threading.Timer(0.2, one.close).start()
    with pytest.raises(MeshError, match="is void"):
        one.wait(one.launch("x", [AllGather(numbers(0, 3))]))
    with pytest.raises(MeshError, match="rank 0 is not reached") as caught:
        other.wait(other.launch("y", [AllGather(numbers(0, 3))]))
    assert caught.value.ranks == (0,)


def test_a_wait_ends_at_its_deadline() -> None:
    one, other = meshes(2)
    one.deadline = time.monotonic() + 0.2
    with pytest.raises(MeshError, match="rank 1 has sent nothing in time"):
        one.wait(one.launch("x", [AllGather(numbers(0, 3))]))
    one.close()
    other.close()


def test_a_message_of_another_length_is_refused() -> None:
    one, other = meshes(2)
    other.launch("x", [AllGather(numbers(1, 4))])
    with pytest.raises(MeshError, match="rank 1 has sent 16 bytes of x.0, not 12"):
        one.wait(one.launch("x", [AllGather(numbers(0, 3))]))
    one.close()
    other.close()


def test_small_messages_that_a_connection_does_not_take_at_once_arrive_in_order() -> None:
    """More than its buffers hold, before the other rank reads: its thread waits for a lock."""
    first, second = meshes(2)
    count = 4000
    with second._changed:
        works = [first.launch(f"x{i}", [AllGather(numbers(i, 300))]) for i in range(count)]
        assert first._unsent[1]
    theirs = [second.launch(f"x{i}", [AllGather(numbers(i, 300))]) for i in range(count)]
    for i, (mine, its) in enumerate(zip(works, theirs, strict=True)):
        assert torch.equal(first.wait(mine)[0][1], numbers(i, 300))
        assert torch.equal(second.wait(its)[0][0], numbers(i, 300))
    first.close()


@pytest.mark.parametrize("place", [0, 9, 20, 30, -1])
def test_a_changed_message_is_found(place: int) -> None:
    """Its key, its length, its first and its last numbers, and its checksum."""
    (own, other), (to, taken) = socket.socketpair(), socket.socketpair()
    mesh, peer = (MeshTransport(rank, {1 - rank: of}, time.monotonic() + 1) for rank, of in ((0, own), (1, to)))
    with other, taken:
        work = mesh.launch("x", [AllGather(numbers(0, 4))])
        peer.launch("x", [AllGather(numbers(1, 4))])
        message = bytearray(taken.recv(100))
        message[place] ^= 4
        other.sendall(message)
        with pytest.raises(MeshError):
            mesh.wait(work)
        mesh.close()
        peer.close()


def sums(mesh: MeshTransport, change: float = 0.0) -> int:
    for number, count in enumerate((7, 3000)):
        tensor = numbers(number, count)
        tensor[0] += change * mesh.rank
        mesh.wait(mesh.launch(f"x{number}", [AllReduce(tensor)]))
    return mesh.digest_of_sums


@pytest.mark.parametrize("size", [2, 3])
def test_the_digest_of_sums_is_equal_on_all_ranks_and_depends_on_them(size: int) -> None:
    found = set()
    for change in (0.0, 1.0):
        every = meshes(size)
        with ThreadPoolExecutor(size) as pool:
            (digest,) = set(pool.map(sums, every, [change] * size))
        found.add(digest)
        every[0].close()
    assert len(found) == 2 and 0 not in found


def test_after_its_end_an_exchange_writes_no_more_into_the_memory_of_a_sum() -> None:
    """A mean is received where it belongs, and the next exchange uses the same memory."""
    first, second = meshes(2)
    tensor = numbers(0, 1000)
    first.launch("x", [AllReduce(tensor)])
    half = MeshWork("x", ())
    second._queue(half, 0, FRAME.pack(_key("x.0.mean"), 2000), None, None)  # the rest never comes
    second._queue(half, 0, bytes(1000), None, None)
    deadline = time.monotonic() + patient(5)
    while not torch.equal(tensor[500:750], torch.zeros(250)):
        assert time.monotonic() < deadline
    first.close()
    first.join()
    assert not any(thread.is_alive() for thread in first._threads)
    second.close()


def test_a_rank_makes_a_sum_in_the_time_in_which_it_waits_for_another_mean() -> None:
    first, second = meshes(2)

    def launched(mesh: MeshTransport) -> list[MeshWork]:
        return [mesh.launch(name, [AllReduce(numbers(mesh.rank, 3000))]) for name in "xy"]

    works = [launched(mesh) for mesh in (first, second)]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(first.wait, works[0][0])
        until(lambda: (0, _key("y.0.mean")) in second._received)
        assert not waits.done()
        found = [second.wait(work)[0] for work in works[1]] + [waits.result()[0]]
    until(lambda: first.poll(works[0][1]))
    for reply in (*found, *first.wait(works[0][1])):
        torch.testing.assert_close(reply, (numbers(0, 3000) + numbers(1, 3000)) / 2, rtol=0, atol=0)
    first.close()
    second.close()


def test_a_sum_that_was_made_before_is_awaited_by_its_mean() -> None:
    first, second = meshes(2)
    work, other = (mesh.launch("x", [AllReduce(numbers(mesh.rank, 3000))]) for mesh in (first, second))
    until(lambda: first.poll(work))
    first._send_mean(work, 0)
    assert not first.poll(work)
    second.wait(other)
    until(lambda: first.poll(work))
    first.close()
    second.close()


def test_a_wait_does_not_last_until_messages_of_other_requests_are_taken() -> None:
    first, second = meshes(2)
    first.deadline = time.monotonic() + patient(5)
    with second._changed:  # its thread waits for the lock, and takes nothing
        works = [mesh.launch("small", [AllGather(numbers(mesh.rank, 3))]) for mesh in (first, second)]
        first.launch("large", [AllGather(torch.zeros(2**24))])
        assert torch.equal(first.wait(works[0])[0][1], numbers(1, 3))
        assert first._unsent[1]
    first.close()
    second.close()


def test_ranks_that_do_not_come_are_named() -> None:
    meeting = Meeting()
    with pytest.raises(MeshError) as caught:
        meeting.connect_all(1, 0, [("127.0.0.1", 1)] * 3, time.monotonic() + 0.2)
    assert caught.value.ranks == (1, 2)
    with pytest.raises(MeshError) as caught:
        meeting.connect_all(1, 1, [("127.0.0.1", 1)] * 2, time.monotonic() + patient(5))
    assert caught.value.ranks == (0,)


def test_a_void_exchange_ends_the_wait_for_its_ranks() -> None:
    meeting = Meeting()
    threading.Timer(0.2, meeting.void, [1]).start()
    with pytest.raises(MeshError, match="is void"):
        meeting.connect_all(1, 0, [("127.0.0.1", 1)] * 2, time.monotonic() + patient(20))


STRANGE = {
    "nothing": b"",
    "an empty line": b"\n",
    "a list": b"[]\n",
    "another wish": b'{"want": "x"}\n',
    "no number": b'{"want": "mesh"}\n',
    "no end": b"x" * 9000,
}


@pytest.mark.parametrize("first", STRANGE.values(), ids=STRANGE)
def test_connections_of_others_are_closed(first: bytes) -> None:
    meeting = Meeting()
    listener = Listener({"mesh": meeting.arrive})
    with socket.create_connection(listener.address) as own:
        own.settimeout(patient(20))
        own.sendall(first)
        own.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            assert own.recv(1) == b""
    with dial(listener.address, patient(5), want="mesh", number=1, rank=0) as own:
        own.settimeout(patient(20))
        meeting.void(1)
        assert own.recv(1) == b""  # it was taken, and is void
    listener.close()


@pytest.mark.parametrize("place", [0, 5, -1])
def test_a_changed_part_of_a_stream_is_found(place: int) -> None:
    class Changes:
        """Sends with one bit changed."""

        def __init__(self, own: socket.socket):
            self._own, self.sent = own, bytearray()

        def sendall(self, data: Any) -> None:
            self.sent += data

        def send(self, data: Any) -> int:
            self.sent += data
            return len(data)

    one, other = socket.socketpair()
    data, changing = bytes(range(256)) * 10, Changes(one)
    send_stream(changing, data)  # type: ignore[arg-type]
    one.sendall(changing.sent)
    assert receive_stream(other, len(data), lambda _: None) == data
    changing.sent[place] ^= 4
    one.sendall(changing.sent)
    one.close()
    with pytest.raises(ConnectionError):
        receive_stream(other, len(data), lambda _: None)
    other.close()


def test_a_slow_link_is_not_taken_for_a_silent_one() -> None:
    """A part of a stream takes longer than the time limit of the connection, and no piece of it does."""
    one, other = socket.socketpair()
    limit, data = patient(0.5), bytes(range(256)) * (CHUNK_BYTES // 256)
    one.settimeout(limit)
    found = bytearray()

    def read_slowly() -> None:
        while piece := other.recv(CHUNK_BYTES // 16):
            found.extend(piece)
            time.sleep(limit / 6)

    reads = threading.Thread(target=read_slowly)
    reads.start()
    try:
        send_stream(one, data)
    finally:
        one.close()
        reads.join()
        other.close()
    assert found[8:] == data


def test_first_lines_are_json() -> None:
    found: list[Any] = []

    def keep(first: Any, connection: socket.socket) -> None:
        found.append(first)
        connection.sendall(b"7\n")
        connection.close()

    listener = Listener({"state": keep})
    with dial(listener.address, patient(5), want="state", part=3) as own:
        assert json.loads(read_line(own)) == 7
    assert found == [{"want": "state", "part": 3}]
    listener.close()


class Echo:
    """A server that answers each line, with clients that are dropped by a word."""

    def __init__(self) -> None:
        self.server = LineServer(0, "127.0.0.1", beat=0.05)
        self.gone = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        def line(client: socket.socket, text: bytes) -> None:
            if text == b"drop":
                self.server.drop(client)
            elif text != b"sign":
                self.server.send(client, text.upper())

        def gone(client: socket.socket) -> None:
            self.gone += 1

        self.server.run(line, gone, lambda: None)

    def client(self, lost: float = 5) -> LineClient:
        address = "127.0.0.1", self.server.port
        return LineClient(address, patient(5), b"sign", 0.05, patient(lost), lambda text: None)

    def stop(self) -> None:
        self.server.close()
        self._thread.join(patient(4))


def test_lines_arrive_in_order() -> None:
    echo = Echo()
    own = echo.client()
    for text in (b"a", b"b" * 70000, b"c"):
        own.send(text)
    assert [own.receive(time.monotonic() + patient(5)) for _ in range(3)] == [b"A", b"B" * 70000, b"C"]
    assert own.receive(time.monotonic() + 0.1) is None and own.is_open
    own.close()
    echo.stop()


def test_both_sides_see_the_end_of_a_connection() -> None:
    echo = Echo()
    own = echo.client()
    own.send(b"drop")
    assert own.receive(time.monotonic() + patient(20)) is None and not own.is_open
    own = echo.client()
    own.close()
    end = time.monotonic() + patient(20)
    while echo.gone < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert echo.gone == 2
    echo.stop()


def test_a_silent_server_counts_as_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        own = LineClient(silent.getsockname(), patient(5), b"sign", 0.05, 0.2, lambda text: None)
        assert own.receive(time.monotonic() + patient(20)) is None and not own.is_open
