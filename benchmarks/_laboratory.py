"""Hosts and a network of limited rate between them on one machine, made by `ip` and `tc`, and removed at the end.

Each host is a network namespace with one interface, `lab0`. A bridge connects it with the interfaces of the other
hosts. A token bucket limits each interface in both directions. The hosts share the cores and the memory of the
machine. See docs/netlab.md.


Names on the machine, for a laboratory of process 4711:

    /run/dgc-netlab/4711      a file that the process keeps locked as long as the laboratory exists
    dgclab4711-0              the network namespace of host 0, with its end of the link, `lab0`
    dgclab4711-bridge         the namespace of the bridge, with the other ends of the links, `host0`, `host1`, ...

The bridge has a namespace of its own, because firewall rules of the machine may drop the frames of its bridges
(br_netfilter, as with Docker).

The lock ends with the process, also after SIGKILL. The next laboratory removes everything whose lock is free. It
ends the processes of those hosts first. Several laboratories can exist at the same time, since the bridges are not
connected and the machine itself has no address in their network. Two processes that start or end at the same time
look at each other's files: one of them may hold the lock of a file for a moment, or remove it between the other's
steps.
"""

import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

from dgc.core.arguments import WHOLE, require

LOCKS = Path("/run/dgc-netlab")
PREFIX = "dgclab"
BRIDGE, LINK = "bridge", "host"  # inside the bridge's namespace
INTERFACE = "lab0"
NETWORK = "198.18.0.0/24"  # of the range for benchmarks, RFC 2544
MAX_HOSTS = 64
CONGESTION_CONTROL = ("cubic", "reno")  # the first that the kernel allows; it always allows reno
TICK = 0.001  # seconds between two refills of a token bucket, at most
PACKETS = 16384, 65536  # bytes, limits of the size of the largest packet
HEADERS = 14 + 20 + 32  # bytes of Ethernet, IP and TCP with its time stamps, in each packet
RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
DELAYS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
ATTEMPTS, PAUSE = 20, 0.05  # seconds


class LaboratoryError(RuntimeError):
    """The laboratory cannot be made here, or does not work. The message says why, and what helps."""


def parse_rate(text: str) -> float:
    """Bits per second of a rate from 1mbit to 100gbit. Raises ValueError if it is not one."""
    return _parse("rate", text, RATES, "from 1mbit to 100gbit, such as 2.5gbit", (1e6, 1e11))


def parse_latency(text: str) -> float:
    """Seconds of a delay of at most 1s. Raises ValueError if it is not one."""
    return _parse("latency", text, DELAYS, "above 0 and at most 1s, such as 500us", (1e-9, 1.0))


def _parse(what: str, text: str, units: dict[str, float], valid: str, limits: tuple[float, float]) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", str(text))
    number = float(found[1]) * units.get(found[2], math.nan) if found else math.nan
    if not limits[0] <= number <= limits[1]:
        raise ValueError(f"the {what} must be {valid}, not {text!r}")
    return number


class RaisedSigterm:
    """Raises SystemExit(143) on SIGTERM, between `install` and `restore`.

    Only the main thread can set a handler, and one that the user has set is kept.
    """

    def __init__(self) -> None:
        self._installed = self._held = self._late = False

    def install(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    def hold(self) -> None:
        """Let a later SIGTERM wait until `restore`, since the removal must not end halfway."""
        self._held = True

    def restore(self) -> None:
        """Set the default handler again. Raises SystemExit if a SIGTERM was held."""
        if self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        late, self._installed, self._held, self._late = self._late, False, False, False
        if late:
            sys.exit(128 + signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._late = True
        else:
            sys.exit(128 + number)


def address(host: int) -> str:
    """The IPv4 address of a host."""
    return f"198.18.0.{host + 1}"


class Laboratory:
    """Hosts with links of a limited rate. A context manager: the hosts exist inside of it.

    In the main thread SIGTERM raises SystemExit inside of it, so that the hosts are removed, unless the program
    has set a handler.

    Args:
        hosts: Number of hosts, 2 to 64.
        rate: Rate of each host's link in each direction, such as "100mbit" or "1gbit".
        latency: Delay of each packet that a host sends, such as "1ms". None: no delay is added. Delays need the
            kernel module sch_netem.

    Raises:
        ValueError: An argument is invalid.
        LaboratoryError: On entry, if the user is not root, a tool is missing, or the kernel lacks something.

    Example:
        with Laboratory(4, "1gbit") as laboratory:
            laboratory.run(["python", "--version"], host=2)
    """

    def __init__(self, hosts: int, rate: str, latency: str | None = None):
        require(f"a whole number from 2 to {MAX_HOSTS}", WHOLE, hosts=hosts)
        if not 2 <= hosts <= MAX_HOSTS:
            raise ValueError(f"the number of hosts must be 2 to {MAX_HOSTS}, not {hosts}")
        self.hosts, self.bits_per_second = hosts, parse_rate(rate)
        self.latency = parse_latency(latency) if latency is not None else 0.0
        self.name = f"{PREFIX}{os.getpid()}"
        self.switch = f"{self.name}-{BRIDGE}"
        self._lock: IO[str] | None = None
        self._sigterm = RaisedSigterm()

    def __enter__(self) -> "Laboratory":
        check_machine()
        remove_leftovers()
        self._lock = lock(LOCKS / str(os.getpid()))
        if self._lock is None:
            raise LaboratoryError("this process has a laboratory already: leave that one first")
        self._sigterm.install()
        try:
            self._create()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sigterm.hold()
        try:
            remove(os.getpid())
        finally:
            if self._lock is not None:
                self._lock.close()
            self._sigterm.restore()

    def _create(self) -> None:
        _ip("netns", "add", self.switch)
        switch = ("-n", self.switch)
        _ip(*switch, "link", "add", BRIDGE, "type", "bridge")
        _ip(*switch, "link", "set", BRIDGE, "up")
        for host in range(self.hosts):
            space, link = self.namespace(host), f"{LINK}{host}"
            _ip("netns", "add", space)
            _ip(*switch, "link", "add", link, "type", "veth", "peer", "name", INTERFACE, "netns", space)
            _ip(*switch, "link", "set", link, "master", BRIDGE, "up")
            _ip("-n", space, "address", "add", f"{address(host)}/24", "dev", INTERFACE)
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", INTERFACE, "up", "gso_max_size", str(self._packet))
            self._choose_congestion_control(space)
            self._limit(["tc", *switch], link)
            self._limit(["tc", "-n", space], INTERFACE, self.latency)

    def _choose_congestion_control(self, space: str) -> None:
        """Set what most machines use, whatever this one does. BBR has a pace of its own beside the bucket's."""
        enter, folder = ["ip", "netns", "exec", space], "/proc/sys/net/ipv4"
        allowed = _run([*enter, "cat", f"{folder}/tcp_allowed_congestion_control"]).split()
        chosen = next(name for name in CONGESTION_CONTROL if name in allowed)
        _run([*enter, "sh", "-c", f"echo {chosen} > {folder}/tcp_congestion_control"])

    @property
    def _packet(self) -> int:
        """The largest packet in bytes, which the kernel hands on in one piece: what the rate gives in a tick."""
        return min(max(int(self.bits_per_second / 8 * TICK), PACKETS[0]), PACKETS[1])

    def _limit(self, tc: list[str], interface: str, latency: float = 0.0) -> None:
        """Limit what is sent into a link. A bucket holds what the rate gives in a tick, or the largest packet.

        A packet that is larger than the bucket is divided into frames of 1500 bytes. Their timers take a third of
        the time of all cores at 100 Mbit/s. The bucket counts the headers of these frames, hence the margin.
        """
        burst = max(self._packet * 9 // 8, int(self.bits_per_second / 8 * TICK))
        bucket = f"tbf rate {self.bits_per_second:.0f}bit burst {burst} latency 50ms".split()
        parent = ["root"]
        if latency:
            _run([*tc, "qdisc", "add", "dev", interface, "root", "handle", "1:", "netem", "delay", f"{latency}s"])
            parent = ["parent", "1:"]
        _run([*tc, "qdisc", "add", "dev", interface, *parent, *bucket])

    def namespace(self, host: int) -> str:
        return f"{self.name}-{host}"

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` in a host, under a host name and on cores of its own."""
        cores = ",".join(str(core) for core in cores_of(host, self.hosts, sorted(os.sched_getaffinity(0))))
        enter = ["ip", "netns", "exec", self.namespace(host), "taskset", "--cpu-list", cores, "unshare", "--uts"]
        return [*enter, "sh", "-c", f'hostname lab{host}; exec "$@"', "sh", *command]

    def run(
        self, command: Sequence[str], host: int = 0, timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a host, and return its output."""
        words = self.inside(host, command)
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)

    def counters(self) -> list[dict[str, int]]:
        """Bytes and packets that each host has sent and received, with their Ethernet, IP and TCP headers."""
        listed = json.loads(_ip("-n", self.switch, "-s", "-j", "link"))
        links = {link["ifname"]: link["stats64"] for link in listed}
        # what the bridge's end receives, the host has sent
        pairs = {"sent": "rx", "received": "tx"}
        return [
            {
                f"{what}_{unit}": int(links[f"{LINK}{host}"][own][unit])
                for what, own in pairs.items()
                for unit in ("bytes", "packets")
            }
            for host in range(self.hosts)
        ]


def cores_of(host: int, hosts: int, cores: Sequence[int]) -> Sequence[int]:
    """The cores of a host: a share of `cores`, or with fewer cores than hosts one core, which hosts share.

    Programs then start as many threads as on a machine with these cores.
    """
    if len(cores) < hosts:
        return [cores[host % len(cores)]]
    each = len(cores) // hosts
    return cores[host * each : (host + 1) * each]


def sent() -> int | None:
    """Bytes that this host has sent since it was made, without headers, or None outside of a laboratory.

    The kernel hands large packets of several segments to the interface, with one set of headers.
    """
    folder = Path(f"/sys/class/net/{INTERFACE}/statistics")
    if not folder.exists():
        return None
    return int((folder / "tx_bytes").read_text()) - HEADERS * int((folder / "tx_packets").read_text())


def try_lock(path: Path, mode: str = "r") -> IO[str] | None:
    """The open file, locked. None: another process holds the lock, or has removed the file meanwhile."""
    try:
        file: IO[str] = open(path, mode)  # noqa: SIM115  (stays open as long as the lock is held)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # a removed file can be locked as well, beside a new one of the same name
        if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    file.close()
    return None


def lock(path: Path) -> IO[str] | None:
    """Make a file and lock it. None: another file has kept the lock for a second."""
    path.parent.mkdir(exist_ok=True)
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE)
        if (file := try_lock(path, "w")) is not None:
            return file
    return None


def check_machine() -> None:
    """Raise LaboratoryError unless this machine can have a laboratory."""
    if not sys.platform.startswith("linux"):
        raise LaboratoryError(f"network namespaces need Linux, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise LaboratoryError("network namespaces need root: start it with sudo, or in a container as root")
    packages = {"iproute2": ("ip", "tc"), "util-linux": ("unshare", "taskset"), "hostname": ("hostname",)}
    for tool, package in ((tool, package) for package, tools in packages.items() for tool in tools):
        if shutil.which(tool) is None:
            raise LaboratoryError(f"{tool} is missing: install it, for example `apt-get install {package}`")


def remove_leftovers() -> None:
    """Remove the laboratories of processes that have ended."""
    for path in LOCKS.glob("*") if LOCKS.exists() else ():
        if (file := try_lock(path)) is not None:
            with file:
                remove(int(path.name))


def remove(pid: int) -> None:
    """Remove the laboratory of a process, with all processes in its hosts."""
    spaces = [name for name in _namespaces() if name.rpartition("-")[0] == f"{PREFIX}{pid}"]
    for space in spaces:
        _end_processes(space)
        _ip("netns", "delete", space)  # with its links
    (LOCKS / str(pid)).unlink(missing_ok=True)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def _end_processes(space: str, patience: float = 5.0) -> None:
    """End the processes of a host."""
    end = time.monotonic() + patience
    while (pids := _ip("netns", "pids", space).split()) and time.monotonic() < end:
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _ip(*words: str) -> str:
    return _run(["ip", *words])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip()
        cure = ""
        if "qdisc kind is unknown" in reason:
            delays = "netem, which delays packets: leave out the latency"
            cure = f"\nThe kernel has no {delays if 'netem' in command else 'token bucket filter, sch_tbf'}"
        elif "not permitted" in reason:
            cure = "\nA container needs the capabilities NET_ADMIN and SYS_ADMIN"
        raise LaboratoryError(f"`{' '.join(command)}` failed: {reason}{cure}")
    return done.stdout
