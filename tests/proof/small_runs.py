"""Starts small runs on several ranks, ends them by signals, and compares their last checkpoints."""

import signal
import time
from pathlib import Path

from environment import REPOSITORY, patient
from parallel.processes import children, is_running, send, start
from simulated import latest_of
from states import assert_equal

from dgc_training.checkpoint.reading import read_tensors
from scripts.launch import prepare
from scripts.launch import torchrun as torchrun_command

UNEQUAL = "--configs.train.check_replicas_every=0"
# method: the config files stacked on the experiment, and further words
METHODS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "dgc": (("configs/dgc/wm5.py", "configs/dgc/fp16.py"), ()),
    "powersgd": (("configs/powersgd/rank2.py",), ()),
    "qsgd": (("configs/quant/qsgd.py",), ()),
    "2bit": (("configs/threshold/2bit.py",), ()),
    "onebit": (("configs/contrib/onebit.py",), ()),
    "osgp": (("configs/gossip/osgp.py",), (UNEQUAL,)),
    "diloco": (("configs/local/diloco.py",), (UNEQUAL, "--configs.train.local.average_every=7")),
}
SETTINGS = "num_epochs=4 batch_size=32 num_batches_per_step=2 warmup_lr_epochs=1 checkpoint_every=3"
WORDS = [f"--configs.train.{setting}" for setting in f"{SETTINGS} check_replicas_every=5".split()]
WORDS += ["--devices=cpu", "--configs.data.num_threads_per_worker=1", "--configs.model.width=8"]


class Run:
    def __init__(self, directory: Path, method: str = "dgc", torchrun: bool = False) -> None:
        files, words = METHODS[method]
        script = [str(REPOSITORY / "train.py"), "--configs", "configs/digits/cnn.py", *files, *WORDS, *words]
        script += [f"--configs.train.timeout={patient(120)}", "--run-dir", str(directory / "run")]
        command, environment = prepare(2, script)
        command = torchrun_command(2, script) if torchrun else command
        directory.mkdir(parents=True, exist_ok=True)
        self.output = directory / "output"
        self.process = start(command, self.output, {**environment, "PYTHONPATH": str(REPOSITORY)})

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def ranks(self) -> list[int]:
        return children(self.process.pid)

    def wait_for_training(self) -> None:
        """Returns when the training loop begins or the run has ended."""
        limit = time.monotonic() + patient(120)
        while self.process.poll() is None and " steps per epoch" not in self.text():
            assert time.monotonic() < limit, self.text()[-3000:]
            time.sleep(0.02)

    def end(self, timeout: float = 120) -> int:
        pids, status = self.ranks(), self.process.wait(patient(timeout))
        limit = time.monotonic() + patient(10)
        while any(map(is_running, pids)):
            # Ranks may outlive a killed launcher. A batch system would end them.
            for pid in filter(is_running, pids if time.monotonic() > limit else ()):
                send(pid, signal.SIGKILL)
            time.sleep(0.02)
        return status


def finish(directory: Path, method: str = "dgc", torchrun: bool = False) -> None:
    """Starts or resumes the run of the directory, and waits for its end."""
    run = Run(directory, method, torchrun)
    assert run.end(300) == 0, run.text()[-3000:]
    assert "Traceback" not in run.text()


def latest(directory: Path) -> str | None:
    return latest_of(directory / "run") if (directory / "run/checkpoints/latest.json").exists() else None


def assert_same_end(directory: Path, reference: Path) -> None:
    """Compares the last checkpoints of two finished runs bit for bit. Times are not compared."""
    assert (directory / "run/summary.json").exists()
    for file in ("shared.pt", "rank0.pt", "rank1.pt"):
        own, other = (read_tensors(side / "run/checkpoints/e0004" / file) for side in (directory, reference))
        assert_equal({**own, "csv": None}, {**other, "csv": None}, file)
