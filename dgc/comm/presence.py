"""Whether the processes of other ranks exist: for the error of a rank that has waited for some of them.

Gloo names an address in its errors, or says that time is over, and names no rank. Horovod says that it has been
shut down. Every rank therefore listens at a port and accepts nothing. The system completes connections to it as
long as the process exists, also while the process is stopped or busy, and refuses them as soon as it has ended.
Whether a process of this machine is stopped is in Linux's /proc.
"""

import errno
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

LIMIT = 1.0  # seconds in which a machine must answer, and a process that has closed connections must end
PAUSE = 0.05  # seconds
SHOWN = 8  # ranks in a message


class Address(NamedTuple):
    """Where a rank listens. host: Name of its machine. pid: Of its process there."""

    host: str
    ip: str
    port: int
    pid: int

    @property
    def can_be_reached(self) -> bool:
        """Whether it is an address from this machine: a machine may know its own name as a loopback address."""
        return self.host == socket.gethostname() or not ip_address(self.ip).is_loopback


class Presence:
    """Lets other ranks see that this process exists.

    Args:
        other: Another machine of the ranks, by name or address. Nothing: all ranks are on this machine.

    Attributes:
        address: None if this process cannot listen.
    """

    def __init__(self, other: str = "") -> None:
        self.address: Address | None = None
        self._socket: socket.socket | None = None
        with suppress(OSError):
            ip = own_ip(other)
            self._socket = socket.create_server((ip, 0), family=family_of(ip), backlog=socket.SOMAXCONN)
            self.address = Address(socket.gethostname(), ip, self._socket.getsockname()[1], os.getpid())

    def close(self) -> None:
        """Let others see this process as ended."""
        if self._socket is not None:
            self._socket.close()


def own_ip(other: str) -> str:
    """The address of this machine in the network that leads to another one. other: As in Presence."""
    if not other:
        return "127.0.0.1"
    family, _, _, _, address = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as chosen:
        chosen.connect(address)  # sends nothing
        return str(chosen.getsockname()[0])


def family_of(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def absent(addresses: Mapping[int, Address], limit: float = LIMIT) -> tuple[list[int], list[int]]:
    """Return the ranks whose processes have ended, and those whose machines do not answer."""
    opened: dict[int, socket.socket] = {}
    status: dict[int, int] = {}  # an errno, or 0 for a connection
    with selectors.DefaultSelector() as selector:
        for rank, address in addresses.items():
            opened[rank] = connection = socket.socket(family_of(address.ip))
            connection.setblocking(False)
            code = connection.connect_ex((address.ip, address.port))
            if code == errno.EINPROGRESS:
                selector.register(connection, selectors.EVENT_WRITE, rank)
            else:
                status[rank] = code
        end = time.monotonic() + limit
        while selector.get_map() and (ready := selector.select(max(0.0, end - time.monotonic()))):
            for key, _ in ready:
                selector.unregister(key.fileobj)
                status[key.data] = opened[key.data].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        for connection in opened.values():
            connection.close()
    ended = [rank for rank, code in status.items() if code in (errno.ECONNREFUSED, errno.ECONNRESET)]
    return sorted(ended), sorted(rank for rank in addresses if status.get(rank) != 0 and rank not in ended)


def stopped(addresses: Mapping[int, Address]) -> list[int]:
    """Return the ranks of this machine whose processes are stopped, as by SIGSTOP or a debugger."""
    here = socket.gethostname()
    return [
        rank for rank, own in sorted(addresses.items()) if own.host == here and state_of(own.pid) in ("T", "t")
    ]


def state_of(pid: int) -> str:
    """The letter that Linux has for the state of a process of this machine, or nothing."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return ""


def explain(waited_for: Sequence[int], addresses: Sequence[Address | None], limit: float = LIMIT) -> str:
    """Say which of the ranks that this one has waited for is gone or stopped, or that this cannot be known.

    addresses: Of all ranks. limit: As LIMIT.
    """
    found = {rank: addresses[rank] for rank in waited_for}
    known = {rank: own for rank, own in found.items() if own is not None and own.can_be_reached}
    end = time.monotonic() + limit
    halted, (ended, silent) = stopped(known), absent(known, limit)
    while not halted and not ended and not silent and time.monotonic() < end:  # it may be about to end
        time.sleep(PAUSE)
        ended, silent = absent(known, limit)

    def name(ranks: Sequence[int]) -> str:
        named = [f"{rank} ({known[rank].host})" if rank in known else str(rank) for rank in ranks[:SHOWN]]
        more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
        return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(named)}{more}"

    if halted:  # others may have ended because they waited for it
        pids = ", ".join(str(known[rank].pid) for rank in halted[:SHOWN])
        one = len(halted) == 1
        return (
            f"{name(halted)} {'is' if one else 'are'} stopped, as by SIGSTOP or a debugger: let "
            f"{'process' if one else 'processes'} {pids} go on (kill -CONT), or end {'it' if one else 'them'}"
        )
    if ended:
        if len(ended) == 1:
            return f"{name(ended)} has ended: its output has the reason"
        return f"{name(ended)} have ended: the first error in their output is the reason"
    if silent:
        return f"no answer from {name(silent)}: a machine or the network is down, or a firewall drops connections"
    what = f"this rank has waited for {name(waited_for)}, "
    if len(known) < len(waited_for):
        if len(waited_for) == 1:
            return f"{what}and it cannot be known whether it is gone: see its output"
        return f"{what}and it cannot be known which of them is gone: compare the output of all ranks"
    if len(waited_for) == 1:
        return (
            f"{what}whose process exists: it is stopped, or at another place of the program. Its output and its "
            "stacks (py-spy dump) show where"
        )
    return (
        f"{what}whose processes exist. It cannot be known here which of them is stopped, or at another place of "
        "the program: compare their output and stacks (py-spy dump)"
    )
