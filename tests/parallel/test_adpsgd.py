"""AD-PSGD on real ranks, over MPI and over Gloo: it converges, counts exactly, waits for nobody, ends cleanly."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from environment import patient
from parallel.ranks import alone, mpirun, torchrun

BOTH = (mpirun, torchrun)
WORKER = str(Path(__file__).parent / "adpsgd_worker.py")


def found_by(ranks: int, folder: Path, *scenarios: str, launch: Any = mpirun) -> list[dict[str, Any]]:
    """What each rank's scenarios returned, by rank."""
    done = launch(ranks, [WORKER, str(folder), *scenarios])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("launch", "ranks"),
    [
        (mpirun, 3),
        pytest.param(torchrun, 3, marks=pytest.mark.proof),
        *(pytest.param(run, ranks, marks=pytest.mark.proof) for run in BOTH for ranks in (2, 4, 5)),
    ],
)
def test_training(launch: Any, ranks: int, tmp_path: Path) -> None:
    slow = ["one_is_slow"] if ranks == 4 else []
    scenarios = ["least_squares", "mean_is_kept", "synchronized_one_by_one", *slow]
    found = found_by(ranks, tmp_path, *scenarios, launch=launch)
    for own in found:
        training = own["least_squares"]
        assert training["losses"][-1] < 1e-4
        assert training["distances"][-1] < 0.1
        for epoch, (everyone, total) in enumerate(training["totals"], 1):
            assert [known for known, _ in everyone] == [total] * ranks and total >= epoch * 100 * ranks
        assert training["steps"] == sum(other["least_squares"]["taken"] for other in found)
        assert training["averagings"] > 20
        assert 8 * (3 + ranks) + 80 <= training["per_average"] < 4 * (8 * (3 + ranks) + 80)
        assert own["mean_is_kept"]["moved"] < 1e-4 and own["mean_is_kept"]["distance"] < 1e-3
        apart = own["synchronized_one_by_one"]
        assert apart["progress"] == apart["steps"] == pytest.approx(apart["sum"], abs=1e-3)
    for rank in range(ranks):
        waits = [own["synchronized_one_by_one"]["waited"][rank] for own in found]
        assert all(end >= max(start for start, _ in waits) for _, end in waits), "each waits for all"
    for own in found[:-1] if ranks == 4 else []:
        assert own["one_is_slow"]["slow_steps"] > 2 * found[-1]["one_is_slow"]["slow_steps"]


def test_one_process_without_a_launcher(tmp_path: Path) -> None:
    (own,) = found_by(1, tmp_path, "synchronized_one_by_one", launch=alone)
    assert own["synchronized_one_by_one"]["progress"] == 3


def silence(ranks: int, folder: Path, how: str, launch: Any = mpirun) -> None:
    done = launch(ranks, [WORKER, str(folder), how], timeout=60)
    assert done.returncode != 0
    for rank in range(ranks - 1):
        found = json.loads((folder / f"rank{rank}.json").read_text())
        assert f"rank {ranks - 1} " in found["error"] and "timed out" in found["error"]
        assert 0 < found["after"] < patient(15)


def test_a_rank_that_times_out_is_named(tmp_path: Path) -> None:
    for launch in BOTH:
        silence(2, tmp_path, "sleeps", launch)


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [2, 4, 5])
@pytest.mark.parametrize("how", ["sleeps", "is_stopped"])
def test_whatever_rank_count_it_is_named_to_all_others(ranks: int, how: str, tmp_path: Path) -> None:
    silence(ranks, tmp_path, how)


@pytest.mark.proof
@pytest.mark.timeout(400)
@pytest.mark.parametrize("launch", BOTH)
@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_twenty_clean_ends_of_twenty(launch: Any, ranks: int, tmp_path: Path) -> None:
    for own in found_by(ranks, tmp_path, "clean_ends", launch=partial(launch, timeout=390)):
        assert own["clean_ends"]["ends"] == 20 and own["clean_ends"]["exact"]


@pytest.mark.proof
def test_waiting_costs_no_core(tmp_path: Path) -> None:
    for own in found_by(2, tmp_path, "idle"):
        assert own["idle"]["gossip"] < 0.1
