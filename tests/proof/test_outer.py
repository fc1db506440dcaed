"""Four islands of a language model under torchrun, of which one is killed again and again.

    pytest -m proof tests/proof/test_outer.py -s

Two agents stand for machines: one has three ranks, the other has one. Either the other is lost, three go on, and
it comes back, or a rank is killed together with its files, and returns.
"""

import json
import random
import re
import signal
from pathlib import Path
from statistics import stdev

import pytest
from parallel.elastic import CHECKPOINT_EVERY, ElasticRun, Restart
from parallel.processes import send
from proof.small_runs import differences

from benchmarks.convergence.runs import simulate
from dgc.comm.lockstep import LockstepWorld
from dgc_training.checkpoint.files import Checkpoints
from dgc_training.checkpoint.reading import read_tensors

pytestmark = [pytest.mark.proof, pytest.mark.timeout(3600)]
KILLS, EPOCHS, SEEDS = 20, 20, 3
EXPERIMENT = "configs/pysource/gpt.py"
METHOD = (
    "configs/outer/sparseloco.py",
    "--configs.train.gossip.average_every=5",
    "--configs.model.width=32",
    "--configs.train.batch_size=8",
    "--configs.train.warmup_lr_epochs=0",
    "--configs.task.steps_per_epoch=100",
    "--configs.dataset.characters=300000",
)
BITS = "bits_per_character/test"


def kill_with_its_files(run: ElasticRun, pid: int) -> None:
    """Kill a rank, and remove what it has saved of the latest checkpoint."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    (rank,) = [variable.removeprefix("RANK=") for variable in variables if variable.startswith("RANK=")]
    send(pid, signal.SIGKILL)
    pointer = run.run / "checkpoints/latest.json"
    for _ in range(2):  # a checkpoint that was complete when the rank was killed may be named a moment later
        name = json.loads(pointer.read_text())["checkpoint"]
        (pointer.parent / name / f"rank{rank}.pt").unlink(missing_ok=True)
        run.wait(0.2)


def check_who_stays(restart: Restart) -> None:
    """Check that ranks that stay begin with what they have saved, bit for bit."""
    assert restart.checkpoint is not None
    directory, name = restart.checkpoint.parent, restart.checkpoint.name
    loaded = LockstepWorld(restart.size).run(
        lambda transport: Checkpoints(directory, transport).load(name, island=transport.rank)
    )
    islands = loaded[0].islands
    assert islands is not None
    for part, old in zip(loaded, islands.continues, strict=True):
        if old is not None:
            saved = read_tensors(restart.checkpoint / f"rank{old}.pt")["compression"]
            assert not differences(part.own["compression"], saved)


def undisturbed(directory: Path, seed: int) -> float:
    words = ["--configs", EXPERIMENT, *METHOD, "--run-dir", str(directory), "--devices", "cpu"]
    words += ["--configs.data.num_threads_per_worker=1"]
    simulate(4, [*words, f"--configs.train.num_epochs={EPOCHS}", f"--configs.seed={seed}"])
    return float(json.loads((directory / "summary.json").read_text())["final"][BITS])


def test_kills_of_one_of_four_islands(tmp_path: Path) -> None:
    draw, kills, with_files = random.Random(0), 0, 0
    with ElasticRun(tmp_path / "run", EPOCHS, METHOD, EXPERIMENT) as run:
        three, one = run.start(3), run.start(1)
        while kills < KILLS:
            goes_on = run.wait_for_attempt(len(run.restarts) + 1, timeout=1200)
            assert goes_on, f"the run ended after {kills} kills:\n{run.text()}"
            run.wait(draw.uniform(0.3, 1.0))
            if run.restarts[-1].size < 4:
                one = run.start(1)
            elif ranks := [*three.ranks(), *one.ranks()]:
                kills += 1
                if draw.random() < 0.5:
                    one.kill()
                else:
                    kill_with_its_files(run, draw.choice(ranks))
                    with_files += 1
        run.finish(1200)
    text, summary = run.text(), json.loads((run.run / "summary.json").read_text())
    assert summary["epochs"] == EPOCHS and "Traceback" not in text, text
    resumed = [restart for restart in run.restarts if restart.checkpoint is not None]
    for restart in resumed:
        assert restart.lost <= CHECKPOINT_EVERY, restart
        check_who_stays(restart)
    joined = len(re.findall("join with the common model and without error state", text))
    lost = len(re.findall("error states of the old ranks . are lost", text))
    assert joined >= KILLS // 2 and lost >= KILLS // 2, text
    bits = float(summary["final"][BITS])
    others = [undisturbed(tmp_path / f"seed{seed}", seed) for seed in range(SEEDS)]
    print(
        f"\n{kills} kills, {with_files} of them with the rank's files; {len(resumed)} restarts, {joined} with a "
        f"rank that joins, {lost} with one that is lost; {bits:.4f} bits per character, without kills "
        f"{', '.join(f'{other:.4f}' for other in others)}"
    )
    assert bits < max(others) + 3 * stdev(others)
