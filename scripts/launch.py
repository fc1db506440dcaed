"""Starts several ranks on this machine: under Open MPI, or under torchrun if Horovod is not installed.

    python -m scripts.launch 4 train.py --configs configs/digits/cnn.py

replaces `mpirun -np 4 python train.py ...` or `torchrun --nproc-per-node 4 train.py ...`, and adds the settings
for one machine: programs and python of the environment, threads that share the cores, idle ranks that yield if
there are more ranks than cores, and the two variables that Open MPI requires to run as root (as in a container).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


def usable_cores() -> int:
    """Number of cores that this process may use: the share of a container or batch job, not the machine's."""
    return len(os.sched_getaffinity(0))


def environment(ranks: int, cores: int, root: bool, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the ranks. Values that the user has set are kept.

    Args:
        ranks: number of processes that share the machine.
        cores: number of cores that they may use.
        root: whether they run as root.
        inherited: the initial variables, usually `os.environ`.
    """
    env = dict(inherited)
    # The path is not resolved, since the python of an environment is a symbolic link.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    if ranks > cores:
        # Open MPI would do so only for more ranks than slots
        env.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if root:
        for name in ROOT_VARIABLES:
            env.setdefault(name, "1")
    return env


def mpirun(ranks: int, cores: int, words: Sequence[str]) -> list[str]:
    """The command: `mpirun` with its options, this interpreter, and `words` (a script and its arguments)."""
    # By default Open MPI binds each rank to one core, so that all threads of a rank would share it.
    # By default it also has one slot for each physical core, which can be fewer than `cores`.
    options = ["-H", f"localhost:{ranks}", "--bind-to", "none"]
    if ranks > cores:
        options += ["--oversubscribe"]
    return ["mpirun", "-np", str(ranks), *options, sys.executable, *words]


def torchrun(ranks: int, words: Sequence[str]) -> list[str]:
    """The command: torchrun with its options, this interpreter, and `words` (a script and its arguments)."""
    # --standalone: on a free port, so that several runs on one machine do not meet
    options = ["--standalone", "--nproc-per-node", str(ranks), "--no-python"]
    return ["torchrun", *options, sys.executable, *words]


def prepare(ranks: int, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command and the environment to start `words` on `ranks` ranks of this machine."""
    if ranks < 1:
        raise ValueError(f"the number of ranks must be at least 1, not {ranks}")
    cores = usable_cores()
    command = torchrun(ranks, words) if find_spec("horovod") is None else mpirun(ranks, cores, words)
    return command, environment(ranks, cores, os.geteuid() == 0, os.environ)


def replace_process(ranks: int, words: Sequence[str]) -> None:
    """Replaces this process by the launcher, which then gets all signals. Never returns."""
    argv, env = prepare(ranks, words)
    if shutil.which(argv[0], path=env["PATH"]) is None:
        raise SystemExit(f"launch: {argv[0]} not found; `make setup` installs it")
    os.execvpe(argv[0], argv, env)


def main(words: Sequence[str]) -> None:
    """Starts the ranks that the words of the command line ask for."""
    if len(words) < 2 or not re.fullmatch(r"[1-9][0-9]{0,5}", words[0]):
        raise SystemExit("usage: python -m scripts.launch RANKS SCRIPT [ARGUMENT...], with RANKS from 1 to 999999")
    replace_process(int(words[0]), words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
