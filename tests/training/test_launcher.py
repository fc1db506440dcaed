"""What a rank reports before anything has started."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from environment import patient
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from dgc_training.launcher import print_error

RANKS = "import time; from dgc_training.launcher import print_error; sleep = time.sleep; "
RANKS += "time.sleep = lambda seconds: (print('waits', flush=True), sleep(60)); print_error('wrong')"


def test_torchrun_ends_with_the_message_of_the_first_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert print_error("wrong setting") == 2
    assert ProcessFailure(0, 1, 2, str(file)).message["message"] == "wrong setting"  # type: ignore[index]


def test_torchrun_lists_no_rank_that_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen([sys.executable, "-c", RANKS], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == "waits\n"
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(patient(60)) == 0
