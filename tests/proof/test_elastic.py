"""Runs under torchrun go on after kills of ranks and agents at random moments, drawn by the seed of a chunk."""

import random
import signal
from pathlib import Path

import pytest
from parallel.elastic import CHECKPOINT_EVERY, ElasticRun, Restart
from parallel.processes import send
from simulated import events_of, latest_of, summary_of

from dgc_training.checkpoint.reading import read_manifest

pytestmark = [pytest.mark.proof, pytest.mark.timeout(3600)]
KILLS, CHUNKS, EPOCHS = 4, 5, 40  # kills of each kind in a chunk


def killed_once(run: ElasticRun, draw: random.Random, kind: str) -> bool:
    """Waits for a random moment and kills a rank or an agent. Returns False if the run has ended before."""
    if len(run.running()) < 2:
        if draw.random() < 0.5 and not run.wait_for_attempt(len(run.restarts) + 1):
            return False
        run.wait(draw.uniform(0, 3))
        if not run.running():
            return False
        run.start(draw.choice([1, 2]))
    # Usually training has begun. Otherwise the ranks are starting.
    if draw.random() < 0.8 and not run.wait_for_attempt(len(run.restarts) + 1):
        return False
    run.wait(draw.uniform(0, 3))
    while len(run.running()) == 2:
        if ranks := [pid for agent in run.running() for pid in agent.ranks()]:
            if kind == "rank":
                send(draw.choice(ranks), signal.SIGKILL)
            else:
                draw.choice(run.running()).kill()
            return True
        run.wait(0.1)
    return False


def check(run: ElasticRun) -> list[Restart]:
    """Checks a run that has ended. Returns its restarts with another number of ranks."""
    assert summary_of(run.run)["epochs"] == EPOCHS and latest_of(run.run) == f"e{EPOCHS:04d}"
    assert "Traceback" not in run.text(), run.text()
    assert all(restart.lost <= CHECKPOINT_EVERY for restart in run.restarts), run.restarts
    steps = [point.step for point in events_of(run.run).Scalars("train/loss")]
    assert steps == sorted(set(steps)), "no point is there twice"
    resized = [r for r in run.restarts if r.checkpoint and read_manifest(r.checkpoint)["size"] != r.size]
    assert all(restart.mean_error() < 2**-22 for restart in resized), resized
    return resized


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_kills(tmp_path: Path, chunk: int) -> None:
    draw = random.Random(chunk)
    kinds = ["rank", "agent"] * KILLS
    draw.shuffle(kinds)
    number = 0
    while kinds:
        number += 1
        done = []
        with ElasticRun(tmp_path / str(number), EPOCHS) as run:
            for _ in range(2):
                run.start(draw.choice([1, 2]))
            while kinds and killed_once(run, draw, kinds[-1]):
                done.append(kinds.pop())
            run.finish()
        resized = check(run)
        sizes = "-".join(str(restart.size) for restart in run.restarts)
        lost = max(restart.lost for restart in run.restarts)
        error = max((restart.mean_error() for restart in resized), default=0.0)
        print(f"\nchunk {chunk}, run {number}: killed {', '.join(done) or 'nothing'}; attempts on {sizes} ranks;")
        print(f"steps lost: {lost:g} of at most {CHECKPOINT_EVERY}; {len(resized)} times resumed on another size;")
        print(f"mean of the residual within {error:.1e}", flush=True)
