"""Draws the faults, applies them, and prints a line for each: the verdict, its first failing test, and seconds."""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import inf
from pathlib import Path
from typing import NamedTuple

from coverage import Coverage
from environment import patient, slowness
from pytest import ExitCode

from .copies import ROOT, Copy, copy_tree
from .faults import Fault, drawn
from .packages import PACKAGES
from .plugin import LINES, SECONDS

LEAST = 0.75  # of all faults: some have no effect, or one on a GPU alone, and samples differ by some percent
FIRST_TESTS = 30  # run before the others: most faults are detected by them, and few files are collected
# seconds of a quiet machine
BUDGET = 30.0  # for the tests of one fault
LIMIT = 300.0  # after which they hang
RECORDING_LIMIT = 3600.0


class Verdict(NamedTuple):
    """The end of one fault. said: the first failing test, or why there is none."""

    fault: str
    package: str
    line: int
    detected: bool
    said: str
    seconds: float

    def __str__(self) -> str:
        kind, fault = ("detected", self.fault[:160]) if self.detected else ("SURVIVED", self.fault)
        return f"{kind} {self.seconds:4.0f} s  {fault}  | {self.said}"


def recorded(faults: Sequence[Fault], copy: Copy, workers: int, folder: Path) -> dict[str, list[str]]:
    """Tests that run each fault's lines, by its key: all tests run in the copy without a fault."""
    folder.mkdir()
    tests = sorted({test for fault in faults for test in PACKAGES[fault.package].own})
    several = ("-n", str(workers), "--dist=loadgroup") if workers > 1 else ()
    ended = copy.tests(tests, RECORDING_LIMIT, f"--record={folder}", *several, write_bytecode=True)
    if ended.status not in (0, 1):
        sys.exit(f"{ended.output}\nWithout a fault the tests must run")
    failed = [line for line in ended.output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print("\n".join([f"Without a fault: {ended.output.splitlines()[-1].strip('= ')}", *failed]), flush=True)
    seconds = json.loads((folder / SECONDS).read_text())
    coverage = Coverage(folder / LINES, config_file=False)
    coverage.combine()
    tests_of, found = cache(coverage.get_data().contexts_by_lineno), dict[str, list[str]]()
    for fault in faults:
        by_line = tests_of(str(copy.root / fault.file))
        ran = {test for line in fault.lines for test in by_line.get(line, ()) if test}
        found[fault.key] = within_budget(ran, seconds)
    return found


def within_budget(tests: set[str], seconds: dict[str, float]) -> list[str]:
    """The fastest of these tests, as many as the budget allows, and at least one."""
    total, result = 0.0, list[str]()
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        total += seconds[test]
        if total > patient(BUDGET) and (result or total == inf):
            break
        result.append(test)
    return result


def judge(fault: Fault, tests: Sequence[str], copy: Copy) -> Verdict:
    start = time.perf_counter()
    groups = [tests[:FIRST_TESTS], tests[FIRST_TESTS:]] if tests else [PACKAGES[fault.package].ranks]
    detected, said = False, f"{len(tests)} tests run these lines"
    with copy.with_fault(fault):
        for group in filter(None, groups):
            ended = copy.tests(group, LIMIT, "-x", "-o", "timeout=10")
            if ended.status not in (0, ExitCode.NO_TESTS_COLLECTED):  # proofs alone are deselected
                detected, said = True, ended.reason
                break
    return Verdict(fault.key, fault.package, fault.line, detected, said, time.perf_counter() - start)


def judge_all(faults: Sequence[Fault], tests: dict[str, list[str]], copies: list[Copy]) -> Iterator[Verdict]:
    """Judges the faults, one at a time in each copy."""

    def judge_in_a_free_copy(fault: Fault) -> Verdict:
        copy = copies.pop()
        try:
            return judge(fault, tests[fault.key], copy)
        finally:
            copies.append(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        yield from pool.map(judge_in_a_free_copy, faults)


def summary(verdicts: Sequence[Verdict]) -> str:
    detected = Counter(verdict.package for verdict in verdicts if verdict.detected)
    every = Counter(verdict.package for verdict in verdicts)
    rows = [f"{package:20} {detected[package]:4} of {every[package]:4}" for package in sorted(every)]
    return "\n".join([*rows, f"{'all':20} {detected.total():4} of {every.total():4}"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    add, cores = parser.add_argument, len(os.sched_getaffinity(0))
    add("--count", type=int, default=200, help="least number of faults")
    add("--seed", type=int, default=1, help="other faults with each seed")
    add("--package", action="append", choices=[*PACKAGES], help="only of this one (repeatable)")
    add("--workers", type=int, default=cores, help="faults at a time")
    add("--list", action="store_true", help="only print the faults")
    add("--record", type=Path, help="file for the verdicts, as JSON")
    args = parser.parse_args()
    faults = drawn(ROOT, args.package or [*PACKAGES], args.count, args.seed)
    if args.list:
        print("\n".join(f"{fault.line:4} {fault.key}" for fault in faults))
        return 0
    start, verdicts = time.perf_counter(), []
    slowness()  # measured once, before the tests start
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        first = copy_tree(Path(folder, "0"))
        tests = recorded(faults, first, args.workers, Path(folder, "recorded"))
        # with what Python has compiled in the first
        others = [Copy(Path(shutil.copytree(first.root, Path(folder, str(i))))) for i in range(1, args.workers)]
        for verdict in judge_all(faults, tests, [first, *others]):
            print(verdict, flush=True)
            verdicts.append(verdict)
            if args.record:
                args.record.write_text(json.dumps([each._asdict() for each in verdicts], indent=1))
    print(f"{summary(verdicts)}\n{(time.perf_counter() - start) / 60:.0f} minutes")
    return int(sum(verdict.detected for verdict in verdicts) < LEAST * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
