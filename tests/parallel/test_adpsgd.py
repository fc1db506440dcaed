"""AD-PSGD on real ranks, over MPI and over Gloo: it converges, counts exactly, waits for nobody, ends cleanly."""

import json
from pathlib import Path

import pytest
from environment import patient
from parallel import adpsgd_worker as worker
from parallel.ranks import Group, Launcher, alone, mpirun, over, torchrun

BOTH = (mpirun, torchrun)
PROOF = pytest.mark.proof


@pytest.mark.parametrize(
    "group",
    [over(mpirun, 3), over(torchrun, 3, PROOF), *(over(run, ranks, PROOF) for run in BOTH for ranks in (2, 4, 5))],
    indirect=True,
)
def test_training(group: Group) -> None:
    ranks = group.size
    trained = group.run(worker.least_squares, point_to_point=True)
    for own in trained:
        assert own["losses"][-1] < 1e-4
        assert own["distances"][-1] < 0.1
        for epoch, (everyone, total) in enumerate(own["totals"], 1):
            assert [known for known, _ in everyone] == [total] * ranks and total >= epoch * 100 * ranks
        assert own["steps"] == sum(other["taken"] for other in trained)
        assert own["averagings"] > 2
        assert 8 * (3 + ranks) + 80 <= own["per_average"] < 4 * (8 * (3 + ranks) + 80)
    apart = group.run(worker.synchronized_one_by_one, point_to_point=True)
    assert all(own["progress"] == own["steps"] == pytest.approx(own["sum"], abs=1e-3) for own in apart)
    for rank in range(ranks):
        waits = [own["waited"][rank] for own in apart]
        assert all(end >= max(start for start, _ in waits) for _, end in waits), "each waits for all"
    if ranks == 4:
        steps = group.run(worker.one_is_slow, point_to_point=True)
        assert all(own > 2 * steps[-1] for own in steps[:-1])


@pytest.mark.parametrize("group", [over(alone, 1)], indirect=True)
def test_one_process_without_a_launcher(group: Group) -> None:
    (own,) = group.run(worker.synchronized_one_by_one, point_to_point=True)
    assert own["progress"] == 3


@pytest.mark.proof
@pytest.mark.parametrize(
    ("launch", "ranks", "how"),
    [(torchrun, 2, "sleeps"), *((mpirun, ranks, how) for ranks in (2, 4, 5) for how in ("sleeps", "is_stopped"))],
)
def test_a_rank_that_times_out_is_named_to_all_others(
    launch: Launcher, ranks: int, how: str, tmp_path: Path
) -> None:
    done = launch(ranks, [worker.__file__, str(tmp_path), how], timeout=60)
    assert done.returncode != 0
    for rank in range(ranks - 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert f"rank {ranks - 1} " in found["error"] and "timed out" in found["error"]
        assert 0 < found["after"] < patient(15)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("group", [over(run, ranks, PROOF) for run in BOTH for ranks in (2, 4, 5)], indirect=True)
def test_twenty_clean_ends_of_twenty(group: Group) -> None:
    for errors in group.run(worker.clean_ends, within=390, last=True, point_to_point=True):
        assert len(errors) == 20 and max(errors) < 1e-2


@pytest.mark.parametrize("group", [over(mpirun, 2, PROOF)], indirect=True)
def test_waiting_costs_no_core(group: Group) -> None:
    assert all(spent < 0.1 for spent in group.run(worker.idle, point_to_point=True))
