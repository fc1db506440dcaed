"""Rates, delays and refusals of the network laboratory. tests/parallel/test_netlab.py makes hosts."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from cases import case

from benchmarks import laboratory as module
from benchmarks.laboratory import Laboratory, LaboratoryError, RaisedSigterm, cores_of, parse_latency, parse_rate
from benchmarks.launches import measure, ranks_per_host


def test_rates_and_delays() -> None:
    assert [parse_rate(text) for text in ("100mbit", "2.5gbit", "5000kbit")] == [1e8, 2.5e9, 5e6]
    assert [parse_latency(text) for text in ("500us", "10ms", "1s")] == pytest.approx([5e-4, 1e-2, 1.0])
    for rate in ("", "fast", "100", "100 mbit", "-1gbit", "100MB", "1kbit", "101gbit"):
        with case(rate), pytest.raises(ValueError, match="rate"):
            Laboratory(2, rate)
    for delay in ("", "1", "0ms", "2s", "1min"):
        with case(delay), pytest.raises(ValueError, match="delay|latency"):
            Laboratory(2, "1gbit", delay)


def test_hosts_ranks_and_their_cores() -> None:
    assert [cores_of(host, 2, [3, 4, 5, 6, 7]) for host in range(2)] == [[3, 4], [5, 6]]
    assert [cores_of(host, 4, [0, 1, 2, 3]) for host in range(4)] == [[0], [1], [2], [3]]
    assert [cores_of(host, 4, [5, 7]) for host in range(4)] == [[5], [7], [5], [7]]
    assert ranks_per_host(8, 4) == 2
    for ranks in (0, 3, 6, -4):
        with pytest.raises(ValueError, match="a multiple of the 4 hosts"):
            ranks_per_host(ranks, 4)
    refused: Any = [(hosts, "1gbit", "number of hosts must be 2 to 64") for hosts in (-1, 0, 1, 65)]
    not_whole = "hosts must be a whole number from 2 to 64, not"
    refused += [(hosts, "1gbit", not_whole) for hosts in ("2", 2.5, True, None)]
    refused += [(2, 100, "rate must be from 1mbit to 100gbit, such as 2.5gbit, not 100")]
    for hosts, rate, message in refused:
        with case(hosts), pytest.raises(ValueError, match=f"^(the )?{message}"):
            Laboratory(hosts, rate)


def test_what_is_missing_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is made."""
    missing: Any = [
        ("os.geteuid", lambda: 1000, "need root"),
        ("shutil.which", lambda tool: None if tool == "tc" else tool, "tc is missing.*iproute2"),
        ("sys.platform", "darwin", "need Linux"),
    ]
    for what, value, message in missing:
        with case(what), monkeypatch.context() as patch, pytest.raises(LaboratoryError, match=message):
            patch.setattr(module, "_run", lambda command: pytest.fail(f"{command} was run"))
            patch.setattr(f"{module.__name__}.{what}", value)
            Laboratory(2, "1gbit").__enter__()
    command = [sys.executable, "-m", "benchmarks.netlab", "--hosts", "2", "--rate", "fast", "--", "train.py"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("netlab: the rate must be from")
    assert done.stderr.count("\n") == 1 and not done.stdout


def test_a_link_on_which_nothing_arrives_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    laboratory = Laboratory(2, "1gbit")
    monkeypatch.setattr(laboratory, "inside", lambda host, command: ["true"])
    traceback = "Traceback (most recent call last):\n  ...\nOSError: [Errno 113] No route to host\n"
    failed = subprocess.CompletedProcess("send", 1, "", traceback)
    late = subprocess.TimeoutExpired("send", 70.0)
    for outcome, reason in ((late, "no answer in 70 s"), (failed, "No route to host")):
        monkeypatch.setattr(laboratory, "run", Mock(side_effect=[outcome]))
        with pytest.raises(LaboratoryError, match=f"could not be measured: .*{reason}\nFrames probably") as caught:
            measure(laboratory)
        assert "Traceback" not in str(caught.value)


def test_laboratories_that_start_and_end_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    removed: list[int] = []
    monkeypatch.setattr(module, "LOCKS", tmp_path)
    monkeypatch.setattr(module, "remove", removed.append)
    (tmp_path / "7").write_text("")
    (tmp_path / "8").symlink_to(tmp_path / "vanished")  # as if removed before it is opened
    module.remove_leftovers()
    assert removed == [7]

    # the process ends its laboratory and makes another one before its old file is locked here
    real = fcntl.flock

    def flock(file: Any, how: int) -> None:
        (tmp_path / "7").unlink()
        (tmp_path / "7").write_text("")
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    module.remove_leftovers()
    monkeypatch.setattr(fcntl, "flock", real)
    assert removed == [7], "a laboratory in use"

    # another process looks at the file for a moment, or removes it
    path = tmp_path / "9"
    other = module.lock(path)
    assert other is not None

    def let_go() -> None:
        time.sleep(0.2)
        path.unlink()
        other.close()

    thread = threading.Thread(target=let_go)
    thread.start()
    own = module.lock(path)
    thread.join()
    assert own is not None and os.path.samestat(os.fstat(own.fileno()), path.stat())
    monkeypatch.setattr(module, "PAUSE", 0.001)
    assert module.lock(path) is None and module.try_lock(path) is None
    own.close()


def test_sigterm_waits_while_hosts_are_removed_and_the_default_handler_returns() -> None:
    raised = RaisedSigterm()
    raised.install()
    with pytest.raises(SystemExit, match="143"):
        signal.raise_signal(signal.SIGTERM)
    raised.hold()
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        raised.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    thread = threading.Thread(target=raised.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the user's own
        raised.install()
        raised.restore()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
