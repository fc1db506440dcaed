"""Replica groups of a language model under torchrun: ranks, or machines of two. One is killed again and again.

Either an agent, which stands for a machine, is lost and comes back, or a rank is killed together with its files.
"""

import random
import re
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import stdev

import pytest
from parallel.elastic import CHECKPOINT_EVERY, ElasticRun, Restart
from parallel.processes import send
from simulated import latest_of, summary_of
from states import assert_equal

from benchmarks._runs import simulate
from dgc.comm.lockstep import LockstepWorld
from dgc_training.checkpoint.files import Checkpoints
from dgc_training.checkpoint.reading import read_tensors
from scripts.launch import usable_cores

pytestmark = [pytest.mark.proof, pytest.mark.timeout(3600)]
EPOCHS, SEEDS = 40, 3
# Seconds of training. Fewer groups train on fewer tokens with a lower learning rate, so they must return soon.
BETWEEN_KILLS, UNTIL_RETURN = (2.0, 4.0), (0.3, 1.0)
EXPERIMENT = "configs/pysource/gpt.py"
SETTINGS = "model.width=32 train.batch_size=8 train.warmup_lr_epochs=0 task.steps_per_epoch=100"
SETTINGS += " dataset.characters=300000"
METHOD = ("configs/local/sign.py", *(f"--configs.{setting}" for setting in SETTINGS.split()))
OF_RANKS = ("--configs.train.local.average_every=5",)
OF_MACHINES = ("configs/local/machines.py", "--configs.train.local.base.average_every=5")
BITS = "bits_per_character/test"


def kill_with_its_files(run: ElasticRun, pid: int) -> None:
    """Kill a rank, and remove what it has saved of the latest checkpoint."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    (rank,) = [variable.removeprefix("RANK=") for variable in variables if variable.startswith("RANK=")]
    send(pid, signal.SIGKILL)
    for _ in range(2):  # a checkpoint that was complete when the rank was killed may be named a moment later
        (run.run / "checkpoints" / latest_of(run.run) / f"rank{rank}.pt").unlink(missing_ok=True)
        run.wait(0.2)


def check_who_stays(restart: Restart, group_size: int) -> None:
    """Check that ranks that stay begin with what they have saved, bit for bit."""
    assert restart.checkpoint is not None
    directory, name = restart.checkpoint.parent, restart.checkpoint.name
    loaded = LockstepWorld(restart.size).run(
        lambda transport: Checkpoints(directory, transport).load(name, replica_group=transport.rank // group_size)
    )
    replica_groups = loaded[0].replica_groups
    assert replica_groups is not None
    for part, old in zip(loaded, replica_groups.continues, strict=True):
        if old is not None:
            saved = read_tensors(restart.checkpoint / f"rank{old}.pt")["compression"]
            assert_equal(part.own["compression"], saved)


def undisturbed(directory: Path, seed: int) -> float:
    words = ["--configs", EXPERIMENT, *METHOD, *OF_RANKS, "--run-dir", str(directory), "--devices", "cpu"]
    words += ["--configs.data.num_threads_per_worker=1"]
    simulate(4, [*words, f"--configs.train.num_epochs={EPOCHS}", f"--configs.seed={seed}"])
    return float(summary_of(directory)["final"][BITS])


def killed(
    directory: Path, machines: tuple[int, int], kills: int, epochs: int, words: tuple[str, ...], group_size: int
) -> tuple[float, str, str]:
    """Bits per character, kills, and the output of two machines, of which the second is lost and returns."""
    draw, done, with_files, size = random.Random(0), 0, 0, sum(machines)
    with ElasticRun(directory, epochs, (*METHOD, *words), EXPERIMENT) as run:
        first, second = (run.start(ranks) for ranks in machines)
        while done < kills:
            goes_on = run.wait_for_attempt(len(run.restarts) + 1, timeout=1200)
            assert goes_on, f"the run ended after {done} kills:\n{run.text()}"
            is_whole = run.restarts[-1].size == size
            run.wait(draw.uniform(*(BETWEEN_KILLS if is_whole else UNTIL_RETURN)))
            if not is_whole:
                second = run.start(machines[1])
            elif ranks := [*first.ranks(), *second.ranks()]:
                done += 1
                if draw.random() < 0.5:
                    second.kill()
                else:
                    kill_with_its_files(run, draw.choice(ranks))
                    with_files += 1
        run.finish(1200)
    text, summary = run.text(), summary_of(run.run)
    assert summary["epochs"] == epochs and "Traceback" not in text, text
    joined = len(re.findall("join with the common model and without a residual", text))
    lost = len(re.findall("residuals of the old ranks .+ are lost", text))
    assert joined >= kills // 2 and lost >= kills // 2, text
    restarts = [restart for restart in run.restarts if restart.checkpoint is not None]
    for restart in restarts:
        assert restart.lost <= CHECKPOINT_EVERY, restart
        check_who_stays(restart, group_size)
    told = f"{kills} kills, {with_files} of them with the rank's files; {len(restarts)} restarts, "
    told += f"{joined} with a rank that joins, {lost} with one that is lost"
    return float(summary["final"][BITS]), told, text


def test_kills_of_one_of_four_replica_groups(tmp_path: Path) -> None:
    bits, told, _ = killed(tmp_path / "run", (3, 1), 20, EPOCHS, OF_RANKS, group_size=1)
    with ProcessPoolExecutor(usable_cores(), get_context("spawn")) as pool:
        others = list(pool.map(undisturbed, [tmp_path / f"seed{seed}" for seed in range(SEEDS)], range(SEEDS)))
    without = ", ".join(f"{other:.4f}" for other in others)
    print(f"\n{told}; {bits:.4f} bits per character, without kills {without}")
    assert bits < max(others) + 3 * stdev(others)


def test_kills_of_one_of_two_machines(tmp_path: Path) -> None:
    """The ranks of a machine average their gradients, and are lost and join together."""
    _, _, text = killed(tmp_path / "run", (2, 2), 6, 6, OF_MACHINES, group_size=2)
    assert "ranks 0, 1 join" in text or "ranks 2, 3 join" in text
