"""A python that starts in a tenth of a second: each is a fork of one process that has imported torch and dgc.

    from warm import python      the path of an executable that takes the place of sys.executable

It takes `-u`, `-W`, `-m`, `-c` or a script. It passes its environment, folder, files and signals on to the fork,
and ends as the fork does. Tests of imports, of the start of an interpreter, and of what a process finds out about
its parent start sys.executable itself.
"""

import atexit
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGABRT, signal.SIGUSR1)


@cache
def python() -> str:
    """The executable. The process that forks ends with this one, and removes the folder."""
    from environment import REPOSITORY, python_path

    folder = tempfile.mkdtemp()
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), "PYTHONFAULTHANDLER": "1"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, __file__, f"{folder}/socket"]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=variables, **pipes)
    atexit.register(process.communicate)
    executable = Path(folder, "python")
    executable.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} {folder}/socket "$@"\n')
    executable.chmod(0o755)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return str(executable)


def stand_for_a_fork(address: str, words: list[str]) -> int:
    """The exit status of what another process forks. If a signal ends that, the same one ends this process."""
    message = json.dumps([dict(os.environ), os.getcwd(), words]).encode()
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(address)
        socket.send_fds(own, [len(message).to_bytes(4, "big")], [0, 1, 2])
        own.sendall(message)

        def forward(number: int, _: object) -> None:
            with suppress(OSError):  # the fork has ended, and its status is on the way
                own.sendall(bytes([number]))

        for number in FORWARDED:
            signal.signal(number, forward)
        status = own.recv(2, socket.MSG_WAITALL)
        if len(status) == 2 and status[1]:
            if status[1] in FORWARDED:
                signal.signal(status[1], signal.SIG_DFL)
            os.kill(os.getpid(), status[1])
        return status[0] if status else 1


def serve(address: str) -> list[str]:
    """Returns in each fork, whose parent passes on signals and its status, with its words. In the end: none."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the parents are not waited for
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        own = listener.accept()[0]
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return fork(own)
        own.close()
    return []


def fork(own: socket.socket) -> list[str]:
    """The words, in the fork. Its parent does not return."""
    size, files, _, _ = socket.recv_fds(own, 4, 3)
    message = own.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    if pid := os.fork():
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2, *files):  # nobody waits for the end of its pipes
            os.dup2(null, number)
        ended = os.pidfd_open(pid)
        while ended not in select.select([own, ended], [], [])[0]:
            received = own.recv(1)  # a signal, or the end of what stands for the fork
            os.kill(pid, received[0] if received else signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):  # what stands for it has been killed at the same time
            own.sendall(bytes([max(status, 0), max(-status, 0)]))
        os._exit(0)
    own.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    variables, directory, words = json.loads(message)
    before = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [path for path in sys.path[1:] if path not in before]
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    found: list[str] = words
    return found


def run(words: list[str]) -> None:
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    while words[0] in ("-u", "-W"):
        if words.pop(0) == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        else:
            sys.warnoptions.append(words.pop(0))
            warnings._processoptions(sys.warnoptions[-1:])  # type: ignore[attr-defined]
    kind = words.pop(0) if words[0] in ("-c", "-m") else ""
    what, sys.argv = words[0], words
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(what, None)
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[0] = "-c"
        sys.path.insert(0, "")
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), module.__dict__)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(what)))
        runpy.run_path(what, run_name="__main__")


def run_and_end(words: list[str]) -> NoReturn:
    """As python does, except that nothing is deleted: that takes a second, for all that has been imported."""
    try:
        run(words)
        status: Any = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if (mpi := sys.modules.get("mpi4py.MPI")) and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[2:]:
        sys.exit(stand_for_a_fork(sys.argv[1], sys.argv[2:]))
    import gc

    gc.disable()  # searching for garbage takes a third of the time of imports
    used = "sklearn.datasets torch._dynamo torch.distributed.checkpoint.state_dict torch.distributed.fsdp "
    used += "torch.distributed.run torch.nn.parallel torch.utils.tensorboard dgc.comm.connect dgc.compression "
    for name in f"{used} dgc.ddp dgc.gossip dgc.optim dgc_models train".split():
        import_module(name)
    with suppress(ImportError):  # a torch whose FSDP2 it does not work with
        import_module("dgc.fsdp")
    if find_spec("horovod"):
        import_module("horovod.torch")

    gc.freeze()
    gc.enable()
    if words := serve(sys.argv[1]):
        run_and_end(words)
    shutil.rmtree(Path(sys.argv[1]).parent)
    os._exit(0)
