"""Elastic runs of `scripts/torchrun.sh` with kills of ranks and agents. Two agents stand for two machines."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from environment import REPOSITORY, patient, python_path
from parallel.processes import children, free_port, send, start
from simulated import CNN
from torch.utils._pytree import keystr, tree_flatten_with_path

from dgc.comm.lockstep import LockstepWorld
from dgc.engine.redistribute import merge
from dgc_training.checkpoint.files import Checkpoints
from dgc_training.checkpoint.reading import read_manifest, read_tensors

CHECKPOINT_EVERY = 3
LATE = "has ended on the other machines"
DGC = ("configs/dgc/wm5.py", "--configs.train.check_replicas_every=5")
SETTINGS = f"batch_size=32 warmup_lr_epochs=2 checkpoint_every={CHECKPOINT_EVERY} log_every=1"
WORDS = [f"--configs.train.{setting}" for setting in f"{SETTINGS} timeout={patient(60)}".split()]
WORDS += ["--configs.train.recorder={_target_: scripts.gossip.rank_csv.StepRecorder}", "--devices=cpu"]
WORDS += ["--configs.data.num_threads_per_worker=1", "--configs.model.width=8"]
BEGIN = re.compile(r"^(\d+) ranks? on cpu ", re.MULTILINE)
RESUMED = re.compile(r"^resumed from checkpoint (e(\d+)(?:s(\d+))?(?:-\d+)?)", re.MULTILINE)


class Position(NamedTuple):
    epoch: int = 0
    step: int = 0
    size: int = 1

    def key(self) -> tuple[int, int]:
        return self.epoch, self.step * self.size


class Restart(NamedTuple):
    size: int
    checkpoint: Path | None  # a copy of that which it resumes from; None: it starts from the beginning
    before: Position  # the furthest position of all attempts before
    resumed: Position  # the checkpoint's

    @property
    def lost(self) -> float:
        """Steps that are repeated, counted in steps of the ranks that had done them."""
        if self.resumed.epoch > self.before.epoch:
            return 0.0
        assert self.resumed.epoch == self.before.epoch, self
        return max(0.0, (self.before.key()[1] - self.resumed.key()[1]) / self.before.size)

    def mean_error(self) -> float:
        """Largest relative difference between the means of the residual over the old and over the new ranks."""
        assert self.checkpoint is not None
        machines = read_manifest(self.checkpoint)["machines"]
        files = [self.checkpoint / f"rank{rank}.pt" for rank in range(len(machines))]
        states = [{**read_tensors(file)["compression"], "part": None} for file in files]
        # On two levels the ranks of a machine divide its residual among them.
        parts = [[state for state, its in zip(states, machines, strict=True) if its == m] for m in set(machines)]
        old = mean_of_tensors([merge(part) for part in parts])
        assert any(tensor.any() for tensor in old.values())
        directory, name = self.checkpoint.parent, self.checkpoint.name
        loaded = LockstepWorld(self.size).run(lambda transport: Checkpoints(directory, transport).load(name))
        new = mean_of_tensors([part.own["compression"] for part in loaded])
        assert new.keys() == old.keys()
        scale = {key: max(1e-30, float(tensor.abs().max())) for key, tensor in old.items()}
        return max(float((new[key] - tensor).abs().max()) / scale[key] for key, tensor in old.items())


def mean_of_tensors(states: list[Any]) -> dict[str, torch.Tensor]:
    """The mean over ranks of each tensor of nested states, in float64."""
    leaves = [{keystr(path): leaf for path, leaf in tree_flatten_with_path(state)[0]} for state in states]
    tensors = [{key: leaf for key, leaf in own.items() if isinstance(leaf, torch.Tensor)} for own in leaves]
    return {key: torch.stack([own[key].double() for own in tensors]).mean(0) for key in tensors[0]}


class Agent:
    def __init__(self, run: "ElasticRun", ranks: int) -> None:
        self.output = run.directory / f"agent{len(run.agents)}"
        variables = {
            **{"RENDEZVOUS": f"localhost:{run.port}", "RANKS": str(ranks), "MAX_MACHINES": "2"},
            **{"RESTARTS": "100", "LAST_CALL": "3", "PYTHONPATH": python_path()},
            "RDZV_CONF": f"keep_alive_interval=1,keep_alive_max_attempt={patient(6):.0f},"
            f"read_timeout={patient(15):.0f}",
            "PATH": f"{Path(run.python).parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        words = sorted([*WORDS, *run.method], key=lambda word: word.startswith("--"))  # config files come first
        words = ["--configs", run.experiment, *words, f"--configs.train.num_epochs={run.epochs}"]
        command = ["bash", str(REPOSITORY / "scripts/torchrun.sh"), *words, "--run-dir", str(run.run)]
        self.process = start(command, self.output, {**os.environ, **variables})

    def ranks(self) -> list[int]:
        return children(self.process.pid)

    def kill(self) -> None:
        for pid in (self.process.pid, *self.ranks()):
            send(pid, signal.SIGKILL)
        self.process.wait()


class ElasticRun:
    """A run with a store and agents, which a context manager ends. `restarts` has every attempt to train.

    method: The config files after the experiment's, and further arguments of train.py.
    python: What the agents start. Kills need their own processes, and not forks of another one.
    """

    def __init__(
        self, directory: Path, epochs: int, method: Any = DGC, experiment: str = CNN, python: str = sys.executable
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.python, self.experiment = python, experiment
        self.directory, self.run, self.epochs, self.method = directory, directory / "run", epochs, method
        self.agents: list[Agent] = []
        self.restarts: list[Restart] = []
        self.furthest = Position()
        self._attempts: dict[tuple[Path, int], tuple[float, Position]] = {}  # as it was when first seen, by place
        self._recorded: set[tuple[Path, int]] = set()
        self._checkpoint: tuple[str, int] | None = None
        self._copies: dict[str, Path] = {}  # the newest copy of each checkpoint

    def __enter__(self) -> "ElasticRun":
        self.port = free_port()
        command = [sys.executable, "-m", "scripts.rendezvous", str(self.port)]
        self.store = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        assert self.store.stdout is not None and "store on port" in self.store.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.running():
            agent.kill()
        self.store.kill()
        self.store.communicate()

    def start(self, ranks: int) -> Agent:
        self.agents.append(Agent(self, ranks))
        return self.agents[-1]

    def running(self) -> list[Agent]:
        return [agent for agent in self.agents if agent.process.poll() is None]

    def text(self) -> str:
        return "".join(f"--- {agent.output.name}\n{agent.output.read_text()}\n" for agent in self.agents)

    def wait(self, seconds: float) -> None:
        """Waits, and records what the ranks do. Returns earlier if all agents have ended."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit and self.running():
            time.sleep(0.05)
            self._record()

    def wait_for_attempt(self, number: int, timeout: float = 240) -> bool:
        """Waits until the ranks train for the `number`th time, from 1. Returns False if the run has ended."""
        limit = time.monotonic() + patient(timeout)
        while len(self.restarts) < number and self.running():
            assert time.monotonic() < limit, self.text()[-6000:]
            self.wait(0.05)
        return bool(self.running())

    def finish(self, timeout: float = 300) -> None:
        self.wait(patient(timeout))
        ends = {agent: agent.process.poll() for agent in self.agents}
        assert 0 in ends.values(), self.text()[-6000:]
        for agent, status in ends.items():
            # an agent that is started when the run is about to end finds that it has ended
            is_late = LATE in agent.output.read_text()
            assert is_late or status in (0, -signal.SIGKILL), (status, self.text()[-6000:])

    def _record(self) -> None:
        self._copy_latest()
        for agent in self.agents:
            text = agent.output.read_text(errors="replace")
            places = [match.end() for match in BEGIN.finditer(text)]
            for place, end in zip(places, [*places, len(text)][1:], strict=True):
                attempt = (agent.output, place)
                seen, before = self._attempts.setdefault(attempt, (time.monotonic(), self.furthest))
                found = RESUMED.search(text, place, end)
                # The name of the checkpoint is printed a moment later.
                complete = found is not None or end < len(text) or time.monotonic() - seen > patient(3)
                if complete and attempt not in self._recorded:
                    self._recorded.add(attempt)
                    size = int(text[text.rindex("\n", 0, place) + 1 : place].split()[0])
                    self.restarts.append(self._restart(size, before, found))
        self.furthest = max(self.furthest, self._position(), key=Position.key)

    def _restart(self, size: int, before: Position, found: re.Match[str] | None) -> Restart:
        if found is None:
            return Restart(size, None, before, Position())
        copy = self._copies[found[1]]
        resumed = Position(int(found[2]), int(found[3] or 0), read_manifest(copy)["size"])
        return Restart(size, copy, before, resumed)

    def _copy_latest(self) -> None:
        """Links the files of the latest checkpoint, since the run will remove it."""
        pointer = self.run / "checkpoints/latest.json"
        try:
            version = pointer.stat().st_ino
            name = json.loads(pointer.read_text())["checkpoint"]
            if (name, version) == self._checkpoint:
                return
            copy = self.directory / "copies" / str(version) / name
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(pointer.parent / name, copy, copy_function=os.link)
        except (FileNotFoundError, shutil.Error):  # there is none yet, or it has been replaced
            return
        self._checkpoint, self._copies[name] = (name, version), copy

    def _position(self) -> Position:
        """The last step in the CSV file of rank 0 that was written last."""
        files = sorted(self.run.glob("csv/out_r0_n*.csv"), key=lambda path: path.stat().st_mtime)
        # the last line may be incomplete
        rows = [line.split(",") for line in files[-1].read_text().split("\n")[5:-1]] if files else []
        steps = [(int(row[0]), int(row[1])) for row in rows if int(row[1]) >= 0]
        size = int(files[-1].stem.rpartition("n")[2]) if files else 1
        return Position(steps[-1][0], steps[-1][1] + 1, size) if steps else Position()
