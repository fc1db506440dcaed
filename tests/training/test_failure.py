"""After an error on one rank its message is printed, and all ranks end; what a process of train.py imports."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from environment import REPOSITORY, patient, python_path
from failing_model import failing_model
from pytest import CaptureFixture
from simulated import CNN, train_on
from warm import python

from scripts.launch import torchrun

OPENMPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ENVIRONMENT = {**os.environ, **OPENMPI, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
BIN, TRAIN = Path(sys.executable).parent, REPOSITORY / "train.py"
MPIRUN = [str(BIN / "mpirun"), "--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-np", "2"]
HOROVOD, HOROVODRUN = pytest.mark.horovod, [str(BIN / "horovodrun"), "--gloo", "-np", "2"]
SECOND = () if find_spec("horovod") is None else pytest.mark.proof  # a launcher that also runs with Horovod
STARTS: Any = [(torchrun(2, [])[:-1], SECOND), (HOROVODRUN, HOROVOD), (MPIRUN, [HOROVOD, pytest.mark.proof])]
FLAGS = ["--configs.train.num_epochs", "2", "--configs.data.num_threads_per_worker", "1"]
STOPPED = """
import os, signal, sys, time
from dgc.comm import barrier
from dgc.comm.horovod import HorovodTransport
from dgc_training.faults.failure import ending_all_ranks
from dgc_training.faults.watchdog import WatchedTransport, watching
with ending_all_ranks():
    transport = WatchedTransport(HorovodTransport(timeout=float(sys.argv[1])))
    with watching(transport, float(sys.argv[1])):
        barrier(transport)
        time.sleep(2)
        if transport.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        barrier(transport)
"""
SHARDS = """
import os
from dgc_datasets import Digits
def make(path: str) -> Digits:
    open(path + os.environ["OMPI_COMM_WORLD_RANK"]).close()
    return Digits()
"""
# A rank that delays its message waits for the launcher to end it: on a busy machine that takes longer than usual.
LONG_DELAYS = f"""
import runpy
from dgc_training.faults import failure
from dgc_training.launcher import print_error
print_error.__defaults__, failure.SECONDARY_DELAY = (1000.0,), 1000.0
runpy.run_path({str(TRAIN)!r}, run_name="__main__")
"""
TELL = """
import atexit, gc, sys
SLOW = {"horovod", "matplotlib", "scipy", "sklearn", "sympy", "tensorboard", "torch._dynamo", "torchvision"}
def tell(when):
    print(when, gc.isenabled(), *sorted(SLOW & {*sys.modules}), flush=True)
tell("loading:")
atexit.register(tell, "ending:")
"""


def launch(command: Any, cwd: Path, timeout: int = 100, **variables: str) -> Any:
    options: Any = {"cwd": cwd, "env": ENVIRONMENT | variables, "timeout": patient(timeout)}
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)


def printed_by_a_rank(result: Any) -> str:
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("[rank "))
    return str(line)


STATUSES = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 138}
LATER = "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start(); "
LOCK = "lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64); "
# Statements inside the context manager, and the rank and size of the process.
BODIES = {
    "error": ("raise ValueError('no shard')", 2, 4),
    **{name: (f"raise {name}('not like this')", 0, 1) for name in ("UsageError", "ConfigError")},
    "full disk": ("open('/dev/full', 'w').write(100_000 * 'x')", 0, 1),
    "no rank 0": ("raise DistNetworkError('connection to server0 timed out')", 1, 2),
    "no rank 1": ("raise DistStoreError('Timed out after 61 seconds waiting for clients')", 0, 2),
    **{name: (f"os.kill(os.getpid(), signal.{name}); time.sleep(9)", 0, 1) for name in STATUSES},
    # A collective does not return for a signal, and neither does locking a mutex twice.
    "SIGTERM in a collective": (f"{LATER}{LOCK}lock(mutex); lock(mutex)", 0, 2),
    "no error": ("print('fine')", 0, 1),
    "terminated before its message": (f"failure.MESSAGE_DELAY = 100; {LATER}raise ValueError('late')", 1, 2),
}
# Each body runs in a fork of one process, because importing torch takes seconds. They run at the same time.
PROGRAM = """
import ctypes, json, os, signal, sys, threading, time
from torch.distributed import DistNetworkError, DistStoreError
from dgc_training.config import ConfigError
from dgc_training.faults import failure
from dgc_training.faults.failure import UsageError, ending_all_ranks
failure.SECONDARY_DELAY = 0.5
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
names = {}
for name, (body, rank, size) in json.loads(sys.argv[1]).items():
    if (child := os.fork()) == 0:
        for stream, descriptor in (("out", 1), ("err", 2)):
            os.dup2(os.open(f"{sys.argv[2]}/{name}.{stream}", os.O_WRONLY | os.O_CREAT), descriptor)
        os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"] = str(rank), str(size)
        with ending_all_ranks():
            exec(body)
        sys.stdout.flush()
        os._exit(0)
    names[child] = name
for _ in range(len(names)):
    child, status = os.wait()
    with open(f"{sys.argv[2]}/{names[child]}.status", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))
"""


def test_how_a_process_ends(tmp_path: Path) -> None:
    done = launch([python(), "-c", PROGRAM, json.dumps(BODIES), tmp_path], tmp_path)
    assert done.returncode == 0, done.stderr
    parts = ("status", "out", "err")
    ends = {name: [(tmp_path / f"{name}.{part}").read_text() for part in parts] for name in BODIES}
    assert {name for name, (_, _, errors) in ends.items() if "Traceback" in errors} == {"error"}
    assert ends["UsageError"] == ends["ConfigError"] == ["2", "", "not like this\n"]
    assert ends["no error"] == ["0", "fine\n", ""] and ends["terminated before its message"] == ["143", "", ""]
    for name, status, text in (
        ("error", 1, r"\[rank 2 of 4 on \S+\] ValueError: no shard\nTraceback(.|\n)*"),
        # after the exit status 2 `scripts.agent` does not restart
        ("full disk", 2, ".*No space left on device.*the same command resumes.*\n"),
        ("no rank 0", 1, ".* another rank exited .*the same command resumes.*connection to server0 timed out\n"),
        ("no rank 1", 1, ".* another rank exited .*the same command resumes.*waiting for clients\n"),
        *(
            (name, status, f"Stopped by {name.replace('SIGINT', 'Ctrl-C')}.*\n")
            for name, status in STATUSES.items()
        ),
        ("SIGTERM in a collective", 143, "Stopped by SIGTERM.*\n"),
    ):
        assert ends[name][0] == str(status) and re.fullmatch(text, ends[name][2]), ends[name]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("start", [pytest.param(start, marks=marks) for start, marks in STARTS])
def test_an_error_of_one_rank_in_step_3_ends_all_ranks(tmp_path: Path, start: list[str]) -> None:
    failing = failing_model(tmp_path, 3, "raise ValueError('broken shard')", rank=1)
    command = [*start, python(), TRAIN, "--configs", CNN, failing, *FLAGS]
    variables = {"PYTHONPATH": python_path(tmp_path), "PATH": f"{BIN}:{os.environ['PATH']}"}
    result = launch(command, tmp_path, 120, **variables)
    errors = [line for line in result.stderr.splitlines() if "[rank " in line]
    assert "[rank 1 of 2 on " in errors[0] and errors[0].endswith("] ValueError: broken shard")
    assert len(errors) == 1 and result.returncode != 0, "the other rank prints nothing"


@pytest.mark.timeout(150)
def test_the_same_command_resumes_after_sigterm(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    command = [python(), str(TRAIN), "--configs", CNN, *FLAGS, "--configs.train.batch_size", "256"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True) as process:
        # Resuming needs a checkpoint: here of epoch 1.
        while process.poll() is None and not list(tmp_path.glob("runs/*/checkpoints/latest.json")):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=patient(60))
    # 0 if the run finished before the signal.
    assert process.returncode in (75, 0) and "Traceback" not in errors
    assert process.returncode == 0 or "Stopped by SIGTERM: saved e0001" in output
    train_on(1, [*command[2:], "--run-dir", str(tmp_path / "runs" / "digits.cnn.np1")])
    assert "resumed from checkpoint e000" in capsys.readouterr().out
    assert (tmp_path / "runs/digits.cnn.np1/summary.json").exists()


@HOROVOD
@pytest.mark.proof
@pytest.mark.timeout(300)
def test_a_stuck_rank_is_reported_with_its_stack(tmp_path: Path) -> None:
    stuck, seconds = failing_model(tmp_path, 3, "time.sleep(1000)", rank=1), f"{patient(6)}"
    command = [*MPIRUN, sys.executable, TRAIN, "--configs", CNN, stuck, "--configs.train.timeout", seconds, *FLAGS]
    result = launch(command, tmp_path, 120, PYTHONPATH=python_path(tmp_path))
    assert result.returncode == 1 and "in fail_here" in result.stderr
    printed = printed_by_a_rank(result)
    assert printed.startswith("[rank 1 of 2 on ")
    assert "rank 1 did not join" in printed and "the others have waited" in printed


@HOROVOD
@pytest.mark.proof
@pytest.mark.timeout(300)
def test_a_stopped_rank_is_reported_by_another_one(tmp_path: Path) -> None:
    """None of its threads responds."""
    result = launch([*MPIRUN, python(), "-c", STOPPED, f"{patient(6)}"], tmp_path, 90)
    assert result.returncode != 0 and "Traceback" not in result.stderr
    printed = printed_by_a_rank(result)
    assert printed.startswith("[rank 0 of 2 on ") and "rank 1 does not respond at all" in printed


START = [*MPIRUN, python(), "-c"]


@HOROVOD
def test_an_error_of_the_command_line_is_printed_once(tmp_path: Path) -> None:
    result = launch([*START, LONG_DELAYS, "--configs", CNN, "--configs.train.num_epoch", "5"], tmp_path)
    assert result.returncode == 2 and list(tmp_path.iterdir()) == []
    assert result.stderr.count("num_epochs") == 1 and "Traceback" not in result.stderr


@HOROVOD
def test_a_file_that_one_rank_lacks_is_reported_by_it(tmp_path: Path) -> None:
    (tmp_path / "shards.py").write_text(SHARDS)
    (tmp_path / "shard0").touch()
    (tmp_path / "shards.yaml").write_text(f"dataset: {{_target_: shards.make, path: {tmp_path}/shard}}\n")
    words = [*START, LONG_DELAYS, "--configs", CNN, tmp_path / "shards.yaml", "--configs.model.num_classes", "10"]
    result = launch([*words, *FLAGS], tmp_path, PYTHONPATH=python_path(tmp_path))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    printed = printed_by_a_rank(result)
    assert printed.startswith("[rank 1 of 2 on ")
    assert "dataset (shards.make): FileNotFoundError" in printed and "shard1" in printed
    assert not (tmp_path / "runs").exists()


@pytest.mark.timeout(120)
def test_a_launcher_that_the_transport_does_not_understand_gives_one_error(tmp_path: Path) -> None:
    words = [python() if word == sys.executable else word for word in torchrun(2, [str(TRAIN)])]
    words += ["--configs", CNN, *FLAGS]
    result = launch([python(), BIN / words[0], *words[1:], "--configs.train.transport", "horovod"], tmp_path)
    assert result.returncode != 0 and list(tmp_path.iterdir()) == []
    said = [line for line in result.stderr.splitlines() if "WORLD_SIZE is 2, but Horovod sees 1 rank" in line]
    # by rank 0, and at the end of torchrun's report
    assert len(said) == 2 and said[1].startswith("  traceback : WORLD_SIZE is 2")
    # no other failure, unless torchrun has ended rank 1 by SIGTERM before that had read its config
    assert "<NO_OTHER_FAILURES>" in result.stderr or "exitcode  : -15" in result.stderr
    assert "horovodrun -np 2" in result.stderr and "exitcode  : 2" in result.stderr


def test_what_a_process_imports(tmp_path: Path) -> None:
    """Packages of a user come before packages of the repository."""
    program = "from dgc_models import DigitsCNN\nclass Mine(DigitsCNN): pass\n"
    for name in ("benchmarks", "configs", "datasets", "models", "scripts", "training"):
        (tmp_path / "path" / name).mkdir(parents=True)
        (tmp_path / "path" / name / "__init__.py").write_text("OWNER = 'user'\n")
        program += f"import {name}\nassert {name}.OWNER == 'user'\n"
    (tmp_path / "path" / "mine.py").write_text(program)
    (tmp_path / "mine.yaml").write_text("model: {_target_: mine.Mine, width: 4}\ndata: {num_workers: 1}\n")
    # and nothing slow is imported before it is needed, with no search for garbage meanwhile
    (tmp_path / "tell.py").write_text(TELL)
    words = ["--configs", CNN, "mine.yaml", "tell.py", *FLAGS, "--configs.train.batch_size", "700"]
    words += ["--devices", "cpu"]
    done = launch([sys.executable, TRAIN, *words], tmp_path, PYTHONPATH=str(tmp_path / "path"))
    # libraries complain at the end of a process that has frozen their objects
    assert done.returncode == 0 and "leaked" not in done.stderr, done.stderr
    assert "Mine(width=4" in done.stdout
    first, last = [line.split() for line in done.stdout.splitlines() if line.startswith(("loading:", "ending:"))]
    assert first == ["loading:", "False"] and last[:2] == ["ending:", "True"] and "tensorboard" in last
    assert not {"matplotlib", "scipy", "sklearn", "torchvision"} & {*last}
    # without torch the remedy is told: `-I -S` hides the packages of the environment
    program = f"import runpy, sys; sys.path.insert(0, '{REPOSITORY}'); runpy.run_path('{TRAIN}')"
    result = launch([sys.executable, "-I", "-S", "-c", program], tmp_path)
    assert result.stderr.startswith(f"train.py: {sys.executable} has no torch. Run ") and result.returncode == 2
    assert result.stderr.count("\n") == 1
    # a data worker imports train.py with the arguments of its rank, but is not started as train.py
    program = "import gc, sys; sys.argv = ['train.py']; "
    program += "import dgc_training.startup.installed; print(gc.isenabled())"
    assert launch([sys.executable, "-c", program], REPOSITORY).stdout == "True\n"
