"""Starts ranks on the hosts of a laboratory, under mpirun or torchrun, and measures its links."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.netlab.laboratory import INTERFACE, NETWORK, Laboratory, LaboratoryError, address
from scripts.launch import environment, usable_cores

PORT = 29500
LAUNCHERS = ("mpirun", "torchrun")
PATIENCE = 60.0  # seconds that a link may take to answer
UNMEASURED = "the link from host 0 to host 1 could not be measured: "
CAUSE = (
    "Frames probably do not pass the bridge, for example by the rules of a container or of a security program, or "
    "the machine is too busy to answer"
)


@dataclass
class Link:
    """What the link between two hosts reaches.

    Attributes:
        bits_per_second: Of one TCP connection, without headers.
        round_trip: Seconds until one byte has come back, at best.
    """

    bits_per_second: float
    round_trip: float


def measure(laboratory: Laboratory, seconds: float = 0.5) -> Link:
    """Measure the link from host 0 to host 1, for about `seconds` at the rate that is set.

    Raises:
        LaboratoryError: Nothing arrives.
    """
    program = str(Path(__file__).with_name("throughput.py"))
    nbytes = max(1 << 18, int(laboratory.bits_per_second / 8 * seconds))
    receiver = subprocess.Popen(laboratory.inside(1, [sys.executable, program, "receive", str(PORT)]))
    try:
        words = [sys.executable, program, "send", address(1), str(PORT), str(nbytes)]
        done = laboratory.run(words, timeout=PATIENCE + 20 * seconds)
        if done.returncode:
            reason = (done.stderr.strip() or "no reason is known").splitlines()[-1]
            raise LaboratoryError(f"{UNMEASURED}{reason}\n{CAUSE}")
        receiver.wait(10)
    except subprocess.TimeoutExpired as expired:
        raise LaboratoryError(f"{UNMEASURED}no answer in {expired.timeout:.0f} s\n{CAUSE}") from None
    finally:
        receiver.kill()
        receiver.wait()
    found = json.loads(done.stdout)
    return Link(found["bits_per_second"], found["round_trip"])


def ranks_per_host(ranks: int, hosts: int) -> int:
    """Raise ValueError unless all hosts have the same number of ranks."""
    each, rest = divmod(ranks, hosts)
    if rest or ranks < 1:
        raise ValueError(f"the number of ranks must be a multiple of the {hosts} hosts, not {ranks}")
    return each


def start(
    laboratory: Laboratory,
    ranks: int,
    words: Sequence[str],
    launcher: str = "mpirun",
    inherited: Mapping[str, str] = os.environ,
) -> int:
    """Run a Python script on all hosts, and wait for its end. Its output goes where that of this process goes.

    Args:
        laboratory: The hosts.
        ranks: Number of ranks, a multiple of the number of hosts. Host 0 has the first ones.
        words: The script and its arguments, as in `python SCRIPT ARGUMENT...`.
        launcher: "mpirun": mpirun on host 0 starts the others. "torchrun": an agent on each host.
        inherited: The environment.

    Returns:
        The exit status: that of mpirun, or the first agent's that is not 0.
    """
    each = ranks_per_host(ranks, laboratory.hosts)
    variables = environment(ranks, usable_cores(), os.geteuid() == 0, inherited)
    if launcher == "mpirun":
        return _mpirun(laboratory, each, words, variables)
    if launcher == "torchrun":
        return _torchrun(laboratory, each, words, variables)
    raise ValueError(f"the launcher must be one of {', '.join(LAUNCHERS)}, not {launcher!r}")


def _mpirun(laboratory: Laboratory, each: int, words: Sequence[str], variables: Mapping[str, str]) -> int:
    with tempfile.TemporaryDirectory(prefix="netlab-") as folder:
        # Open MPI starts its daemons by `AGENT HOST COMMAND`, as if by ssh
        agent = Path(folder, "agent")
        cases = [
            f'{address(host)}) exec {shlex.join(laboratory.inside(host, ["sh", "-c"]))} "$*";;'
            for host in range(laboratory.hosts)
        ]
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
    agents = [
        subprocess.Popen(
            laboratory.inside(host, ["torchrun", *options, "--node-rank", str(host), sys.executable, *words]),
            env=environment,
        )
        for host in range(laboratory.hosts)
    ]
    try:
        return next(filter(None, [agent.wait() for agent in agents]), 0)
    finally:
        for agent in agents:
            agent.kill()
