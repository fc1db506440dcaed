"""Reports of ranks with other weights, code or waits, and of what is wrong before anything has started."""

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from environment import patient
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from dgc.comm import Transport, barrier
from dgc.comm.lockstep import LockstepWorld
from dgc_training.faults.failure import UsageError
from dgc_training.faults.watchdog import Heartbeat, WatchedTransport, find_stuck_rank
from dgc_training.launcher import print_error
from dgc_training.startup import agreement
from dgc_training.startup.agreement import check_agreement, code_difference, code_hashes
from dgc_training.synchronization import check_replicas, minority_ranks


def test_a_rank_that_sends_no_more_datagrams_is_missing() -> None:
    """Rank 2 takes no part in the second exchange. Ranks that have never sent one are not listed."""

    def body(transport: Any) -> list[int]:
        heartbeat = Heartbeat(transport)
        for exchange in range(2):
            if transport.rank < 3 and (transport.rank, exchange) != (2, 1):
                heartbeat.send()
            barrier(transport)
        deadline, missing = time.monotonic() + patient(10), heartbeat.missing()
        while transport.rank == 0 and missing != [2] and time.monotonic() < deadline:  # datagrams take a moment
            missing = heartbeat.missing()
        barrier(transport)
        heartbeat.close()
        return missing

    assert LockstepWorld(4).run(body)[0] == [2]


def test_minority_ranks() -> None:
    sums: Any
    for sums, odd in (([1, 1], []), ([1, 2, 1], [1]), ([2, 1, 1], [0]), ([1, 2], [1]), ([1, 2, 2, 1], [1, 2])):
        assert minority_ranks(sums) == odd
    assert minority_ranks([1, None, 1]) == [1]


@pytest.mark.parametrize("changed", range(3))
def test_the_rank_with_other_weights_is_reported(changed: int) -> None:
    def body(transport: Any) -> None:
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        # Simulated ranks are threads of one process and share its random generator.
        torch.nn.init.constant_(model[0].weight, 0.5)
        torch.nn.init.constant_(model[0].bias, 0.5)
        model[1].running_mean.fill_(transport.rank)
        check_replicas(model, transport)
        if transport.rank == changed:
            with torch.no_grad():
                model[0].bias[2] = torch.nextafter(model[0].bias[2], torch.tensor(9.0))
        with pytest.raises(RuntimeError, match=rf"parameter 0\.bias of rank {changed} differs from the other"):
            check_replicas(model, transport)

    LockstepWorld(3).run(body)


def test_two_ranks_have_no_majority() -> None:
    def body(transport: Any) -> None:
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, transport.rank)
        with pytest.raises(RuntimeError, match=r"rank 1 differs .*\(no majority: rank 0's value"):
            check_replicas(model, transport)

    LockstepWorld(2).run(body)


def test_every_file_of_the_product_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = code_hashes()
    some = {"train.py", "dgc_training/startup/agreement.py", "dgc_models/__init__.py", "dgc/bucket.py"}
    assert some <= hashes.keys()
    (tmp_path / "dgc_models").mkdir()
    (tmp_path / "dgc_models" / "a.py").write_text("a = 1\n")
    monkeypatch.setattr(agreement, "FOLDERS", (tmp_path / "dgc_models",))
    before = code_hashes()
    (tmp_path / "dgc_models" / "a.py").write_text("a = 2\n")
    assert code_difference(before, code_hashes()) == "dgc_models/a.py"
    assert code_difference(before, before) is None
    assert code_difference({}, {"x.py": "1"}) == "x.py (one of them has no such file)"


def test_the_rank_with_other_code_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = OmegaConf.create({"seed": 1})
    own = threading.local()
    monkeypatch.setattr(agreement, "code_hashes", lambda: own.hashes)

    def body(transport: Any) -> None:
        own.hashes = {"dgc/a.py": "1", "train.py": "2" if transport.rank == 2 else "1"}
        with pytest.raises(UsageError, match=r"rank 2 runs other code than rank 0: train\.py differs"):
            check_agreement(tree, torch.device("cpu"), transport)

    LockstepWorld(3).run(body)


def test_the_rank_that_does_not_wait_is_stuck() -> None:
    waits: Any
    for waits, stuck, why in (
        ([None, (3.0, "loss"), None], None, ""),
        ([None, None], None, ""),
        (
            [(6.0, "dgc0.1.0"), None, (5.5, "dgc0.1.0")],
            1,
            "rank 1 did not join dgc0.1.0, for which the others have waited 6 s$",
        ),
        ([(6.0, "a"), None, None], 1, r"ranks \[1, 2\] did not join a"),
        ([(9.0, "loss"), (9.0, "replicas"), (8.0, "loss")], 1, ".*rank 0 for loss; rank 1 for replicas"),
    ):
        found = find_stuck_rank(waits, 5.0)
        assert (found and found[0]) == stuck
        assert found is None or re.match(why, found[1])


def test_a_watched_transport_records_its_waits() -> None:
    seen: list[Any] = []

    class Slow:
        rank, size, local_rank, local_size, point_to_point = 0, 1, 0, 1, False

        def launch(self, name: Any, requests: Any, communicator: Any = "") -> Any:
            return "work"

        def wait(self, work: Any) -> Any:
            seen.append(watched.waiting)
            return (work,)

    watched = WatchedTransport(cast(Transport, Slow()))
    assert watched.wait(watched.launch("a", ())) == ("work",)
    assert seen[0][1] == "a" and watched.waiting is None


def test_torchrun_ends_with_the_message_of_the_first_rank_and_lists_no_rank_that_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    started = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_ERROR_FILE": str(file)}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert print_error("wrong setting") == 2
    assert ProcessFailure(0, 1, 2, str(file)).message["message"] == "wrong setting"  # type: ignore[index]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    program = "import time; from dgc_training.launcher import print_error; sleep = time.sleep; "
    program += "time.sleep = lambda seconds: (print('waits', flush=True), sleep(60)); print_error('wrong')"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == "waits\n"
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(patient(60)) == 0
