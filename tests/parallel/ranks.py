"""Starts tests/parallel/worker.py on several ranks and collects what each rank found."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environment import REPOSITORY, python_path
from parallel.processes import free_port, run_together

from scripts.launch import prepare
from scripts.launch import torchrun as torchrun_command

HERE = Path(__file__).parent


def mpirun(ranks: int, words: list[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Where Horovod is not installed: torchrun."""
    command, environment = prepare(ranks, words)
    return _run(command, environment, timeout)


def horovodrun(ranks: int, words: list[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Horovod's own launcher with the Gloo controller: no MPI anywhere."""
    _, environment = prepare(ranks, words)
    launcher = str(Path(sys.executable).parent / "horovodrun")
    return _run([launcher, "--gloo", "-np", str(ranks), sys.executable, *words], environment, timeout)


def torchrun(ranks: int, words: list[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """torch.distributed's launcher: neither Horovod nor MPI."""
    _, environment = prepare(ranks, words)
    return _run(torchrun_command(ranks, words), environment, timeout)


def two_machines(ranks: int, words: list[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """mpirun with two daemons on this machine, which count as two machines with half of the ranks each."""
    command, environment = prepare(ranks, words)
    with tempfile.TemporaryDirectory() as folder:
        # in place of ssh: HOST COMMAND, each host with a temporary folder of its own
        agent = Path(folder, "agent")
        agent.write_text('#!/bin/sh\nmkdir -p "$0.$1"; export TMPDIR="$0.$1"; shift; exec sh -c "$*"\n')
        agent.chmod(0o755)
        options = f"-H machine0:{ranks // 2},machine1:{ranks // 2} --mca plm_rsh_agent {agent} --mca pml ob1"
        options += " --mca btl tcp,self --mca btl_tcp_if_include lo"
        this = command.index("-H")  # the machines take the place of localhost
        return _run([command[0], *options.split(), *command[1:this], *command[this + 2 :]], environment, timeout)


def two_gloo_machines(ranks: int, words: list[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """horovodrun with the Gloo controller and two names of this machine."""
    _, environment = prepare(ranks, words)
    launcher = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", str(ranks)]
    hosts = f"localhost:{ranks // 2},127.0.0.1:{ranks // 2}"
    return _run([*launcher, "-H", hosts, sys.executable, *words], environment, timeout)


def two_agents(ranks: int, words: list[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """torchrun with two agents on this machine, which count as two machines with half of the ranks each.

    The output is that of both, one after the other.
    """
    address = f"--master-addr 127.0.0.1 --master-port {free_port()}"
    options = f"--nnodes 2 --nproc-per-node {ranks // 2} {address} --node-rank"
    launcher = [sys.executable, "-m", "torch.distributed.run", *options.split()]
    first, second = _run_together([[*launcher, str(agent), *words] for agent in range(2)], os.environ, timeout)
    return subprocess.CompletedProcess(
        first.args,
        first.returncode or second.returncode,
        first.stdout + second.stdout,
        first.stderr + second.stderr,
    )


def alone(ranks: int, words: list[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """One process, no launcher."""
    assert ranks == 1
    return _run([sys.executable, *words], os.environ, timeout)


def _run(command: list[str], environment: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    return _run_together([command], environment, timeout)[0]


def _run_together(
    commands: list[list[str]], environment: Mapping[str, str], timeout: float
) -> list[subprocess.CompletedProcess[str]]:
    paths = python_path(REPOSITORY / "tests", *filter(None, [environment.get("PYTHONPATH")]))
    changes = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return run_together(commands, REPOSITORY, {**environment, **changes}, timeout)


def findings(
    ranks: int, directory: Path, *scenarios: str, launch: Any = mpirun, worker: str = "worker.py"
) -> list[dict[str, Any]]:
    """What each rank's scenarios returned, by rank. One launch runs them all."""
    directory.mkdir(parents=True, exist_ok=True)
    done = launch(ranks, [str(HERE / worker), str(directory), *scenarios])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-9000:]
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(ranks)]
