"""Starts the ranks of a benchmark, on this machine or on the hosts of a laboratory, and returns their result."""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._harness import to_json
from benchmarks._laboratory import INTERFACE, NETWORK, Laboratory, LaboratoryError, address
from dgc.comm import Transport
from scripts.launch import environment, mpirun, torchrun, usable_cores

AS_RANK, KEEP_TO_ONE_CORE = "as-a-rank", "keep-to-one-core"
PORT = 29500
PATIENCE = 60.0  # seconds that a link may take to answer
UNMEASURED = """the link from host 0 to host 1 could not be measured: {}
Frames probably do not pass the bridge, for example by the rules of a container or of a security program, or the \
machine is too busy to answer"""


def begin(work: Callable[[dict[str, Any]], Any], main: Callable[[], int | None]) -> None:
    """Run a module of a benchmark: `main`, or on a rank that `run_ranks` has started `work`, given the settings.

    With more ranks than cores on one machine, a rank keeps to one core. Otherwise some cores would have more ranks
    than others: threads that poll for messages count for the scheduler.
    """
    if sys.argv[1:2] != [AS_RANK]:
        sys.exit(main())
    given, written, *more = sys.argv[2:]
    rank = next(int(os.environ[name]) for name in ("OMPI_COMM_WORLD_RANK", "RANK") if name in os.environ)
    if KEEP_TO_ONE_CORE in more:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    result = work(json.loads(Path(given).read_text()))
    if rank == 0:
        Path(written).write_text(to_json(result))


def connected(launcher: str, horovods_own: bool = False) -> Transport:
    """The transport of a rank: Horovod under mpirun, torch.distributed under torchrun."""
    if launcher == "torchrun":
        from dgc.comm import torch_distributed

        return torch_distributed.connect(point_to_point=True)
    if horovods_own:
        # before Horovod is loaded by the transport, which has other defaults
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(128 * 2**20))
        os.environ.setdefault("HOROVOD_CYCLE_TIME", "1")
        warnings.filterwarnings("ignore", "Horovod's fusion is on")
    from dgc.comm import horovod

    return horovod.connect(point_to_point=True)


def run_ranks(
    module: str,
    settings: Mapping[str, Any],
    ranks: int,
    laboratory: Laboratory | None = None,
    launcher: str = "mpirun",
) -> Any:
    """Run a module that ends with `begin` on each rank, and return what the `work` of rank 0 has returned.

    Without a laboratory the ranks run on this machine. Raises SystemExit if one has failed, and printed why.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        given, result = Path(folder, "settings.json"), Path(folder, "result.json")
        given.write_text(to_json(dict(settings)))
        words = ["-m", module, AS_RANK, str(given), str(result)]
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


def run_methods(
    module: str,
    args: argparse.Namespace,
    ranks: int,
    laboratory: Laboratory | None,
    launches: Sequence[tuple[str, Sequence[str]]],
) -> dict[str, Any]:
    """The results of several launches together, each of (launcher, methods), with the rows of all methods."""
    result, rows = dict[str, Any](), dict[str, Any]()
    for launcher, names in launches:
        print(f"... {launcher}, {ranks} ranks: {', '.join(names)}", file=sys.stderr, flush=True)
        settings = vars(args) | {"methods": names, "launcher": launcher}
        result = run_ranks(module, settings, ranks, laboratory, launcher)
        rows |= result["methods"]
    return {**result, "methods": rows}


def add_options(parser: argparse.ArgumentParser, steps: bool = True) -> None:
    """Add the options of `on_networks`, and with `steps` the options for how often a step is measured."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[4], help="on this machine, without --hosts")
    parser.add_argument("--hosts", type=int, nargs="+", help="of a laboratory: see docs/netlab.md")
    parser.add_argument("--rate", nargs="+", default=["1gbit"], help="of each host in each direction")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.set_defaults(warmup=5, repeats=15, together=64)
    if steps:
        parser.add_argument("--warmup", type=int, help="steps before the measured ones")
        parser.add_argument("--repeats", type=int, help="measured steps")
        parser.add_argument("--together", type=int, help="methods of one launch; each keeps its own model")


def on_networks(
    args: argparse.Namespace,
    run: Callable[[argparse.Namespace, int, Laboratory | None], Any],
    report: Callable[[argparse.Namespace, int, Any, dict[str, Any] | None], None],
) -> int:
    """Measure on this machine, or on each laboratory that the options name, and report. Returns an exit status."""
    if min(args.repeats, args.together, args.ranks_per_host, *args.ranks) < 1 or args.warmup < 0:
        raise SystemExit("--repeats, --together and all numbers of ranks must be at least 1, --warmup at least 0")
    if args.hosts is None:
        for ranks in args.ranks:
            report(args, ranks, run(args, ranks, None), None)
        return 0
    for hosts, rate in product(args.hosts, args.rate):
        ranks = hosts * args.ranks_per_host
        try:
            with Laboratory(hosts, rate) as laboratory:
                link = measure(laboratory)
                found = run(args, ranks, laboratory)
        except (LaboratoryError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
        report(args, ranks, found, {"hosts": hosts, "rate": rate, **link._asdict()})
        sys.stdout.flush()
    return 0


def portions(names: Sequence[str], together: int, alone: Sequence[str] = ()) -> list[list[str]]:
    """The names of each launch: at most `together` of them; those in `alone` in launches of their own."""
    groups = [name for name in names if name not in alone], [name for name in names if name in alone]
    return [of[i : i + together] for of in groups for i in range(0, len(of), together)]


class Link(NamedTuple):
    """What a link reaches: rate of one TCP connection, and seconds until one byte has come back, at best."""

    bits_per_second: float
    round_trip: float

    def __str__(self) -> str:
        mbit, trip = self.bits_per_second / 1e6, self.round_trip * 1e6
        return f"one TCP connection reaches {mbit:.0f} Mbit/s, a round trip takes {trip:.0f} us"


def measure(laboratory: Laboratory, seconds: float = 0.5) -> Link:
    """Measure the link from host 0 to host 1, for about `seconds`. Raises LaboratoryError if nothing arrives."""
    # isolated: this folder has modules with names of Python's own library
    program = [sys.executable, "-I", str(Path(__file__).with_name("_throughput.py"))]
    nbytes = max(1 << 18, int(laboratory.bits_per_second / 8 * seconds))
    receiver = subprocess.Popen(laboratory.inside(1, [*program, "receive", str(PORT)]))
    try:
        words = [*program, "send", address(1), str(PORT), str(nbytes)]
        done = laboratory.run(words, timeout=PATIENCE + 20 * seconds)
        if done.returncode:
            reason = (done.stderr.strip() or "no reason is known").splitlines()[-1]
            raise LaboratoryError(UNMEASURED.format(reason))
        receiver.wait(10)
    except subprocess.TimeoutExpired as expired:
        raise LaboratoryError(UNMEASURED.format(f"no answer in {expired.timeout:.0f} s")) from None
    finally:
        receiver.kill()
        receiver.wait()
    found = json.loads(done.stdout)
    return Link(found["bits_per_second"], found["round_trip"])


def ranks_per_host(ranks: int, hosts: int) -> int:
    """Raise ValueError unless all hosts have the same number of ranks."""
    if hosts < 1:
        raise ValueError(f"the number of hosts must be at least 1, not {hosts}")
    each, rest = divmod(ranks, hosts)
    if rest or ranks < 1:
        raise ValueError(f"the number of ranks must be a multiple of the {hosts} hosts, not {ranks}")
    return each


def start(laboratory: Laboratory, ranks: int, words: Sequence[str], launcher: str = "mpirun") -> int:
    """Run a Python script with its arguments on all hosts. Returns the exit status. Host 0 has the first ranks."""
    each = ranks_per_host(ranks, laboratory.hosts)
    variables = environment(ranks, usable_cores(), os.geteuid() == 0, os.environ)
    return LAUNCHERS[launcher](laboratory, each, words, variables)


def _mpirun(laboratory: Laboratory, each: int, words: Sequence[str], variables: Mapping[str, str]) -> int:
    with tempfile.TemporaryDirectory(prefix="netlab-") as folder:
        # Open MPI starts its daemons by `AGENT HOST COMMAND`, as if by ssh
        agent = Path(folder, "agent")
        shells = (shlex.join(laboratory.inside(host, ["sh", "-c"])) for host in range(laboratory.hosts))
        cases = [f'{address(host)}) exec {shell} "$*";;' for host, shell in enumerate(shells)]
        agent.write_text("\n".join(["#!/bin/sh", "host=$1; shift", 'case "$host" in', *cases, "esac", ""]))
        agent.chmod(0o755)
        hosts = ",".join(f"{address(host)}:{each}" for host in range(laboratory.hosts))
        options = ["-np", str(each * laboratory.hosts), "-H", hosts, "--bind-to", "none", "--oversubscribe"]
        parameters = {
            "plm_rsh_agent": str(agent),
            "pml": "ob1",
            "btl": "tcp,self,vader" if each > 1 else "tcp,self",
            "btl_tcp_if_include": NETWORK,
            "oob_tcp_if_include": NETWORK,
            "mpi_yield_when_idle": "1",
            # Open MPI's own choice takes up to twice as long over TCP: see the comment in the file
            "coll_tuned_use_dynamic_rules": "1",
            "coll_tuned_dynamic_rules_filename": str(Path(__file__).with_name("allreduce.rules")),
        }
        for name, value in parameters.items():
            options += ["--mca", name, value]
        command = laboratory.inside(0, ["mpirun", *options, sys.executable, *words])
        return subprocess.run(command, env=dict(variables), check=False).returncode


def _torchrun(laboratory: Laboratory, each: int, words: Sequence[str], variables: Mapping[str, str]) -> int:
    environment = {**variables, "GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
    options = ["--nnodes", str(laboratory.hosts), "--nproc-per-node", str(each)]
    options += ["--master-addr", address(0), "--master-port", str(PORT), "--no-python"]
    agents = []
    for host in range(laboratory.hosts):
        command = ["torchrun", *options, "--node-rank", str(host), sys.executable, *words]
        agents.append(subprocess.Popen(laboratory.inside(host, command), env=environment))
    try:
        return next(filter(None, [agent.wait() for agent in agents]), 0)
    finally:
        for agent in agents:
            agent.kill()


LAUNCHERS = {"mpirun": _mpirun, "torchrun": _torchrun}
