"""Applies the faults and prints a line for each: the verdict, its first failing test, and seconds."""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from .copies import ROOT, Copy, clone, copy_tree
from .fault import Fault
from .faults import FAULTS

CAUGHT, SURVIVED, NOT_APPLIED, NO_VERDICT = "caught", "SURVIVED", "DID NOT APPLY", "NO VERDICT"
FAILED = 1  # pytest's exit status if tests failed and all could be collected


@dataclass(frozen=True)
class Verdict:
    """The end of one fault. said: the first failing test, or the reason. details: the output without a verdict."""

    fault: Fault
    kind: str
    said: str
    seconds: float
    details: str = ""

    def __str__(self) -> str:
        fault = self.fault
        line = f"{self.kind:13}  {described(fault)}  {self.seconds:5.1f} s  {self.said}"
        return "\n    ".join([line, *self.details.splitlines()[-30:]])


def described(fault: Fault) -> str:
    return f"{fault.room:15}  {fault.name:46}  {fault.file:37}"


def not_applied(fault: Fault, root: Path = ROOT) -> str | None:
    """Why the fault cannot be applied; None if it can be."""
    found = fault.occurrences(root)
    return None if found == 1 else f"its text is found {found} times in {fault.file}: {fault.old}"


def judge(fault: Fault, copy: Copy) -> Verdict:
    """Applies a fault in the copy and runs its tests."""
    start = time.perf_counter()

    def verdict(kind: str, said: str, details: str = "") -> Verdict:
        return Verdict(fault, kind, said, time.perf_counter() - start, details)

    if (reason := not_applied(fault, copy.root)) is not None:
        return verdict(NOT_APPLIED, reason)
    try:
        with copy.with_fault(fault):
            ended = copy.tests(fault.tests, "-x")
    except RuntimeError as error:
        return verdict(NO_VERDICT, "the library cannot be built", str(error))
    if ended.status == FAILED and ended.first is not None:
        return verdict(CAUGHT, ended.first)
    if ended.status == 0:
        return verdict(SURVIVED, " ".join(fault.tests))
    status = "no end in time" if ended.status is None else f"pytest ended with status {ended.status}"
    return verdict(NO_VERDICT, status, ended.output)


def judge_all(faults: Sequence[Fault], copies: Sequence[Copy]) -> list[Verdict]:
    """Judges the faults, one at a time in each copy, and prints each verdict when it is known."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def judge_in_a_free_copy(fault: Fault) -> Verdict:
        copy = free.get()
        try:
            return judge(fault, copy)
        finally:
            free.put(copy)

    verdicts = []
    with ThreadPoolExecutor(len(copies)) as pool:
        waiting = [pool.submit(judge_in_a_free_copy, fault) for fault in faults]
        try:
            for done in as_completed(waiting):
                verdicts.append(done.result())
                print(verdicts[-1], flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    return verdicts


def without_faults(faults: Sequence[Fault], copy: Copy, workers: int) -> int:
    """Runs all tests of the faults in the unchanged copy. Returns their exit status."""
    tests = sorted({test for fault in faults for test in fault.tests})
    start = time.perf_counter()
    ended = copy.tests(tests, "-n", str(workers), "--dist=loadgroup", write_bytecode=True)
    if ended.status == 0:
        print(f"Without a fault: {ended.output.splitlines()[-1].strip('= ')}", flush=True)
        return 0
    print(f"{ended.output}\nWithout a fault the tests must pass ({time.perf_counter() - start:.0f} s)")
    return 1


def chosen(only: Sequence[str], rooms: Sequence[str]) -> list[Fault]:
    """The faults of these names and rooms; all of them if none is given."""
    names = {fault.name for fault in FAULTS}
    known = {fault.room for fault in FAULTS}
    for wanted, there in (*((name, names) for name in only), *((room, known) for room in rooms)):
        if wanted not in there:
            sys.exit(f"there is no {wanted}; there is: {', '.join(sorted(there))}")
    return [f for f in FAULTS if (not only or f.name in only) and (not rooms or f.room in rooms)]


def show(faults: Sequence[Fault]) -> int:
    """Prints the faults. Returns 1 if one cannot be applied."""
    reasons = {fault.name: not_applied(fault) for fault in faults}
    for fault in faults:
        reason = reasons[fault.name]
        print(described(fault) + (f"  {NOT_APPLIED}: {reason}" if reason else ""))
    rooms = Counter(fault.room for fault in faults)
    print(f"{len(faults)} faults: " + ", ".join(f"{room} {count}" for room, count in rooms.items()))
    return int(any(reasons.values()))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a fault (repeatable)")
    parser.add_argument("--room", action="append", default=[], help="all faults of a package (repeatable)")
    parser.add_argument("--list", action="store_true", help="only list the faults, and check that they apply")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="faults at a time")
    args = parser.parse_args(words)
    faults = chosen(args.only, args.room)
    if args.list:
        return show(faults)
    start, workers = time.perf_counter(), max(1, min(args.workers, len(faults)))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        first = copy_tree(Path(folder, "0"))
        if without_faults(faults, first, args.workers):
            return 1
        copies = [first, *(clone(first, Path(folder, str(i))) for i in range(1, workers))]
        # The slowest first, so that none of them is left alone at the end.
        verdicts = judge_all(sorted(faults, key=lambda fault: not fault.is_native), copies)
    kinds = Counter(verdict.kind for verdict in verdicts)
    told = ", ".join(f"{kinds[kind]} {kind.lower()}" for kind in (CAUGHT, SURVIVED, NOT_APPLIED, NO_VERDICT))
    print(f"{len(verdicts)} faults: {told}; {(time.perf_counter() - start) / 60:.1f} minutes")
    return int(kinds[CAUGHT] < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
