"""The network laboratory: hosts of their own, limited links, and nothing that stays behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from environment import REPOSITORY, patient, slowness
from parallel.processes import run_together

from benchmarks._laboratory import LINK, LOCKS, Laboratory, LaboratoryError, address, check_machine
from benchmarks._launches import measure

NETLAB = [sys.executable, "-m", "benchmarks.netlab"]
MBIT = 1e6


def impossible() -> str:
    """Why this machine cannot have a laboratory."""
    try:
        check_machine()
    except LaboratoryError as error:
        return str(error)
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"no network namespaces: {tried.stderr}" if tried.returncode else ""


pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(bool(impossible()), reason=impossible())]


def exists(pid: int) -> tuple[int, int, bool]:
    """How many namespaces of a laboratory and links on the machine itself there are, and whether it has a lock."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    links = [path.name for path in Path("/sys/class/net").iterdir()]
    own = [name for name in links if re.fullmatch(rf"{LINK}\d+", name)]
    return len(re.findall(rf"dgclab{pid}-\w+", spaces)), len(own), (LOCKS / str(pid)).exists()


def throughput(laboratory: Laboratory, pairs: list[tuple[int, int]], nbytes: int) -> float:
    commands, program = [], [sys.executable, "-I", str(REPOSITORY / "benchmarks/_throughput.py")]
    for port, (sender, receiver) in enumerate(pairs, 29600):
        commands.append(laboratory.inside(receiver, [*program, "receive", str(port)]))
        commands.append(laboratory.inside(sender, [*program, "send", address(receiver), str(port), str(nbytes)]))
    done = run_together(commands, REPOSITORY, os.environ, timeout=60)
    assert all(end.returncode == 0 for end in done), [end.stderr for end in done]
    senders = [json.loads(end.stdout) for end in done[1::2]]
    return 8 * nbytes * len(pairs) / (max(of["end"] for of in senders) - min(of["start"] for of in senders))


NBYTES = 8 * 2**20


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """What one laboratory of three hosts showed, and what there was of it meanwhile and afterwards."""
    found: dict[str, Any] = {}
    with Laboratory(3, "100mbit") as laboratory:
        found["meanwhile"], found["before"] = exists(os.getpid()), laboratory.counters()
        rates = [throughput(laboratory, [(0, 2), (1, 2)], NBYTES)]
        found["after"] = laboratory.counters()
        found["rates"] = rates + [throughput(laboratory, pairs, NBYTES) for pairs in ([(0, 1)], [(0, 1), (0, 2)])]
        found["names"] = [laboratory.run(["hostname"], host).stdout for host in range(3)]
    return found | {"afterwards": exists(os.getpid())}


def test_a_laboratory_has_hosts_until_it_ends(measured: dict[str, Any]) -> None:
    assert measured["meanwhile"] == (4, 0, True) and measured["names"] == ["lab0\n", "lab1\n", "lab2\n"]
    assert measured["afterwards"] == (0, 0, False)


def test_links_are_limited_in_each_direction(measured: dict[str, Any]) -> None:
    """A full bucket passes at once, so that a short transfer is a little faster; a busy machine is slower."""
    rates = measured["rates"]
    assert all(40 * MBIT / slowness() < rate < 115 * MBIT for rate in rates), rates


def test_the_bytes_of_a_link_are_counted(measured: dict[str, Any]) -> None:
    before, after = measured["before"], measured["after"]
    assert 2 * NBYTES < after[2]["received_bytes"] - before[2]["received_bytes"] < 2.1 * NBYTES


def test_frames_are_large(measured: dict[str, Any]) -> None:
    """Frames of 1500 bytes would each have a timer, which slows what the hosts compute."""
    before, after = measured["before"], measured["after"]
    packets, sent = (after[0][f"sent_{unit}"] - before[0][f"sent_{unit}"] for unit in ("packets", "bytes"))
    assert sent / packets > 6000


PROGRAM = """
import socket, torch
from dgc.comm import all_reduce
from dgc.comm.connect import connect
transport = connect()
total = all_reduce(transport, torch.ones(250_000) * (transport.rank + 1), "sum")
print(f"{socket.gethostname()} has rank {transport.rank}: {total[0].item()}", flush=True)
"""


LAUNCHERS = [pytest.param("mpirun", marks=pytest.mark.horovod), pytest.param("torchrun", marks=pytest.mark.proof)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_on_two_hosts(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["--hosts", "2", "--rate", "200mbit", "--launcher", launcher, "--", str(tmp_path / "program.py")]
    paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    (done,) = run_together([[*NETLAB, *words]], REPOSITORY, {**os.environ, "PYTHONPATH": paths}, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"lab{rank} has rank {rank}: 3.0" in done.stdout for rank in range(2)), done.stdout
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert 50 * MBIT / slowness() < found["bits_per_second"] < 230 * MBIT
    # an all-reduce of 1 MB on two ranks sends 1 MB; 5 % for headers, and what the launcher and the start need
    assert all(1e6 < host["sent_bytes"] < 1.05e6 + 100_000 for host in found["hosts"]), found


def test_what_a_killed_laboratory_leaves_is_removed_by_the_next() -> None:
    words = ["--hosts", "2", "--launcher", "torchrun", "--", "-c", "import time; time.sleep(600)"]
    with Laboratory(2, "1gbit"):
        killed = subprocess.Popen([*NETLAB, *words], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        assert killed.stdout is not None and "Mbit/s" in killed.stdout.readline()
        time.sleep(0.5)
        assert exists(killed.pid) == (3, 0, True)
        killed.send_signal(signal.SIGKILL)
        killed.wait()  # its ranks keep its output open
        assert exists(killed.pid) == (3, 0, True)
        script = "from benchmarks._laboratory import Laboratory\nwith Laboratory(2, '1gbit'): pass"
        subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True, timeout=patient(60))
        assert exists(killed.pid) == (0, 0, False)
        assert exists(os.getpid()) == (3, 0, True), "a laboratory that is in use"
        assert killed.stdout.read() == "", "its ranks have ended"
        killed.stdout.close()
    assert exists(os.getpid()) == (0, 0, False)


def test_sigterm_ends_a_laboratory_with_its_programs() -> None:
    script = "from benchmarks._laboratory import Laboratory\nwith Laboratory(2, '1gbit') as own:\n"
    script += "    own.run(['sh', '-c', 'sleep 600; true'], host=1)"
    words = [sys.executable, "-c", script]
    with subprocess.Popen(words, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + patient(60)
        pids: list[str] = []
        while len(pids) < 2 and time.monotonic() < end:  # sh and sleep
            inside = ["ip", "netns", "pids", f"dgclab{process.pid}-1"]
            pids = subprocess.run(inside, capture_output=True, text=True, check=False).stdout.split()
            time.sleep(0.05)
        assert len(pids) == 2 and exists(process.pid) == (3, 0, True)
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=patient(60))[1]
        assert process.returncode == 128 + signal.SIGTERM, errors
    assert exists(process.pid) == (0, 0, False)
    commands = [Path(f"/proc/{pid}/cmdline") for pid in pids]
    assert not any(command.exists() and command.read_bytes() for command in commands)


def test_frames_that_do_not_arrive_end_the_laboratory_with_one_message() -> None:
    message = "from host 0 to host 1 could not be measured.*\nFrames prob"
    with pytest.raises(LaboratoryError, match=message), Laboratory(2, "1gbit") as laboratory:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        subprocess.run(["ip", "-n", laboratory.switch, "link", "set", f"{LINK}1", "down"], check=True)
        measure(laboratory)
    assert exists(os.getpid()) == (0, 0, False)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
