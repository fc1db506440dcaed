"""One rank fails: its message on top, and all ranks end with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(REPOSITORY),
}
BIN = Path(sys.executable).parent
MPIRUN = [str(BIN / "mpirun"), "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
FLAGS = ["--configs.train.num_epochs", "2", "--configs.data.num_threads_per_worker", "1"]


def launch(command, cwd, timeout=100):
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_block(body, **environment):
    head = "from dgc_training.faults.failure import *\nfrom dgc_training.config import ConfigError\nimport os\n"
    program = head + body
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_block_names_rank_host_and_error():
    result = run_block(
        "with ending_all_ranks():\n    raise ValueError('no shard')",
        OMPI_COMM_WORLD_RANK="2",
        OMPI_COMM_WORLD_SIZE="4",
    )
    first, second, *_ = result.stderr.splitlines()
    assert first.startswith("[rank 2 of 4 on ") and first.endswith("] ValueError: no shard")
    assert second.startswith("Traceback") and result.returncode == 1


@pytest.mark.parametrize("error", ["UsageError", "ConfigError"])
def test_a_refusal_has_no_traceback(error):
    result = run_block(f"with ending_all_ranks():\n    raise {error}('not like this')")
    assert result.returncode == 2 and result.stderr == "not like this\n"


@pytest.mark.parametrize(
    ("signum", "status", "name"),
    [("SIGINT", 130, "Ctrl-C"), ("SIGTERM", 143, "SIGTERM"), ("SIGUSR1", 138, "SIGUSR1")],
)
def test_signals_end_cleanly(signum, status, name):
    body = f"os.kill(os.getpid(), signal.{signum})\n    time.sleep(9)"
    # a shell's background jobs begin with SIGINT ignored
    begin = "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    result = run_block(f"{begin}\nwith ending_all_ranks():\n    {body}")
    assert result.returncode == status
    assert "Traceback" not in result.stderr and f"Stopped by {name}" in result.stderr


def test_nothing_happens_where_nothing_fails():
    result = run_block("with ending_all_ranks():\n    print('fine')")
    assert (result.returncode, result.stdout, result.stderr) == (0, "fine\n", "")


FAILING_MODEL = """
import os
from dgc_models import DigitsCNN

RANK = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK"))

class Failing(DigitsCNN):
    calls = 0

    def forward(self, images):
        Failing.calls += 1
        if Failing.calls == 3 and RANK == "1":
            raise ValueError("broken shard")
        return super().forward(images)
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_a_rank_that_raises_in_step_3_ends_all(tmp_path, monkeypatch, launcher):
    (tmp_path / "failing.py").write_text(FAILING_MODEL)
    (tmp_path / "broken.yaml").write_text("model: {_target_: failing.Failing}\n")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{REPOSITORY}:{tmp_path}")
    start = [*MPIRUN, "-np", "3"] if launcher == "mpirun" else [BIN / "horovodrun", "--gloo", "-np", "3"]
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{BIN}:{os.environ['PATH']}")
    configs = ["--configs", "configs/digits/cnn.py", tmp_path / "broken.yaml"]
    started = time.monotonic()
    result = launch(
        [*start, sys.executable, REPOSITORY / "train.py", *configs, *FLAGS], tmp_path, timeout=150
    )
    assert time.monotonic() - started < 120
    assert result.returncode != 0
    errors = [line for line in result.stderr.splitlines() if "[rank " in line]
    assert "[rank 1 of 3 on " in errors[0] and errors[0].endswith("] ValueError: broken shard")
    # Nobody else tells a story of its own.
    assert len(errors) == 1


def test_errors_of_the_command_line_are_told_once(tmp_path):
    command = [
        *MPIRUN,
        "-np",
        "2",
        sys.executable,
        REPOSITORY / "train.py",
        "--configs",
        "configs/digits/cnn.py",
    ]
    result = launch([*command, "--configs.train.num_epoch", "5"], tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("num_epochs") == 1 and "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(150)
def test_sigterm_ends_a_run_and_the_same_command_goes_on(tmp_path):
    command = [sys.executable, REPOSITORY / "train.py", "--configs", "configs/digits/cnn.py", *FLAGS]
    command = [str(word) for word in [*command, "--configs.train.batch_size", "256"]]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True
    ) as process:
        # Resuming needs a checkpoint: that of epoch 1.
        while process.poll() is None and not list(tmp_path.glob("runs/*/checkpoints/latest.json")):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    # 0 if the run was quicker than the signal.
    assert process.returncode in (75, 0) and "Traceback" not in errors
    assert process.returncode == 0 or "Stopped by SIGTERM: saved e0001" in output
    result = launch(command, tmp_path)
    assert result.returncode == 0 and "resumed from checkpoint e000" in result.stdout
    assert (tmp_path / "runs/digits.cnn.np1/summary.json").exists()


def test_a_rank_that_is_told_to_end_while_it_holds_its_message_back_is_quiet():
    body = "    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()\n    raise ValueError('late')"
    result = run_block(
        f"import signal, threading\nwith ending_all_ranks():\n{body}",
        OMPI_COMM_WORLD_RANK="1",
        OMPI_COMM_WORLD_SIZE="2",
    )
    assert result.returncode == 143 and result.stderr == ""


STUCK_MODEL = """
import os, time
from dgc_models import DigitsCNN

class Stuck(DigitsCNN):
    calls = 0

    def forward(self, images):
        Stuck.calls += 1
        if Stuck.calls == 3 and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            self.read_a_shard_that_never_comes()
        return super().forward(images)

    def read_a_shard_that_never_comes(self):
        time.sleep(1000)
"""


@pytest.mark.timeout(150)
def test_a_rank_that_is_stuck_is_named_and_where(tmp_path, monkeypatch):
    (tmp_path / "stuck.py").write_text(STUCK_MODEL)
    (tmp_path / "stuck.yaml").write_text("model: {_target_: stuck.Stuck}\n")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{REPOSITORY}:{tmp_path}")
    configs = ["--configs", "configs/digits/cnn.py", tmp_path / "stuck.yaml", "--configs.train.timeout", "10"]
    result = launch(
        [*MPIRUN, "-np", "2", sys.executable, REPOSITORY / "train.py", *configs, *FLAGS], tmp_path, timeout=120
    )
    assert result.returncode == 1
    told = [line for line in result.stderr.splitlines() if line.startswith("[rank ")]
    assert len(told) == 1 and told[0].startswith("[rank 1 of 2 on ")
    assert "rank 1 did not join" in told[0] and "the others have waited" in told[0]
    assert "in read_a_shard_that_never_comes" in result.stderr


@pytest.mark.timeout(150)
def test_a_stopped_process_is_named(tmp_path):
    """A rank none of whose threads answers."""
    program = """
import os, signal, time
from dgc.comm import barrier
from dgc.comm.horovod import HorovodTransport
from dgc_training.faults.failure import ending_all_ranks
from dgc_training.faults.watchdog import WatchedTransport, watching

with ending_all_ranks():
    transport = WatchedTransport(HorovodTransport(timeout=6))
    with watching(transport, 6):
        barrier(transport)
        time.sleep(2)
        if transport.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        barrier(transport)
"""
    started = time.monotonic()
    result = launch([*MPIRUN, "-np", "2", sys.executable, "-c", program], tmp_path, timeout=100)
    assert result.returncode != 0 and time.monotonic() - started < 90
    told = [line for line in result.stderr.splitlines() if line.startswith("[rank ")]
    assert told[0].startswith("[rank 0 of 2 on ") and "rank 1 does not respond at all" in told[0]
    assert len(told) == 1 and "Traceback" not in result.stderr


def test_a_missing_shard_on_one_rank_ends_all_with_its_message(tmp_path, monkeypatch):
    (tmp_path / "shards.py").write_text("""
import os
from dgc_datasets import Digits

def make(path: str) -> Digits:
    open(path + os.environ["OMPI_COMM_WORLD_RANK"]).close()
    return Digits()
""")
    (tmp_path / "shard0").touch()
    (tmp_path / "shards.yaml").write_text(f"dataset: {{_target_: shards.make, path: {tmp_path}/shard}}\n")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{REPOSITORY}:{tmp_path}")
    words = ["--configs", "configs/digits/cnn.py", tmp_path / "shards.yaml", "--configs.model.num_classes", "10"]
    result = launch([*MPIRUN, "-np", "2", sys.executable, REPOSITORY / "train.py", *words, *FLAGS], tmp_path)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    told = [line for line in result.stderr.splitlines() if line.startswith("[rank ")]
    assert len(told) == 1 and told[0].startswith("[rank 1 of 2 on ")
    assert "dataset (shards.make): FileNotFoundError" in told[0] and "shard1" in told[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.timeout(120)
def test_torchrun_is_refused_with_one_message(tmp_path):
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", REPOSITORY / "train.py"]
    result = launch([*words, "--configs", "configs/digits/cnn.py", *FLAGS], tmp_path)
    assert result.returncode != 0 and list(tmp_path.iterdir()) == []
    assert result.stderr.count("WORLD_SIZE is 2, but Horovod sees 1 rank") == 1
    assert "horovodrun -np 2" in result.stderr and "exitcode  : 2" in result.stderr


def test_a_python_without_torch_is_told_what_to_do(tmp_path):
    """`-I -S`: without the environment's packages, as the system's Python is."""
    program = f"import runpy, sys; sys.path.insert(0, '{REPOSITORY}'); runpy.run_path('{REPOSITORY}/train.py')"
    result = launch([sys.executable, "-I", "-S", "-c", program], tmp_path)
    assert result.stderr.startswith(f"train.py: {sys.executable} has no torch. Run ") and result.returncode == 2
    assert result.stderr.count("\n") == 1


USERS = """
import benchmarks, configs, datasets, models, scripts, training
from dgc_models import DigitsCNN

for module in (benchmarks, configs, datasets, models, scripts, training):
    assert module.OWNER == "user", module

class Mine(DigitsCNN):
    pass
"""


def test_packages_of_a_user_win_over_the_repositorys(tmp_path):
    """In a run, and in the processes that load its data."""
    for name in ("benchmarks", "configs", "datasets", "models", "scripts", "training"):
        (tmp_path / "path" / name).mkdir(parents=True)
        (tmp_path / "path" / name / "__init__.py").write_text("OWNER = 'user'\n")
    (tmp_path / "path" / "mine.py").write_text(USERS)
    (tmp_path / "mine.yaml").write_text("model: {_target_: mine.Mine, width: 4}\ndata: {num_workers: 1}\n")
    words = ["--configs", "configs/digits/cnn.py", "mine.yaml", *FLAGS, "--configs.train.batch_size", "700"]
    result = subprocess.run(
        [sys.executable, str(REPOSITORY / "train.py"), *words],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path / "path")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0 and "Mine(width=4" in result.stdout, result.stderr
