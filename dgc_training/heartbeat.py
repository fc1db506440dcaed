"""Which rank is silent altogether: stopped, swapped out, its machine gone.

Horovod's controller over MPI waits for such a rank for ever, and its stall check with it. Beside the exchange of
the watchdog every rank therefore sends rank 0 a datagram; when an exchange stays unanswered, rank 0 knows who
has not come to it. Where datagrams do not pass between the machines the run ends all the same, without a name.
"""

import socket
import struct

from dgc.comm import Transport, broadcast_object

MESSAGE = struct.Struct("!ii")  # rank, number of the exchange


class Heartbeat:
    """One rank's end. Making it is collective."""

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
        # A machine need not be able to resolve its own name.
        self._address = ("127.0.0.1" if host == socket.gethostname() else host, port)

    def beat(self) -> None:
        """Before each exchange."""
        self.number += 1
        try:
            self._socket.sendto(MESSAGE.pack(self.rank, self.number), self._address)
        except OSError:
            return  # nobody is named then
        self._receive()

    def _receive(self) -> None:
        while self.rank == 0:
            try:
                rank, number = MESSAGE.unpack(self._socket.recv(64))
            except (OSError, struct.error):
                return
            if 0 <= rank < self.size:
                self.last[rank] = max(self.last[rank], number)

    def silent(self) -> list[int]:
        """On rank 0: the ranks that used to be heard but have not come to this exchange."""
        self._receive()
        return [rank for rank, number in enumerate(self.last) if 0 < number < self.number]

    def close(self) -> None:
        self._socket.close()
