"""Gossip between real ranks, over MPI and over Gloo: what it keeps, for whom it waits, and when a rank dies."""

from pathlib import Path
from typing import Any

import pytest
from environment import patient
from failing_model import failing_model
from parallel import gossip_worker as worker
from parallel.ranks import Group, mpirun, over, torchrun

ROUNDING = 1e-5


@pytest.mark.parametrize(
    "group",
    [
        over(mpirun, 3),
        *(over(mpirun, ranks, pytest.mark.proof) for ranks in (2, 4, 5, 8)),
        *(over(torchrun, ranks, pytest.mark.proof) for ranks in (2, 3, 4, 5)),
    ],
    indirect=True,
)
def test_oracles(group: Group, tmp_path: Path) -> None:
    def run(scenario: Any, *arguments: Any) -> list[Any]:
        return group.run(scenario, *arguments, point_to_point=True)

    for own in run(worker.mass):
        for name, sums in own.items():
            assert sums["received"] > 0 or not name.startswith("osgp"), name
            assert sums["x"] < ROUNDING and sums["x synchronized"] < ROUNDING, name
            assert sums["w"] == pytest.approx(group.size, abs=1e-9), name
    alike = run(worker.like_lockstep)[0]
    assert alike and all(alike.values())
    if group.size == 4:
        assert all(own["x"] < ROUNDING for own in run(worker.one_is_slow))
    if group.size in (3, 5):
        a_slow_iteration_travels_along_the_ring(run(worker.slow_once, tmp_path))


def a_slow_iteration_travels_along_the_ring(found: list[dict[str, Any]]) -> None:
    """Rank d, d messages away from rank 0, begins iteration 5 + d only when the slow iteration 5 is over, and
    those before it while that one lasts; with overlap, one iteration later.
    """
    for name, later in (("SGP", 0), ("OSGP", 1)):
        over = found[0][name]["ready"]
        for distance, own in enumerate(found[1:], 1):
            first = 5 + distance + later
            assert own[name]["begun"][first - 1] < over <= own[name]["begun"][first], (name, distance)
        # the slow iteration ends only after all have begun theirs, so that none waits twice
        assert all(own[name]["begun"][-1] - over < patient(20) for own in found), name


@pytest.mark.horovod
@pytest.mark.proof
@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
def test_a_rank_that_dies_ends_the_run(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # it dies after others have heard of it
    dying = failing_model(tmp_path, 3, f"time.sleep(2); os.kill(os.getpid(), signal.{how})", rank=1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    configs = ["--configs", "configs/digits/cnn.py", "configs/gossip/osgp.py", str(dying)]
    changes = ["--configs.train.timeout", f"{patient(6)}", "--configs.train.num_epochs", "2"]
    done = mpirun(2, ["train.py", *configs, *changes, "--run-dir", str(tmp_path / "run")], timeout=80)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("[rank ")]
    if how == "SIGSTOP":
        assert len(told) == 1 and "not respond at all" in told[0]
    else:
        assert "process rank 1" in done.stderr and "signal 9" in done.stderr and len(told) <= 1
