"""What a process of train.py imports, and when it searches for garbage."""

import os
import subprocess
import sys
from pathlib import Path

from environment import REPOSITORY, patient, python_path
from simulated import CNN

CONFIG = """
import atexit, gc, sys

SLOW = {"horovod", "matplotlib", "scipy", "sklearn", "sympy", "tensorboard", "torch._dynamo", "torchvision"}

def tell(when):
    print(when, gc.isenabled(), *sorted(SLOW & {*sys.modules}), flush=True)

tell("loading:")
atexit.register(tell, "ending:")
"""


def test_a_run_imports_what_it_uses(tmp_path: Path) -> None:
    """Nothing slow before it is needed, and no search for garbage meanwhile."""
    (tmp_path / "tell.py").write_text(CONFIG)
    words = ["--configs", CNN, str(tmp_path / "tell.py"), "--run-dir", str(tmp_path / "run"), "--devices", "cpu"]
    words += [f"--configs.{key}=1" for key in ("train.num_epochs", "model.width")]
    words += ["--configs.train.batch_size=500"]
    done = subprocess.run(
        [sys.executable, REPOSITORY / "train.py", *words],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=patient(100),
    )
    # libraries complain at the end of a process that has frozen their objects
    assert done.returncode == 0 and "leaked" not in done.stderr, done.stderr
    first, last = [line.split() for line in done.stdout.splitlines() if line.startswith(("loading:", "ending:"))]
    assert first == ["loading:", "False"]
    assert last[:2] == ["ending:", "True"] and "tensorboard" in last
    assert not {"matplotlib", "scipy", "sklearn", "torchvision"} & {*last}


def test_a_data_worker_prints_no_first_line_and_collects() -> None:
    """It imports train.py with the arguments of its rank, but is not started as train.py."""
    program = (
        "import gc, sys; sys.argv = ['train.py']; import dgc_training.startup.installed; print(gc.isenabled())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"
