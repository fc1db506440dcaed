"""Rounds of replica groups beside outer steps over torch.distributed, and a group that joins late.

    python -m benchmarks.groups [--hosts 2 --rate 1gbit] [--rounds 9]
    python -m benchmarks.groups --draw RECORD FILE.svg

Each rank trains a model of --layers layers of 1024 x 1024 with SGD, and has an exchange of DiLoCo in fp32 in every
H = --every steps:

alone         without an exchange: the most that any other one can reach
local steps   over torch.distributed and Gloo: nobody may be lost
groups        each rank is a group
groups+disk   each one also writes the state of the round before to its disk, during the window

They take turns in windows of H steps, each of which ends with its exchange. The time is that of the slowest rank.
`of alone` and `of local` are speeds compared within a turn, and `95 %` is a confidence interval of the latter.
`CPU` has the milliseconds that a rank uses of the processor, which other programs change less than the time.

Then the groups go on until round --join-after. The group of rank 0 leaves, and another one takes its place, with
other weights. It loads the state of another rank's group. Bytes and seconds are printed, and its first round.

--draw draws the RECORD of tests/proof/test_groups.py: losses of groups that are killed, stopped and cut off.
"""

import argparse
import ctypes
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks._harness import Table, in_turns, interval, middle, options, print_json, ratio, ratios, to_json
from benchmarks._laboratory import Laboratory, address
from benchmarks._launches import add_options, begin, connected, on_networks, run_ranks
from dgc.comm import Transport, all_gather_object, barrier
from dgc.comm.lockstep import LockstepWorld
from dgc.groups import Groups, connect
from dgc.groups.member import Outcome
from dgc.local import Nesterov, OuterSteps
from dgc.optim import LocalOptimizer
from dgc.units import human_bytes, plural
from tools.docs.pictures import Axis, Picture, draw_axes

TAKES = "3 min"
WIDTH = 1024
LATE = "a-late-group"
PORT = 29444
GRACE = 20.0  # seconds in which the late group loads the state and takes its first steps


class Worker:
    """A model and what trains it. groups: its connection. transport: of local steps. Neither: alone."""

    def __init__(
        self,
        settings: dict[str, Any],
        rank: int,
        groups: Groups | None = None,
        transport: Transport | None = None,
        seed: int = 0,
    ):
        torch.manual_seed(seed)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(settings["layers"])))
        self.every, self.groups = settings["every"], groups
        inner = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer: Any = inner
        if groups is not None or transport is not None:
            steps = OuterSteps(self.every, outer=Nesterov())
            ranks = transport or LockstepWorld(1).transports[0]
            named = self.model.named_parameters()
            self.optimizer = LocalOptimizer(inner, named, steps, transport=ranks, groups=groups)
        self._x = torch.randn(settings["batch"], WIDTH, generator=torch.Generator().manual_seed(rank))

    def window(self) -> None:
        """H steps, with the exchange at their end."""
        for _ in range(self.every):
            self.optimizer.zero_grad()
            self.model(self._x).square().mean().backward()
            self.optimizer.step()

    def short_window(self) -> None:
        """As `window`, without gradients."""
        for _ in range(self.every):
            self.optimizer.zero_grad()
            self.optimizer.step()

    @property
    def round(self) -> int:
        assert self.groups is not None
        return self.groups.tag.round


@contextmanager
def coordinator(rank: int, host: str, number: int, folder: str) -> Iterator[str]:
    """The address of a coordinator, which rank 0 starts."""
    at, words = f"{host}:{PORT + number}", [sys.executable, "-m", "dgc.groups", "serve", "--grace", str(GRACE)]
    words += ["--port", str(PORT + number), "--state", f"{folder}/decisions{number}.json"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL) if rank == 0 else None
    try:
        while process is not None:
            try:
                socket.create_connection((host, PORT + number), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield at
    finally:
        if process is not None:
            process.terminate()
            process.wait()


def connection(at: str, folder: str | None = None, name: str = "") -> Groups:
    return connect(at, folder=folder, name=name, log=lambda text: None)


def keep_memory() -> None:
    """Let memory that is freed stay with the process.

    The GNU C library gives it back if it is at the end of its heap. The method whose gradients are there would pay
    for new pages in every step, and the others not.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        set_option(-3, 2**25)  # M_MMAP_THRESHOLD


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a coordinator ends with its rank
    keep_memory()
    torch.set_num_threads(1)
    transport = connected("torchrun")
    rank = transport.rank
    with tempfile.TemporaryDirectory() as folder:
        serve = partial(coordinator, rank, settings["host"], folder=folder)
        with serve(0) as first, serve(1) as second:
            barrier(transport)
            workers = {
                "alone": Worker(settings, rank),
                "local steps": Worker(settings, rank, transport=transport),
                "groups": Worker(settings, rank, connection(first)),
                "groups+disk": Worker(settings, rank, connection(second, f"{folder}/{rank}")),
            }
            for worker in workers.values():
                worker.optimizer.zero_grad()  # groups join
            barrier(transport)
            works = {name: partial(timed, transport, own) for name, own in workers.items()}
            found = in_turns(works, settings["rounds"], settings["warmup"])
            own = workers["groups"]
            assert own.groups is not None and own.round == settings["rounds"] + settings["warmup"]
            longest = own.groups.longest
            workers["groups+disk"].optimizer.close()
            late = joined(own, settings, transport, first)
            if rank:
                own.optimizer.close()
            barrier(transport)
    numel = sum(p.numel() for p in own.model.parameters())
    return {"parameters": numel, "seconds": found, "longest": longest, "late": late}


def timed(transport: Transport, worker: Worker, number: int) -> tuple[float, float]:
    """Seconds of a window of the slowest rank, and seconds of the processor for a rank."""
    saves = worker.groups is not None and worker.groups.folder is not None
    if saves:
        worker.short_window()  # its state is saved during the window
    barrier(transport)
    start, busy = time.perf_counter(), time.process_time()
    worker.window()
    own = time.perf_counter() - start, time.process_time() - busy
    if saves:
        worker.groups.wait_for_disk()  # type: ignore[union-attr]  # not during the turn of another method
    seconds, processor = zip(*all_gather_object(transport, own), strict=True)
    return float(max(seconds)), sum(processor) / transport.size


def joined(own: Worker, settings: dict[str, Any], transport: Transport, at: str) -> dict[str, Any] | None:
    """Let another group take the place of rank 0's after some rounds. Returns what it has told, on rank 0."""
    assert own.groups is not None
    while own.round < settings["join_after"]:
        own.short_window()
    if transport.rank == 0:
        own.optimizer.close()
        words = [sys.executable, "-m", "benchmarks.groups", LATE, to_json({**settings, "address": at})]
        told = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
        return dict(json.loads(told))
    while not any(name.startswith(f"{LATE}-") for name in own.groups.members):
        own.short_window()
        time.sleep(0.05)  # alone it would only ask the coordinator
    return None


def join_late(settings: dict[str, Any]) -> None:
    """The late group: load the state, train in the next round, and tell how it went."""
    torch.set_num_threads(1)
    groups = connection(settings["address"], name=LATE)
    own = Worker(settings, 7, groups, seed=1)
    own.optimizer.zero_grad()
    at, start = own.round, time.perf_counter()
    own.window()
    assert groups.healed is not None and groups.outcomes[Outcome.COMMITTED] == 1, groups.outcomes
    nbytes, seconds = groups.healed
    told = {"healed": at, "bytes": nbytes, "seconds": seconds, "took_part": own.round}
    print_json({**told, "seconds_to_round": time.perf_counter() - start, "members": len(groups.members)})
    own.optimizer.close()


def by_turn(found: dict[str, tuple[float, float]], place: int) -> dict[int, float]:
    """One of the two numbers of `timed`. JSON has made texts of the turns."""
    return {int(number): of[place] for number, of in found.items()}


def measure_all(args: argparse.Namespace, ranks: int, laboratory: Laboratory | None) -> Any:
    host = "127.0.0.1" if laboratory is None else address(0)
    return run_ranks("benchmarks.groups", vars(args) | {"host": host}, ranks, laboratory, "torchrun")


def report(args: argparse.Namespace, ranks: int, found: dict[str, Any], network: dict[str, Any] | None) -> None:
    """Print a table and a line of JSON."""
    where = "this machine" if network is None else f"{network['hosts']} hosts, {network['rate']}"
    shape = f"{found['parameters']:,} parameters, H = {args.every}, batch {args.batch}"
    print(f"{ranks} ranks, 1 thread each, {where}, {shape}, {args.rounds} turns")
    columns = [("ms", "ms of H steps", "15.1f"), ("exchange", "exchange ms", "13.1f"), ("cpu", "CPU ms", "8.1f")]
    speeds = [("alone", "of alone", "10.3f"), ("local", "of local", "10.3f")]
    table = Table("method", 14, [*columns, *speeds, ("low", "95 %", "8.3f"), ("high", "", "7.3f")])
    times, busy = ({name: by_turn(of, i) for name, of in found["seconds"].items()} for i in (0, 1))
    for name, of in times.items():
        row = {
            "ms": 1e3 * middle(of),
            "cpu": 1e3 * middle(busy[name]),
            "alone": ratio(times["alone"], of),
            "local": ratio(times["local steps"], of),
        }
        extra = {number: 1e3 * (took - times["alone"][number]) for number, took in of.items()}
        limits = interval(ratios(times["local steps"], of)) if name != "local steps" else None
        low, high = limits or (None, None)
        table.add(name, {**row, "exchange": middle(extra), "low": low, "high": high})
    late = found["late"]
    print(
        f"a group joins with round {late['healed']}: {human_bytes(late['bytes'])} in {late['seconds']:.2f} s; it "
        f"takes part in round {late['took_part']}, {late['seconds_to_round']:.1f} s later"
    )
    own = {"ranks": ranks, "network": network, "parameters": found["parameters"], "every": args.every}
    print_json({"benchmark": "groups", **own, "methods": table.rows, "late": late})


def main() -> int:
    if sys.argv[1:2] == [LATE]:
        join_late(json.loads(sys.argv[2]))
        return 0
    parser = options("benchmarks.groups", __doc__, layers=10, every=20, batch=32, rounds=9, join_after=100)
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("RECORD", "FILE"))
    add_options(parser, steps=False)
    parser.set_defaults(ranks=[2], warmup=2)
    args = parser.parse_args()
    if args.draw is not None:
        draw(json.loads(args.draw[0].read_text()), args.draw[1])
        return 0
    args.draw = None
    return on_networks(args, measure_all, report)


COLOURS = ("blue", "green", "violet", "gray")  # of groups
MARKS = {"kill": "red", "stop": "orange", "cut": "base"}  # classes of pictures.Picture


def draw(record: dict[str, Any], file: Path) -> None:
    """Loss of each group over time, and below it when each one was killed, stopped or cut off."""
    groups, faults = record["groups"], record["faults"]
    points = {name: [(s / 60, loss) for s, loss, _ in of if s >= 0] for name, of in groups.items()}
    end = max(minutes for of in points.values() for minutes, _ in of)
    losses = [loss for of in points.values() for _, loss in of]
    decades = range(floor(log10(min(losses))), ceil(log10(max(losses))) + 1)
    counts = {kind: sum(fault["kind"] == kind for fault in faults) for kind in MARKS}
    text = " and ".join(", ".join(plural(number, kind) for kind, number in counts.items()).rsplit(", ", 1))
    picture = Picture(("Four groups of two ranks train on", f"through {text}"), "loss, mean of each 5 s", 0)
    step = next(step for step in (1, 2, 5, 10, 30, 60) if end / step <= 8)
    ticks = [(at, f"{at:g}") for at in range(0, int(end) + 1, step)]
    heights = [(10.0**power, f"{10.0**power:g}") for power in decades]
    y = Axis("loss", 10.0 ** decades[0], 10.0 ** decades[-1], heights, logarithmic=True)
    place = draw_axes(picture, Axis("minutes", 0.0, end, ticks), y, 62, 240)
    for of, colour in zip(points.values(), COLOURS, strict=False):
        for part in without_gaps(of, 2.5 * record["bin"] / 60):
            picture.line([place(*point) for point in part], colour)
    bottom = picture.height
    for row, (name, colour) in enumerate(zip(groups, COLOURS, strict=False)):
        at = bottom + 20 * row
        picture.text(54, at + 9, f"group {name}", f"note {colour}", "end")
        for fault in (fault for fault in faults if str(fault["group"]) == name):
            left = place(fault["begin"] / 60, y.low)[0]
            right = place(min(end, (fault["begin"] + fault["seconds"]) / 60), y.low)[0]
            picture.bar(left, at, max(2.0, right - left), MARKS[fault["kind"]], 12)
    at = bottom + 20 * len(groups) + 14
    for number, (kind, mark) in enumerate(MARKS.items()):
        picture.bar(62 + 130 * number, at - 10, 18, mark, 12)
        picture.text(86 + 130 * number, at, {"kill": "killed", "stop": "stopped", "cut": "cut off"}[kind], "note")
    picture.height = at + 20
    file.write_text(picture.svg())


def without_gaps(points: Sequence[tuple[float, float]], gap: float) -> list[list[tuple[float, float]]]:
    """The points in parts, between which there is nothing for some minutes."""
    parts: list[list[tuple[float, float]]] = []
    for point in points:
        if not parts or point[0] - parts[-1][-1][0] > gap:
            parts.append([])
        parts[-1].append(point)
    return parts


if __name__ == "__main__":
    begin(work, main)
