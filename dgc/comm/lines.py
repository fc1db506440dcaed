"""Lines of text between one server and its clients: control messages of programs that come and go.

An empty line says only that the other side exists.
"""

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread

LONGEST = 2**20  # bytes of a line
SEND_TIME = 5.0  # seconds


class LineClient:
    """A connection to a LineServer. It sends `sign` every `beat` seconds, from a thread of its own.

    Args:
        address: Of the server.
        limit: Seconds until it must be connected.
        sign: What says that this process exists.
        beat, lost: Seconds between two signs, and without a line after which the server counts as lost.
        heard: Called in the thread that receives, with each line before `receive` returns it.
    """

    def __init__(
        self,
        address: tuple[str, int],
        limit: float,
        sign: bytes,
        beat: float,
        lost: float,
        heard: Callable[[bytes], None],
    ):
        self._socket = socket.create_connection(address, limit)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(lost)
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        self._lock, self._ended = Lock(), Event()
        self._heard, self._sign, self.beat = heard, sign, beat
        for work in (self._read, self._beat):
            Thread(target=work, name="dgc-lines", daemon=True).start()

    @property
    def is_open(self) -> bool:
        return not self._ended.is_set()

    def send(self, line: bytes) -> bool:
        """Send a line. Returns whether the connection takes it."""
        try:
            with self._lock:
                self._socket.sendall(line + b"\n")
        except OSError:
            self.close()
        return self.is_open

    def receive(self, deadline: float) -> bytes | None:
        """The next line. None: there is none by the deadline, of time.monotonic(), or the connection has ended."""
        if not self.is_open and self._lines.empty():
            return None
        with suppress(Empty):
            return self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        return None

    def close(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._lines.put(None)

    def _read(self) -> None:
        rest = b""
        with suppress(OSError):
            while data := self._socket.recv(65536):
                *lines, rest = (rest + data).split(b"\n")
                for line in filter(None, lines):
                    self._heard(line)
                    self._lines.put(line)
                if len(rest) > LONGEST:
                    break
        self.close()

    def _beat(self) -> None:
        while not self._ended.wait(self.beat):
            self.send(self._sign)


class LineServer:
    """Serves clients in the thread that calls `run`.

    Args:
        port: 0: any free one.
        host: Address to listen at. Nothing: all of this machine.
        beat: Seconds between two signs of the server, and between two calls of `tick`.

    Attributes:
        port: The one it listens at.
    """

    def __init__(self, port: int, host: str = "", beat: float = 1.0):
        self._listening = socket.create_server((host, port))
        self.port: int = self._listening.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._rests: dict[socket.socket, bytes] = {}
        self._gone: list[socket.socket] = []
        self._beat, self._ended = beat, False

    def run(
        self,
        line: Callable[[socket.socket, bytes], None],
        gone: Callable[[socket.socket], None],
        tick: Callable[[], None],
    ) -> None:
        """Call `line` for each line of a client, `gone` when its connection has ended, and `tick`."""
        next_tick = time.monotonic() + self._beat
        while not self._ended:
            for key, _ in self._selector.select(max(0.0, next_tick - time.monotonic())):
                if key.fileobj is self._listening:
                    client, _ = self._listening.accept()
                    client.settimeout(SEND_TIME)
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._selector.register(client, selectors.EVENT_READ)
                    self._rests[client] = b""
                    continue
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj in self._rests:
                    for text in self._read(key.fileobj):
                        line(key.fileobj, text)
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + self._beat
                for client in list(self._rests):
                    self.send(client, b"")
                tick()
            while self._gone:
                gone(self._gone.pop(0))
        for client in list(self._rests):
            self.drop(client)
        self._selector.close()
        self._listening.close()

    def close(self) -> None:
        """Let `run` end."""
        self._ended = True

    def send(self, client: socket.socket, line: bytes) -> None:
        """Send a line to a client, unless its connection has ended or is full."""
        if client not in self._rests:
            return
        client.setblocking(False)
        try:
            sent = client.send(line + b"\n")
            if sent <= len(line):  # a client that does not read
                self.drop(client)
        except OSError:
            self.drop(client)

    def drop(self, client: socket.socket) -> None:
        """End a connection."""
        if self._rests.pop(client, None) is not None:
            self._selector.unregister(client)
            client.close()
            self._gone.append(client)

    def _read(self, client: socket.socket) -> list[bytes]:
        try:
            client.setblocking(False)
            data = client.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, rest = (self._rests[client] + data).split(b"\n")
        self._rests[client] = rest
        if not data or len(rest) > LONGEST:
            self.drop(client)
        return [text for text in lines if text]
