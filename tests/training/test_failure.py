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
    program = f"from training.failure import *\nfrom training.config import ConfigError\nimport os\n{body}"
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


@pytest.mark.parametrize("error", ["Refused", "ConfigError"])
def test_a_refusal_has_no_traceback(error):
    result = run_block(f"with ending_all_ranks():\n    raise {error}('not like this')")
    assert result.returncode == 2 and result.stderr == "not like this\n"


@pytest.mark.parametrize(
    ("signum", "status", "name"), [("SIGINT", 130, "Ctrl-C"), ("SIGTERM", 143, "SIGTERM")]
)
def test_signals_end_cleanly(signum, status, name):
    body = f"os.kill(os.getpid(), signal.{signum})\n    time.sleep(9)"
    result = run_block(f"import signal, time\nwith ending_all_ranks():\n    {body}")
    assert result.returncode == status
    assert "Traceback" not in result.stderr and f"Stopped by {name}" in result.stderr


def test_nothing_happens_where_nothing_fails():
    result = run_block("with ending_all_ranks():\n    print('fine')")
    assert (result.returncode, result.stdout, result.stderr) == (0, "fine\n", "")


FAILING_MODEL = """
import os
from models import DigitsCNN

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
        _, errors = process.communicate(timeout=60)
    # 0 if the run was quicker than the signal.
    assert process.returncode in (143, 0) and "Traceback" not in errors
    result = launch(command, tmp_path)
    assert result.returncode == 0 and "resumed from checkpoint e000" in result.stdout
    assert (tmp_path / "runs/digits.cnn.np1/summary.json").exists()
