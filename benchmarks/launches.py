"""Runs the ranks of a benchmark, on this machine or on the hosts of a laboratory, and returns their result."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.netlab import Laboratory, LaboratoryError
from benchmarks.netlab.ranks import measure, start
from benchmarks.results import to_json
from scripts.launch import environment, mpirun, torchrun, usable_cores

KEEP_TO_ONE_CORE = "keep-to-one-core"


def run_ranks(
    module: str,
    settings: Mapping[str, Any],
    ranks: int,
    laboratory: Laboratory | None = None,
    launcher: str = "mpirun",
) -> Any:
    """Run `python -m MODULE SETTINGS RESULT` on each rank, two files in JSON, and return what rank 0 has written.

    Args:
        module: It reads its settings and, on rank 0, writes its result: see `settings_of` and `write_result`.
        settings: Can be written as JSON.
        ranks: Number of ranks; with a laboratory a multiple of its hosts.
        laboratory: The hosts. None: this machine.
        launcher: "mpirun" or "torchrun".

    Raises:
        SystemExit: A rank failed. It has printed why.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        given, result = Path(folder, "settings.json"), Path(folder, "result.json")
        given.write_text(to_json(dict(settings)))
        words = ["-m", module, str(given), str(result)]
        if laboratory is not None:
            status = start(laboratory, ranks, words, launcher)
        else:
            cores = usable_cores()
            words += [KEEP_TO_ONE_CORE] * (ranks > cores)
            command = mpirun(ranks, cores, words) if launcher == "mpirun" else torchrun(ranks, words)
            variables = environment(ranks, cores, os.geteuid() == 0, os.environ)
            status = subprocess.run(command, env=variables, check=False).returncode
        if status:
            raise SystemExit(f"{module}: the ranks ended with status {status}")
        return json.loads(result.read_text())


def settings_of_rank() -> dict[str, Any]:
    """What `run_ranks` was given. With more ranks than cores on one machine, keeps this rank to one core.

    Otherwise some cores would have more ranks than others: threads that poll for messages count for the scheduler.
    """
    if KEEP_TO_ONE_CORE in sys.argv[3:]:
        cores = sorted(os.sched_getaffinity(0))
        rank = next(int(os.environ[name]) for name in ("OMPI_COMM_WORLD_RANK", "RANK") if name in os.environ)
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    return settings


def write_result(result: Any) -> None:
    """Let `run_ranks` return this. Rank 0 calls it."""
    Path(sys.argv[2]).write_text(to_json(result))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `on_networks`, and those of how often a step is measured."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[4], help="on this machine, without --hosts")
    parser.add_argument("--hosts", type=int, nargs="+", help="of a laboratory: see docs/netlab.md")
    parser.add_argument("--rate", nargs="+", default=["1gbit"], help="of each host in each direction")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=5, help="steps before the measured ones")
    parser.add_argument("--repeats", type=int, default=15, help="measured steps")
    parser.add_argument("--together", type=int, default=64, help="methods of one launch; each keeps its own model")


def on_networks(
    args: argparse.Namespace,
    run: Callable[[int, Laboratory | None], Any],
    report: Callable[[int, Any, dict[str, Any] | None], None],
) -> int:
    """Measure on this machine, or on each laboratory that the options name, and report. Returns an exit status.

    Args:
        args: With the options of `add_options`.
        run: Given the number of ranks and the laboratory, starts the ranks and returns a result.
        report: Given the number of ranks, the result, and what is known of the laboratory's network.
    """
    if min(args.repeats, args.together, args.ranks_per_host, *args.ranks) < 1 or args.warmup < 0:
        raise SystemExit("--repeats, --together and all numbers of ranks must be at least 1, --warmup at least 0")
    if args.hosts is None:
        for ranks in args.ranks:
            report(ranks, run(ranks, None), None)
        return 0
    for hosts in args.hosts:
        for rate in args.rate:
            ranks = hosts * args.ranks_per_host
            try:
                with Laboratory(hosts, rate) as laboratory:
                    link = measure(laboratory)
                    found = run(ranks, laboratory)
            except (LaboratoryError, ValueError) as error:
                print(error, file=sys.stderr)
                return 2
            network = {"hosts": hosts, "rate": rate, "bits_per_second": link.bits_per_second}
            report(ranks, found, {**network, "round_trip": link.round_trip})
            sys.stdout.flush()
    return 0


def portions(names: Sequence[str], together: int, alone: Sequence[str] = ()) -> list[list[str]]:
    """The names of each launch: at most `together` of them; those in `alone` in launches of their own."""
    others = [name for name in names if name not in alone]
    found = [others[i : i + together] for i in range(0, len(others), together)]
    own = [name for name in names if name in alone]
    return found + [own[i : i + together] for i in range(0, len(own), together)]
