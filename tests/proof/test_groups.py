"""Four groups of two ranks on machines of their own, one of which is killed, stopped or cut off every 30 seconds.

    MINUTES=30 python -m pytest -m proof tests/proof/test_groups.py -s

The machines are network namespaces (benchmarks.netlab), so it needs root. It prints the seconds that a fault costs
the others, and beside it the seconds after which torchrun has started all ranks again.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from environment import patient, python_path
from groups.sites import until
from parallel.grouped import TESTS, WORKER, Process, check_equal_states, until_round
from parallel.processes import free_port, send

from benchmarks._laboratory import LINK, Laboratory, address

MINUTES = float(os.environ.get("MINUTES", "30"))
EVERY = 30.0  # seconds between two faults, on average
GROUPS, RANKS, PORT = 4, 2, 29444
GRACE, TIMEOUT, LOST = 4.0, 40.0, 3.0
MARGIN = 5.0  # seconds of a busy machine


class Run:
    """The coordinator on host 0, and the groups on the others."""

    def __init__(self, laboratory: Laboratory, folder: Path):
        self.laboratory, self.folder = laboratory, folder
        words = [
            sys.executable,
            "-m",
            "dgc.groups",
            "serve",
            "--port",
            str(PORT),
            "--state",
            str(folder / "c.json"),
        ]
        words += ["--grace", str(GRACE), "--timeout", str(TIMEOUT), "--lost", str(LOST), "--beat", "0.5"]
        variables = {**os.environ, "PYTHONPATH": python_path(TESTS)}
        self._log = open(folder / "coordinator.txt", "w")  # noqa: SIM115
        self._coordinator = subprocess.Popen(laboratory.inside(0, words), stdout=self._log, env=variables)
        self.starts: list[Process] = []
        self.now: dict[int, Process] = {}
        for number in range(1, GROUPS + 1):
            self.start(number)

    def start(self, number: int) -> None:
        own = Process(
            f"{address(0)}:{PORT}",
            number,
            self.folder,
            kind="ddp",
            ranks=RANKS,
            inside=lambda words: self.laboratory.inside(number, words),
        )
        self.starts.append(own)
        self.now[number] = own

    def link(self, number: int, state: str) -> None:
        where = ["ip", "-n", self.laboratory.switch, "link", "set", f"{LINK}{number}", state]
        subprocess.run(where, check=True)

    def end(self) -> None:
        for process in self.now.values():
            process.kill()
        self._coordinator.terminate()
        self._coordinator.wait(patient(10))
        self._log.close()

    def fault(self, draw: random.Random) -> tuple[float, int, str, float]:
        """One fault, and its end. Returns when it came, which group it hit, its kind and its length."""
        number, kind = draw.randint(1, GROUPS), draw.choice(["kill", "stop", "cut"])
        until(lambda: self.now[number].round >= 0)  # it has come back from its last fault
        begin, length = time.time(), draw.uniform(1, EVERY / 2)
        match kind:
            case "kill":
                self.now[number].kill()
                time.sleep(length)
                self.start(number)
            case "stop":
                self.now[number].send(signal.SIGSTOP)
                time.sleep(length)
                self.now[number].send(signal.SIGCONT)
            case _:
                self.link(number, "down")
                time.sleep(length)
                self.link(number, "up")
        return begin, number, kind, length


def lost_seconds(run: Run, begin: float, hit: int) -> float:
    """How much longer than usual the others wait for the next round, at most."""
    worst = 0.0
    for number, process in run.now.items():
        times = [line["time"] for line in process.rounds]
        gaps = list(zip(times, times[1:], strict=False))
        if number == hit or len(gaps) < 3:
            continue
        usual = median(after - before for before, after in gaps)
        worst = max([worst, *(b - a - usual for a, b in gaps if a < begin + LOST and b > begin)])
    return worst


def seconds_of_a_restart(folder: Path) -> float:
    """From a rank's death under torchrun until all ranks exchange again, without the steps that they repeat."""
    output = folder / "torchrun.txt"
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={RANKS}"]
    words += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--max-restarts=3"]
    words += [WORKER, "", "0", "", "torchrun"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(TESTS)}
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with open(output, "w") as file:
        launcher = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=variables)
    told: Any = Process.told_in(output)
    try:
        until(lambda: len([line for line in told() if "round" in line]) > 3)
        killed, seen = time.time(), len(told())
        send(next(line["pid"] for line in told() if "pid" in line), signal.SIGKILL)
        until(lambda: any("round" in line and line["round"] == 0 for line in told()[seen:]))
        again = next(line["time"] for line in told()[seen:] if line.get("round") == 0)
    finally:
        launcher.terminate()
        launcher.wait(patient(20))
    return float(again) - killed


@pytest.mark.proof
@pytest.mark.timeout(int(60 * MINUTES) + 1200)
def test_groups_go_on_through_kills_stops_and_cuts(tmp_path: Path) -> None:
    draw, faults = random.Random(0), []
    restart = seconds_of_a_restart(tmp_path)
    with Laboratory(GROUPS + 1, "1gbit") as laboratory:
        run = Run(laboratory, tmp_path)
        try:
            until_round(list(run.now.values()), members=GROUPS)
            end = time.monotonic() + 60 * MINUTES
            while time.monotonic() < end:
                time.sleep(draw.expovariate(1 / (EVERY / 2)))
                fault = run.fault(draw)
                time.sleep(1)
                faults.append((*fault, lost_seconds(run, *fault[:2])))
                print(f"{fault[2]} group {fault[1]} for {fault[3]:.1f} s: the others lost {faults[-1][-1]:.1f} s")
            until_round(list(run.now.values()), members=GROUPS)
        finally:
            run.end()
    check_equal_states(run.starts)
    rounds = max(process.round for process in run.starts)
    longest = max(line["longest"] for process in run.starts for line in process.rounds)
    healed = [line["healed"] for process in run.starts for line in process.rounds if line["healed"]]
    lines = [line for process in run.starts[:1] for line in process.rounds]
    losses = [median(line["loss"] for line in part) for part in (lines[:20], lines[-20:])]
    lost = [fault[-1] for fault in faults]
    print(
        f"{MINUTES:g} minutes, {len(faults)} faults, {rounds} rounds with equal bits, loss {losses[0]:.3f} -> ",
        end="",
    )
    print(f"{losses[1]:.3f}, longest outer step {longest:.1f} s")
    print(f"lost per fault: {sum(lost) / len(lost):.1f} s on average, {max(lost):.1f} s at most; ", end="")
    print(
        f"restart of all ranks by torchrun: {restart:.1f} s; last state loaded: {healed[-1] if healed else None}"
    )
    assert longest <= GRACE + TIMEOUT + MARGIN and losses[1] < losses[0]
