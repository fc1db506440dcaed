"""Finds ranks that do not respond at all: stopped, swapped out, or on a machine that is down.

Horovod's controller over MPI waits for such a rank forever, and its stall check waits too. Every rank therefore
sends a datagram to rank 0 before each exchange of the watchdog. If an exchange does not complete, rank 0 can list
the ranks that sent no datagram for it. If datagrams do not pass between the machines, the run still ends, but the
message has no rank.
"""

import socket
import struct

from dgc.comm import Transport, broadcast_object

MESSAGE = struct.Struct("!ii")  # rank, number of the exchange


class Heartbeat:
    """The heartbeat of one rank. The constructor is collective."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.number = 0
        self.last = [0] * self.size
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        address = None
        if self.rank == 0:
            self._socket.bind(("", 0))
            address = (socket.gethostname(), self._socket.getsockname()[1])
        host, port = broadcast_object(transport, address, name="heartbeat")
        # A machine may be unable to resolve its own name.
        self._address = ("127.0.0.1" if host == socket.gethostname() else host, port)

    def send(self) -> None:
        """Sends a datagram. Call it before each exchange."""
        self.number += 1
        try:
            self._socket.sendto(MESSAGE.pack(self.rank, self.number), self._address)
        except OSError:
            return  # the error message then has no rank
        self._receive()

    def _receive(self) -> None:
        while self.rank == 0:
            try:
                rank, number = MESSAGE.unpack(self._socket.recv(64))
            except (OSError, struct.error):
                return
            if 0 <= rank < self.size:
                self.last[rank] = max(self.last[rank], number)

    def missing(self) -> list[int]:
        """On rank 0: the ranks that sent datagrams earlier, but none for this exchange."""
        self._receive()
        return [rank for rank, number in enumerate(self.last) if 0 < number < self.number]

    def close(self) -> None:
        self._socket.close()
