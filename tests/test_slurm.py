"""The SLURM job script: the command that it starts, the signals that it forwards, and when it requeues the job."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from environment import patient, python_path
from simulated import train_on
from warm import python

from dgc_training.config_files import REPOSITORY

Done = subprocess.CompletedProcess[str]
A = ["--configs", "a.py"]
SIGNALS = [signal.SIGUSR1, signal.SIGTERM]
CONTROL = """#!/bin/sh
case "$*" in
    "show hostnames "*) printf "%s\\n" $MACHINES ;;
    *) echo "$*" >>"$CALLS"; exit ${REFUSES:-0} ;;
esac
"""
# In place of srun and mpirun. Ends with status 3 by itself, with the status of a saved run after SIGUSR1, and with
# another one after SIGTERM. In Python, since bash may lose a signal that arrives between two commands.
RUN = f"""#!{sys.executable} -S
import os, signal, time

def ends(word, status):
    def handler(*_):
        with open(os.environ["CALLS"], "a") as calls:
            print(word, file=calls)
        time.sleep(0.3)
        os._exit(status)
    return handler

signal.signal(signal.SIGUSR1, ends("signal", int(os.environ.get("SAVED", 75))))
signal.signal(signal.SIGTERM, ends("terminated", 143))
print("started", flush=True)
for _ in range(int(os.environ.get("LONG", 6000))):
    time.sleep(0.1)
os._exit(3)
"""


def program(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


def job(tmp_path: Path, **variables: str) -> tuple[Path, dict[str, str]]:
    """A copy of the script, as SLURM creates it, and its environment: 2 machines with 4 ranks each."""
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "scontrol", CONTROL)
    copy = Path(shutil.copy(REPOSITORY / "scripts/slurm.sh", tmp_path / "job"))
    elastic = ["ELASTIC", "MAX_MACHINES", "MIN_MACHINES", "RENDEZVOUS", "RUN_ID"]
    ours = [*elastic, "HOSTS", "RANKS", "MPI_OPTIONS", "NETWORK", "INTERFACE", "REQUEUE", "DRY_RUN"]
    environment = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("SLURM_")}
    environment |= {
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": sys.prefix,
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_JOB_ID": "17",
        "SLURM_NTASKS": "8",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "MACHINES": "node3 node4",
        "CALLS": str(tmp_path / "calls"),
    }
    return copy, environment | variables


def dry_run(script: Path | str, environment: dict[str, str], *words: str, **more: Any) -> Done:
    command = ["bash", str(script), *words]
    return subprocess.run(command, env={**environment, "DRY_RUN": "1"}, capture_output=True, text=True, **more)


@contextmanager
def started(script: Path, environment: dict[str, str], *words: str) -> Iterator[subprocess.Popen[str]]:
    """The job in a separate session. At the end all processes of the session are killed."""
    how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen(["bash", str(script), *words], env=environment, **how) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    text = ""
    while words not in text:
        line = process.stdout.readline()
        assert line, f"ended before {words!r}:\n{text}"
        text += line
    return text


def send(process: subprocess.Popen[str], number: int) -> None:
    """Send a signal to the job while it waits for the run.

    A signal that reaches bash between its last look for signals and the system call of `wait` has no effect before
    a process ends or another signal comes.
    """
    stat = Path(f"/proc/{process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.01)
    process.send_signal(number)


def test_the_command(tmp_path: Path) -> None:
    copy, environment = job(tmp_path)
    for words in (A, ["scripts/imagenet/batch256.sh", "resnet50"], ["scripts/gossip/sgp.sh"]):
        done = dry_run(copy, environment, *words)
        assert "mpirun -np 8 -H node3:4\\,node4:4 " in done.stdout and done.returncode == 0, done.stderr
        wrong = dry_run(copy, {**environment, "SLURM_SUBMIT_DIR": str(tmp_path)}, *words)
        assert wrong.returncode == 2 and "repository's root" in wrong.stderr
    # sbatch scripts/gossip/sgp.sh: SLURM copies that file alone
    alone = shutil.copy(REPOSITORY / "scripts/gossip/sgp.sh", tmp_path / "slurm_script")
    done = dry_run(alone, environment, "--suffix", ".a")
    assert "mpirun -np 8 -H node3:4\\,node4:4 " in done.stdout, done.stderr
    assert "configs/gossip/sgp.py" in done.stdout and done.stdout.endswith("--suffix .a \n")
    environment["ELASTIC"] = "1"
    done = dry_run(copy, environment, *A)
    srun, torchrun = done.stdout.splitlines()
    assert srun.startswith("srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --no-kill "), done.stderr
    assert "--nproc-per-node 4 --max-restarts 10 --nnodes 1:2 " in torchrun
    assert "--rdzv-endpoint node3:20017 --rdzv-id 17 " in torchrun
    wrong = dry_run(copy, environment, "scripts/gossip/sgp.sh")
    assert wrong.returncode == 2 and "not a script" in wrong.stderr


def test_ranks_of_uneven_allocations(tmp_path: Path) -> None:
    copy, environment = job(tmp_path)
    machines = {"MACHINES": "a b c d", "SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS": "30"}
    uneven = "-np 30 -H a:8\\,b:8\\,c:7\\,d:7 "
    for variables, expected in (
        ({"SLURM_TASKS_PER_NODE": "8(x2),7(x2)"}, uneven),
        # here 8 is the most that a machine gets
        ({"SLURM_TASKS_PER_NODE": "8(x2),7(x2)", "SLURM_NTASKS_PER_NODE": "8"}, uneven),
        ({"SLURM_TASKS_PER_NODE": "9,7(x3)"}, "-np 30 -H a:9\\,b:7\\,c:7\\,d:7 "),
        ({"SLURM_TASKS_PER_NODE": "8(x4)", "SLURM_NTASKS": ""}, "-np 32 -H a:8\\,b:8\\,c:8\\,d:8 "),
        ({"SLURM_NTASKS": "8"}, "-np 8 -H a:2\\,b:2\\,c:2\\,d:2 "),
        ({"SLURM_NTASKS": ""}, "-np 4 -H a:1\\,b:1\\,c:1\\,d:1 "),
        ({"ELASTIC": "1", "SLURM_TASKS_PER_NODE": "8(x4)"}, "--nproc-per-node 8 "),
        ({}, "SLURM_NTASKS is 30, which is no multiple of the 4 machines: "),
        ({"SLURM_TASKS_PER_NODE": "8(x2),7"}, "SLURM_TASKS_PER_NODE is 8(x2),7, but there are 4 machines"),
        ({"SLURM_TASKS_PER_NODE": "8(y2),7"}, "SLURM_TASKS_PER_NODE is 8(y2),7; it must have the form 8(x2),7"),
        ({"ELASTIC": "1", "SLURM_TASKS_PER_NODE": "8(x2),7(x2)"}, "ELASTIC=1 needs as many tasks on each machine"),
    ):
        done = dry_run(copy, {**environment, **machines, **variables}, *A)
        refused = expected[0] != "-"
        assert done.returncode == (2 if refused else 0), (variables, done)
        assert expected in (done.stderr if refused else done.stdout), (variables, done)
        assert not (refused and done.stdout), variables


def test_a_dry_run_needs_no_slurm(tmp_path: Path) -> None:
    _, environment = job(tmp_path)
    outside = {k: v for k, v in environment.items() if not k.startswith("SLURM_")}
    scripts = REPOSITORY / "scripts"
    cases = [({}, "1 -H node1:1 "), ({"RANKS": "4"}, "4 -H node1:4 "), ({"HOSTS": "a:2,b:2"}, "4 -H a:2\\,b:2 ")]
    for script, words in (("slurm.sh", A), ("gossip/sgp.sh", ["--suffix", ".a"])):
        for variables, expected in cases:
            done = dry_run(scripts / script, {**outside, **variables, "LAUNCH": "slurm"}, *words, cwd=tmp_path)
            assert f"mpirun -np {expected}" in done.stdout and done.returncode == 0, done.stderr
            assert done.stdout.endswith(f"{words[-1]} \n") and "not a SLURM job" in done.stderr
    done = subprocess.run(["bash", scripts / "slurm.sh", *A], env=outside, capture_output=True, text=True)
    assert done.returncode == 2 and "submit it with sbatch" in done.stderr


def test_the_elastic_job_is_requeued(tmp_path: Path) -> None:
    """torchrun does not pass on the status of its ranks."""
    copy, environment = job(tmp_path, ELASTIC="1")
    program(tmp_path / "bin" / "srun", RUN)
    with started(copy, environment, *A) as process:
        read_until(process, "started")
        send(process, signal.SIGUSR1)
        text = process.communicate(timeout=patient(60))[0]
        assert process.returncode == 0, text
    assert Path(environment["CALLS"]).read_text().splitlines() == ["terminated", "requeue 17"]


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("variables", "status", "calls"),
    [
        ({}, 0, ["signal", "requeue 17"]),
        ({"REQUEUE": "scontrol -v again"}, 0, ["signal", "-v again 17"]),
        ({"REQUEUE": ""}, 75, ["signal"]),
        ({"REFUSES": "1"}, 75, ["signal", "requeue 17"]),
        ({"SAVED": "1"}, 1, ["signal"]),
        ({"SAVED": "0"}, 0, ["signal"]),
    ],
)
def test_requeue(tmp_path: Path, number: Any, variables: Any, status: Any, calls: Any) -> None:
    """SAVED: the exit status of the run after a signal. REFUSES: the exit status of scontrol."""
    copy, environment = job(tmp_path, **variables)
    program(tmp_path / "bin" / "mpirun", RUN)
    with started(copy, environment, *A) as process:
        read_until(process, "started")
        send(process, number)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)  # SLURM's signal at the time limit, which is not forwarded
        text = process.communicate(timeout=patient(60))[0]
        assert process.returncode == status, text
    assert Path(environment["CALLS"]).read_text().splitlines() == calls
    assert ("submit the job again" in text) == ("REFUSES" in variables)
    if not variables:  # without a signal the run's own status is that of the job
        Path(environment["CALLS"]).unlink()
        alone: Any = {"env": {**environment, "LONG": "2"}, "capture_output": True, "timeout": patient(60)}
        assert subprocess.run(["bash", copy, *A], **alone).returncode == 3
        assert not Path(environment["CALLS"]).exists()


@pytest.mark.proof
@pytest.mark.horovod
def test_a_real_run_is_saved_requeued_and_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy, environment = job(tmp_path, MACHINES="localhost", SLURM_NTASKS="2", SLURM_JOB_NUM_NODES="1")
    environment |= {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "PYTHONPATH": python_path()}
    (tmp_path / "bin" / "python").symlink_to(python())
    run = tmp_path / "run"
    words = ["--configs", "configs/digits/cnn.py", "--devices", "cpu", "--run-dir", str(run)]
    words += ["--configs.train.num_epochs=5", "--configs.train.checkpoint_every=5", "--configs.model.width=8"]
    with started(copy, environment, *words) as process:
        text = read_until(process, " 1/5 ")
        send(process, signal.SIGTERM)
        text += process.communicate(timeout=patient(60))[0]
        assert process.returncode == 0, text
    assert "Stopped by SIGUSR1: saved e000" in text and "slurm.sh: saved; scontrol requeue 17" in text
    assert Path(environment["CALLS"]).read_text() == "requeue 17\n"
    assert not (run / "summary.json").exists()

    # The requeued job runs the same command.
    train_on(2, words)
    assert "resumed from checkpoint e000" in capsys.readouterr().out and (run / "summary.json").exists()
