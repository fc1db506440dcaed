"""Ranks of this machine: commands under a launcher, and groups of ranks that run functions of the tests."""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache, wraps
from inspect import Parameter, Signature, signature
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import warm
from environment import REPOSITORY, patient, python_path
from parallel.processes import descendants, free_port, run_together, send

from scripts.launch import prepare
from scripts.launch import torchrun as torchrun_command

Commands = list[list[str]]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
HORIZON = 5.0  # seconds of a quiet machine in which the other ranks tell why they failed too


class Launcher:
    """Starts programs on several ranks: commands that run at the same time, of the words after `python`."""

    def __init__(self, commands: Callable[..., Commands]) -> None:
        self._commands, self.__name__ = commands, commands.__name__

    def commands(self, ranks: int, words: list[str], *more: str) -> Commands:
        """They start forks in place of `python` (see `warm`)."""
        commands = self._commands(ranks, words, *more)
        return [[warm.python() if word == sys.executable else word for word in command] for command in commands]

    def __call__(self, ranks: int, words: list[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """The end of a program. Its output is the output of all commands, one after the other."""
        ends = run_together(self.commands(ranks, words), REPOSITORY, environment(ranks), timeout)
        status = next((end.returncode for end in ends if end.returncode), 0)
        outputs = ("".join(end.stdout for end in ends), "".join(end.stderr for end in ends))
        return subprocess.CompletedProcess(ends[0].args, status, *outputs)


def environment(ranks: int) -> Mapping[str, str]:
    own = prepare(ranks, [])[1] if ranks > 1 else os.environ
    paths = python_path(REPOSITORY / "tests", *filter(None, [own.get("PYTHONPATH")]))
    # PYTHONFAULTHANDLER: prints the stacks of all threads at SIGABRT
    return {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"}


@Launcher
def mpirun(ranks: int, words: list[str]) -> Commands:
    """Where Horovod is not installed: torchrun."""
    return [prepare(ranks, words)[0]]


@Launcher
def horovodrun(ranks: int, words: list[str], hosts: str = "") -> Commands:
    """Horovod's own launcher with the Gloo controller: no MPI anywhere."""
    program = [sys.executable, str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", str(ranks)]
    return [[*program, *hosts.split(), sys.executable, *words]]


@Launcher
def two_gloo_machines(ranks: int, words: list[str]) -> Commands:
    return horovodrun.commands(ranks, words, f"-H localhost:{ranks // 2},127.0.0.1:{ranks // 2}")


@Launcher
def torchrun(ranks: int, words: list[str]) -> Commands:
    """torch.distributed's launcher: neither Horovod nor MPI."""
    return [[*TORCHRUN, *torchrun_command(ranks, words)[1:]]]


@cache
def _agent() -> str:
    """A program in place of ssh: HOST COMMAND, each host with a temporary folder of its own."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    agent = Path(folder, "agent")
    agent.write_text('#!/bin/sh\nmkdir -p "$0.$1"; export TMPDIR="$0.$1"; shift; exec sh -c "$*"\n')
    agent.chmod(0o755)
    return str(agent)


@Launcher
def two_machines(ranks: int, words: list[str]) -> Commands:
    """mpirun with two daemons on this machine, which count as two machines with half of the ranks each."""
    (command,) = mpirun.commands(ranks, words)
    options = f"-H machine0:{ranks // 2},machine1:{ranks // 2} --mca plm_rsh_agent {_agent()} --mca pml ob1"
    options += " --mca btl tcp,self --mca btl_tcp_if_include lo"
    this = command.index("-H")  # the machines take the place of localhost
    return [[command[0], *options.split(), *command[1:this], *command[this + 2 :]]]


@Launcher
def two_agents(ranks: int, words: list[str]) -> Commands:
    """torchrun with two agents on this machine, which count as two machines with half of the ranks each."""
    address = f"--master-addr 127.0.0.1 --master-port {free_port()}"
    options = f"--no-python --nnodes 2 --nproc-per-node {ranks // 2} {address} --node-rank"
    return [[*TORCHRUN, *options.split(), str(agent), sys.executable, *words] for agent in range(2)]


@Launcher
def alone(ranks: int, words: list[str]) -> Commands:
    return [[sys.executable, *words]]


def over(launch: Launcher, size: int, *marks: pytest.MarkDecorator) -> Any:
    """A parameter of the fixture `group`: tests over as many ranks of one launcher share them."""
    if launch in (mpirun, horovodrun, two_machines, two_gloo_machines):
        marks += (pytest.mark.horovod,)
    return pytest.param((launch, size), id=f"{launch.__name__}-{size}", marks=marks)


def each_rank_of(*groups: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator of a test `body(transport, ...)`: every rank of each group runs it, and returns the same.

    groups: What `over` returns. options: Of `Group.run`. The further arguments of body are given by pytest.
    """

    def decorated(body: Callable[..., Any]) -> Any:
        _, *given = signature(body).parameters.values()

        @wraps(body)
        def test(group: Group, **values: Any) -> None:
            found = group.run(test, *(values[argument.name] for argument in given), **options)
            assert found == [found[0]] * group.size, found

        changed: Any = test
        changed.__signature__ = Signature([Parameter("group", Parameter.POSITIONAL_OR_KEYWORD), *given])
        return pytest.mark.parametrize("group", groups, indirect=True)(test)

    return decorated


class Group:
    """Ranks that run one function after another. One that fails or is late ends all: the next starts others."""

    def __init__(self, launch: Launcher, size: int) -> None:
        self.launch, self.size = launch, size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[Connection] = []

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        within: float = 100,
        last: bool = False,
        **options: Any,
    ) -> list[Any]:
        """What the function, or the body of a test of `each_rank_of`, returns on each rank for a new transport.

        within: Its time limit in seconds of a quiet machine. last: The ranks end after it, each for itself.
        options: Of `dgc.comm.connect.connect`. An AssertionError has the tracebacks of all ranks and their output.
        """
        if not self._ranks:
            self._start()
        replies: dict[int, tuple[bool, Any]] = {}
        for connection in self._ranks:
            connection.send((function, arguments, options, last))
        end = time.monotonic() + patient(within)
        while len(replies) < self.size and time.monotonic() < end:
            missing = [rank for rank in range(self.size) if rank not in replies]
            ready = wait([self._ranks[rank] for rank in missing], end - time.monotonic())
            for rank in (rank for rank in missing if self._ranks[rank] in ready):
                try:
                    replies[rank] = self._ranks[rank].recv()
                except (EOFError, ConnectionError):
                    replies[rank] = (False, "ended")
                if not replies[rank][0]:
                    end = min(end, time.monotonic() + patient(HORIZON))
        found = [replies.get(rank, (False, "no answer in time")) for rank in range(self.size)]
        if all(succeeded for succeeded, _ in found):
            if last:
                self._wait()
            return [result for _, result in found]
        output = self.kill(abort=len(replies) < self.size)
        told = [f"--- rank {rank}: {error}" for rank, (succeeded, error) in enumerate(found) if not succeeded]
        raise AssertionError("\n".join([f"{function.__name__} failed", *told, "--- output", output]))

    def end(self) -> None:
        if self._ranks:
            for rank in self._ranks:
                rank.send(None)
            self._wait()

    def kill(self, abort: bool = False) -> str:
        """Kill the processes, and return their output: with the stacks of the ranks, if they are aborted."""
        for number in [signal.SIGABRT, signal.SIGKILL] if abort else [signal.SIGKILL]:
            for process in self._processes:
                for pid in [*descendants(process.pid), process.pid]:
                    send(pid, number)
            if number == signal.SIGABRT:
                time.sleep(patient(1))
        for process in self._processes:
            process.wait()
        return self._clean_up()

    def _start(self) -> None:
        self._folder, server = Path(tempfile.mkdtemp()), str(Path(__file__).with_name("server.py"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address := str(self._folder / "socket"))
            listener.listen(self.size)
            listener.settimeout(patient(1))
            with open(self._folder / "output", "wb") as file:
                options: Any = {"cwd": REPOSITORY, "env": environment(self.size), "stdout": file, "stderr": file}
                for command in self.launch.commands(self.size, [server, address]):
                    self._processes.append(subprocess.Popen(command, **options))
            end = time.monotonic() + patient(60)
            found: dict[int, Connection] = {}
            while len(found) < self.size:
                try:
                    rank = Connection(listener.accept()[0].detach())
                except TimeoutError:
                    ended = any(process.poll() is not None for process in self._processes)
                    assert time.monotonic() < end and not ended, self.kill(abort=True)
                else:
                    found[rank.recv()] = rank
        self._ranks = [found[rank] for rank in range(self.size)]

    def _wait(self) -> None:
        try:
            status = [process.wait(patient(60)) for process in self._processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the ranks do not end:\n{self.kill(abort=True)}") from None
        output = self._clean_up()
        assert not any(status), output

    def _clean_up(self) -> str:
        for rank in self._ranks:
            rank.close()
        self._ranks, self._processes = [], []
        output = (self._folder / "output").read_text(errors="replace")
        shutil.rmtree(self._folder)
        return output[-12000:]


_groups: list[Group] = []  # the one that runs, since ranks that wait take time too


def running_group(launch: Launcher, size: int) -> Group:
    if not _groups or (_groups[0].launch, _groups[0].size) != (launch, size):
        end_groups()
        _groups.append(Group(launch, size))
    return _groups[0]


def end_groups() -> None:
    while _groups:
        _groups.pop().end()
