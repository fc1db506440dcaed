"""The bytes that a host's own interface has sent, read by a rank on that host."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.netlab.laboratory import INTERFACE

HEADERS = 14 + 20 + 32  # bytes of Ethernet, IP and TCP with its time stamps, in each packet


@dataclass(frozen=True)
class Sent:
    """Bytes and packets that this host has sent since it was made.

    The kernel hands large packets of several segments to the interface, with one set of headers.
    """

    nbytes: int
    packets: int

    @property
    def contents(self) -> int:
        """The bytes without headers."""
        return self.nbytes - HEADERS * self.packets

    def __sub__(self, other: "Sent") -> "Sent":
        return Sent(self.nbytes - other.nbytes, self.packets - other.packets)


def sent() -> Sent | None:
    """What this host has sent, or None outside of a laboratory."""
    folder = Path(f"/sys/class/net/{INTERFACE}/statistics")
    if not folder.exists():
        return None
    return Sent(int((folder / "tx_bytes").read_text()), int((folder / "tx_packets").read_text()))
