"""Four groups of two ranks on machines of their own, one of which is killed, stopped or cut off every 30 seconds.

    MINUTES=30 RECORD=groups_run.json python -m pytest -m proof tests/proof/test_groups.py -s

The machines are network namespaces (benchmarks.netlab), so it needs root. It prints the seconds that a fault costs
the others, and beside it the seconds after which torchrun has started as many ranks again, all on one machine.
RECORD keeps losses and faults over time, which `python -m benchmarks.groups --draw` draws.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

import pytest
from environment import patient, python_path
from groups.sites import until
from parallel.grouped import TESTS, WORKER, Process, check_equal_states, until_round
from parallel.processes import free_port, send

from benchmarks._laboratory import LINK, Laboratory, address

MINUTES = float(os.environ.get("MINUTES", "30"))
EVERY = 30.0  # seconds between two faults, on average
GROUPS, RANKS, PORT = 4, 2, 29444
GRACE, TIMEOUT, LOST = patient(2), patient(20), patient(0.6)
RETURN = 15.0  # seconds in which a group is back after a fault
LONG = 3.0  # times the usual seconds of a round, above which the rest is lost
BIN = 5.0  # seconds of a point of RECORD


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
        words += ["--grace", str(GRACE), "--timeout", str(TIMEOUT), "--lost", str(LOST), "--beat", "0.25"]
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

    def fault(self, draw: random.Random) -> "Fault":
        """One fault, and its end."""
        number, kind = draw.randint(1, GROUPS), draw.choice(KINDS)
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
        return Fault(begin, number, kind, length)

    def rounds(self) -> dict[int, list[dict[str, Any]]]:
        """What all starts of each group have told about rounds. They write into one file."""
        return {process.number: process.rounds for process in self.starts[:GROUPS]}


KINDS = ("kill", "stop", "cut")


@dataclass
class Fault:
    """What happened to a group: when, by time.time(), and for how many seconds."""

    begin: float
    group: int
    kind: str
    seconds: float


Rounds: TypeAlias = Mapping[int, Sequence[dict[str, Any]]]  # of each group


def lost_seconds(every: Rounds, faults: Sequence[Fault], number: int = -1) -> float:
    """What a fault, with the return of its group, costs another group at most: its long rounds, beyond the usual.

    A round that ends after the next fault is counted there. One in which a group was itself away is not counted.
    """
    fault, *later = faults[number:]
    end = later[0].begin if later else inf
    worst, limit = 0.0, fault.begin + fault.seconds + RETURN
    for group in every.keys() - {fault.group}:
        rounds = list(pairwise(line["time"] for line in every[group]))
        usual = median(after - begin for begin, after in rounds)
        away = [(own.begin, own.begin + own.seconds + RETURN) for own in faults if own.group == group]
        hit = [
            after - begin
            for begin, after in rounds
            if begin < limit and fault.begin < after <= end
            if not any(begin < back and gone < after for gone, back in away)
        ]
        worst = max(worst, sum(seconds - usual for seconds in hit if seconds > LONG * usual))
    return worst


def record(every: Rounds, faults: Sequence[Fault], start: float, restart: float) -> dict[str, Any]:
    """Mean losses and numbers of rounds of each group in bins of some seconds, and the faults."""
    groups = {}
    for number, lines in every.items():
        bins: dict[int, list[float]] = {}
        for line in lines:
            bins.setdefault(int((line["time"] - start) // BIN), []).append(line["loss"])
        groups[number] = [[round(BIN * i, 1), float(f"{mean(of):.4g}"), len(of)] for i, of in sorted(bins.items())]
    hits = [{**asdict(fault), "begin": round(fault.begin - start, 2)} for fault in faults]
    return {"bin": BIN, "restart": restart, "groups": groups, "faults": hits}


def seconds_of_a_restart(folder: Path) -> float:
    """From a rank's death under torchrun until all ranks exchange again, without the steps that they repeat."""
    output = folder / "torchrun.txt"
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={GROUPS * RANKS}"]
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
        # what is measured: the time of a test does not limit it
        until(lambda: any("round" in line and line["round"] == 0 for line in told()[seen:]), 100)
        again = next(line["time"] for line in told()[seen:] if line.get("round") == 0)
    finally:
        launcher.terminate()
        launcher.wait(patient(20))
    return float(again) - killed


@pytest.mark.proof
@pytest.mark.timeout(int(60 * MINUTES) + 1200)
def test_groups_go_on_through_kills_stops_and_cuts(tmp_path: Path) -> None:
    draw, faults = random.Random(0), list[Fault]()
    restarts = [seconds_of_a_restart(tmp_path)]
    print(f"\nrestart of {GROUPS * RANKS} ranks by torchrun: {restarts[0]:.1f} s")
    with Laboratory(GROUPS + 1, "1gbit") as laboratory:
        run = Run(laboratory, tmp_path)
        try:
            until_round(list(run.now.values()), members=GROUPS)
            start, end = time.time(), time.monotonic() + 60 * MINUTES
            while time.monotonic() < end:
                time.sleep(draw.expovariate(1 / (EVERY / 2)))
                faults.append(fault := run.fault(draw))
                time.sleep(1)
                lost = lost_seconds(run.rounds(), faults)
                print(f"{fault.kind} group {fault.group} for {fault.seconds:.1f} s: {lost:.1f} s lost so far")
            until_round(list(run.now.values()), members=GROUPS)
            assert all(process.is_alive for process in run.now.values())
        finally:
            run.end()
    check_equal_states(run.starts)
    restarts.append(seconds_of_a_restart(tmp_path))  # the machine may be busier or less busy than before
    restart = mean(restarts)
    every = run.rounds()
    if path := os.environ.get("RECORD"):
        Path(path).write_text(json.dumps(record(every, faults, start, restart)) + "\n")
    rounds = max(lines[-1]["round"] for lines in every.values())
    longest = max(line["longest"] for lines in every.values() for line in lines)
    healed = [line["healed"] for lines in every.values() for line in lines if line["healed"]]
    losses = [mean(line["loss"] for lines in every.values() for line in of(lines)) for of in (first, last)]
    lost_by = [(fault.kind, lost_seconds(every, faults, number)) for number, fault in enumerate(faults)]
    print(f"{MINUTES:g} minutes, {len(faults)} faults, {rounds} rounds with equal bits, ", end="")
    print(f"loss {losses[0]:.3g} -> {losses[1]:.3g}, longest outer step {longest:.1f} s of {GRACE + TIMEOUT:g} s")
    for kind in KINDS:
        own = [lost for of, lost in lost_by if of == kind]
        if own:
            print(f"lost per {kind}: {mean(own):.2f} s on average, {max(own):.2f} s at most, of {len(own)}")
    average = mean(lost for _, lost in lost_by)
    print(f"lost per fault: {average:.2f} s; restart of all ranks by torchrun: ", end="")
    print(f"{restarts[0]:.1f} s before and {restarts[1]:.1f} s after it; ", end="")
    print(f"last state loaded: {healed[-1] if healed else None}")
    assert longest <= GRACE + TIMEOUT and losses[1] < losses[0]
    assert average <= restart / 10


def first(lines: Sequence[Any]) -> Sequence[Any]:
    return lines[: max(1, len(lines) // 10)]


def last(lines: Sequence[Any]) -> Sequence[Any]:
    return lines[-max(1, len(lines) // 10) :]
