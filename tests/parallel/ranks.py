"""Starts tests/parallel/worker.py on several ranks and collects what each rank found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.launch import prepare
from scripts.launch import torchrun as torchrun_command

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


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


def alone(ranks: int, words: list[str], timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """One process, no launcher."""
    assert ranks == 1
    return _run([sys.executable, *words], dict(os.environ), timeout)


def _run(command: list[str], environment: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    environment = {**environment, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(REPOSITORY), str(REPOSITORY / "tests"), environment.get("PYTHONPATH", "")]
    )
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def findings(ranks: int, directory: Path, *scenarios: str, launch: Any = mpirun) -> list[dict[str, Any]]:
    """What each rank's scenarios returned, by rank. One launch runs them all."""
    directory.mkdir(parents=True, exist_ok=True)
    done = launch(ranks, [str(HERE / "worker.py"), str(directory), *scenarios])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(ranks)]
