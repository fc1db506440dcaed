"""A run under torchrun goes on after a rank is killed, and after an agent with all its ranks is killed."""

import json
import signal
from pathlib import Path

import pytest
from environment import patient
from parallel.elastic import CHECKPOINT_EVERY, ElasticRun
from parallel.processes import send
from warm import python


def test_wrong_settings_are_named_once(tmp_path: Path) -> None:
    """Ranks that would fail in the same way again are not started again."""
    with ElasticRun(tmp_path, 1, ("configs/dgc/wm5.py", "--configs.train.num_epoch=1"), python=python()) as run:
        status = run.start(2).process.wait(patient(60))
    assert status == 2 and "Traceback" not in run.text()
    assert run.text().count("unknown key train.num_epoch; closest: train.num_epochs") == 1


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_a_rank_and_an_agent_are_killed(tmp_path: Path) -> None:
    with ElasticRun(tmp_path, epochs=12) as run:
        agents = [run.start(1), run.start(1)]
        run.wait_for_attempt(1)
        run.wait(1.0)
        send(agents[0].ranks()[0], signal.SIGKILL)
        run.wait_for_attempt(2)
        run.wait(0.5)
        agents[1].kill()
        run.wait_for_attempt(3)
        run.finish()
    assert [restart.size for restart in run.restarts[:1] + run.restarts[-1:]] == [2, 1]
    assert all(restart.lost <= CHECKPOINT_EVERY for restart in run.restarts)
    assert run.restarts[-1].mean_error() < 2**-22
    summary = json.loads((run.run / "summary.json").read_text())
    assert (summary["epochs"], summary["ranks"]) == (12, 1)
    assert "Traceback" not in run.text()
