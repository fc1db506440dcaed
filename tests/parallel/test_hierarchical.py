"""Two levels on real ranks: two machines of two ranks, simulated by two daemons or agents on this machine."""

import re
from pathlib import Path

import pytest
from environment import patient
from failing_model import failing_model
from parallel import machines_worker as worker
from parallel.ranks import Group, over, two_agents, two_gloo_machines, two_machines


@pytest.mark.parametrize(
    "group",
    [over(two_machines, 4), over(two_gloo_machines, 4, pytest.mark.proof), over(two_agents, 4)],
    indirect=True,
)
def test_two_machines_of_two_ranks(group: Group) -> None:
    found = group.run(worker.every_method, hierarchical="auto")
    if group.launch is not two_agents:
        models = group.run(worker.process_set, hierarchical="auto")
        assert all(own["own"] == own["alike"] for own in models)
        assert len({own["own"] for own in models}) == 3  # ranks 0 and 3 have one model
    for name, first in found[0].items():
        two = [own[name]["auto"] for own in found]
        places = [(own["place"]["machine"], own["place"]["local_rank"]) for own in two]
        assert places == [(0, 0), (0, 1), (1, 0), (1, 1)], name
        assert all(own["place"]["machines"] == own["place"]["local_size"] == 2 for own in two)
        # a sum of two numbers has one order, so that all transports compute the same bits
        assert {own["model"] for own in two} == {first["lockstep"]}, name
        for synchronized, ddp in (own[name]["ddp"] for own in found if group.launch is two_agents):
            assert ddp == synchronized and ddp["message"] == two[0]["message"], name
        assert {own["message"] for own in two} == {two[0]["message"]} and "on rank 3 has NaN" in two[0]["message"]
    one = [own["dgc"]["off"] for own in found]
    assert all(own["place"] is None for own in one)
    assert 0 < sum(own["dgc"]["auto"]["between"] for own in found) <= sum(own["between"] for own in one) / 2
    group.run(worker.one_machine_ends_first, hierarchical="auto", last=True)


@pytest.mark.horovod
@pytest.mark.proof
@pytest.mark.timeout(200)
def test_a_stopped_rank_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod may wait for it inside a call that keeps the interpreter locked, so that no watchdog can run."""
    stopped = failing_model(tmp_path, 4, "os.kill(os.getpid(), signal.SIGSTOP)", rank=3)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ["--configs", "configs/digits/cnn.py", "configs/dgc/wm0.py", str(stopped)]
    words += ["--configs.model.width", "4", "--configs.train.timeout", f"{patient(10)}"]
    words += ["--configs.train.num_epochs", "2", "--run-dir", str(tmp_path / "run")]
    done = two_machines(4, ["train.py", *words], timeout=150)
    assert done.returncode != 0
    assert "gradients are compressed between 2 machines" in done.stdout
    assert re.search(r"does not respond at all|Timeout \(0:00:\d", done.stderr), done.stderr[-3000:]
