"""Measures what a link reaches: the rate of one TCP connection, and the time of a round trip.

    python -I benchmarks/_throughput.py receive PORT
    python -I benchmarks/_throughput.py send ADDRESS PORT BYTES

The sender prints one line of JSON; `start` and `end` are seconds of a clock that all hosts of a laboratory share.
Needs nothing but Python's own library, so that it starts at once.
"""

import json
import socket
import sys
import time

CHUNK = 1 << 18
ROUND_TRIPS = 20


def receive(port: int) -> None:
    """Echo single bytes, then read until the sender has sent all, and confirm it."""
    with socket.create_server(("", port)) as server:
        connection, _ = server.accept()
        with connection:
            for _ in range(ROUND_TRIPS):
                connection.sendall(connection.recv(1))
            left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
            buffer = bytearray(CHUNK)
            while left:
                left -= connection.recv_into(buffer, min(left, CHUNK))
            connection.sendall(b"!")


def send(address: str, port: int, nbytes: int) -> None:
    connection = _connect(address, port)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = []
    with connection:
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            times.append(time.perf_counter() - start)
        data = bytes(CHUNK)
        start = time.perf_counter()
        connection.sendall(nbytes.to_bytes(8, "big"))
        for offset in range(0, nbytes, CHUNK):
            connection.sendall(data[: nbytes - offset])
        connection.recv(1)
        end = time.perf_counter()
    found = {"bits_per_second": 8 * nbytes / (end - start), "round_trip": min(times), "start": start, "end": end}
    print(json.dumps(found))


def _connect(address: str, port: int, patience: float = 10.0) -> socket.socket:
    end = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
