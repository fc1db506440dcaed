"""Gossip between real ranks, over MPI and over Gloo: what it keeps, for whom it waits, and when a rank dies."""

import json
from pathlib import Path
from typing import Any

import pytest
from environment import patient
from failing_model import failing_model
from parallel.ranks import mpirun, torchrun

WORKER = str(Path(__file__).parent / "gossip_worker.py")
ROUNDING = 1e-5
SCENARIOS = ("complete_graph", "mass", "switches", "resume", "like_lockstep")
FURTHER = {
    2: ("log2_rounds",),
    3: ("slow_once",),
    4: ("log2_rounds", "one_is_slow"),
    5: ("slow_once",),
    8: ("log2_rounds",),
}


def found_by(ranks: int, folder: Path, *scenarios: str, launch: Any = mpirun) -> list[dict[str, Any]]:
    """What each rank's scenarios returned, by rank."""
    done = launch(ranks, [WORKER, str(folder), *scenarios], timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("launch", "ranks"),
    [
        (mpirun, 3),
        *(pytest.param(mpirun, n, marks=pytest.mark.proof) for n in (2, 4, 5, 8)),
        *(pytest.param(torchrun, n, marks=pytest.mark.proof) for n in (2, 3, 4, 5)),
    ],
)
def test_oracles(launch: Any, ranks: int, tmp_path: Path) -> None:
    found = found_by(ranks, tmp_path, *SCENARIOS, *FURTHER[ranks], launch=launch)
    for own in found:
        assert own["complete_graph"]["model"] == found[0]["complete_graph"]["model"]
        assert own["complete_graph"]["difference"] < ROUNDING
        for name, sums in own["mass"].items():
            assert sums["received"] > 0 or not name.startswith("osgp"), name
            assert sums["x"] < ROUNDING and sums["x synchronized"] < ROUNDING, name
            assert sums["w"] == pytest.approx(ranks, abs=1e-9), name
        assert all(moved < ROUNDING for moved in own["switches"].values()), own["switches"]
        assert all(row["same"] for row in own["resume"].values()), own["resume"]
        assert own["resume"]["osgp"]["received"] > 0
        if "log2_rounds" in own:
            assert own["log2_rounds"]["before"] > 0.3 and own["log2_rounds"]["after"] < ROUNDING
        if "one_is_slow" in own:
            assert own["one_is_slow"]["x"] < ROUNDING
    assert len(found[0]["like_lockstep"]) == 7 and all(found[0]["like_lockstep"].values())
    if "slow_once" in found[0]:
        a_slow_iteration_travels_along_the_ring([own["slow_once"] for own in found])


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
@pytest.mark.parametrize("how", ["SIGSTOP", pytest.param("SIGKILL", marks=pytest.mark.proof)])
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
