"""Starts small runs on several ranks, ends them by signals, and compares their last checkpoints."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from environment import patient
from parallel.processes import children, send
from states import assert_equal

from dgc_training.checkpoint.reading import read_tensors
from scripts.launch import prepare
from scripts.launch import torchrun as torchrun_command

REPOSITORY = Path(__file__).parents[2]
# method: the config files stacked on the experiment, and further words
METHODS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "dgc": (("configs/dgc/wm5.py", "configs/dgc/fp16.py"), ()),
    "powersgd": (("configs/powersgd/rank2.py",), ()),
    "qsgd": (("configs/quant/qsgd.py",), ()),
    "2bit": (("configs/threshold/2bit.py",), ()),
    "onebit": (("configs/quant/onebit.py",), ()),
    "osgp": (("configs/gossip/osgp.py",), ("--configs.train.check_replicas_every=0",)),
    "diloco": (
        ("configs/local/diloco.py",),
        ("--configs.train.check_replicas_every=0", "--configs.train.local.average_every=7"),
    ),
}
WORDS = [
    "--devices",
    "cpu",
    "--configs.train.num_epochs=4",
    "--configs.train.batch_size=32",
    "--configs.train.num_batches_per_step=2",
    "--configs.train.warmup_lr_epochs=1",
    "--configs.train.checkpoint_every=3",
    "--configs.train.check_replicas_every=5",
    f"--configs.train.timeout={patient(120)}",
    "--configs.data.num_threads_per_worker=1",
    "--configs.model.width=8",
]
LAST = "e0004"


class Run:
    """`train.py` in a separate directory and session, under mpirun or torchrun."""

    def __init__(self, directory: Path, ranks: int = 2, method: str = "dgc", torchrun: bool = False) -> None:
        files, words = METHODS[method]
        stack = ["--configs", "configs/digits/cnn.py", *files]
        script = [str(REPOSITORY / "train.py"), *stack, *WORDS, *words, "--run-dir", str(directory / "run")]
        command, environment = prepare(ranks, script)
        if torchrun:
            command = torchrun_command(ranks, script)
        environment = {**environment, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        directory.mkdir(parents=True, exist_ok=True)
        self.ranks_wanted = ranks
        self.output = directory / "output"
        with open(self.output, "w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def ranks(self) -> list[int]:
        """Process ids of the running ranks, in order of their start."""
        return children(self.process.pid)

    def wait_for_training(self, timeout: float = 120) -> None:
        """Returns when the training loop begins or the run has ended."""
        limit = time.monotonic() + patient(timeout)
        while self.process.poll() is None and " steps per epoch" not in self.text():
            assert time.monotonic() < limit, self.text()[-3000:]
            time.sleep(0.02)

    def end(self, timeout: float = 120) -> int:
        """Waits for the launcher and all ranks. Returns the launcher's exit status."""
        pids = self.ranks()
        status = self.process.wait(patient(timeout))
        limit = time.monotonic() + patient(10)
        for pid in pids:
            while _is_running(pid):
                # Ranks may outlive a killed launcher. A batch system would end them.
                if time.monotonic() > limit:
                    send(pid, signal.SIGKILL)
                time.sleep(0.02)
        return status


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def finish(directory: Path, ranks: int = 2, method: str = "dgc", torchrun: bool = False) -> None:
    """Starts or resumes the run of the directory, and waits for its end."""
    run = Run(directory, ranks, method, torchrun)
    assert run.end(300) == 0, run.text()[-3000:]
    assert "Traceback" not in run.text()


def latest(directory: Path) -> str | None:
    path = directory / "run" / "checkpoints" / "latest.json"
    return json.loads(path.read_text())["checkpoint"] if path.exists() else None


def assert_same_end(directory: Path, reference: Path, ranks: int = 2) -> None:
    """Compares the last checkpoints of two finished runs bit for bit. Times are not compared."""
    assert (directory / "run" / "summary.json").exists()
    for file in ("shared.pt", *(f"rank{rank}.pt" for rank in range(ranks))):
        ends = [read_tensors(side / "run" / "checkpoints" / LAST / file) for side in (directory, reference)]
        for end in ends:
            end.pop("csv", None)
        assert_equal(ends[0], ends[1], file)


if __name__ == "__main__":
    finish(Path(sys.argv[1]))
