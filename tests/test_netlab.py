"""Rates, delays and refusals of the network laboratory. tests/parallel/test_netlab.py makes hosts."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.netlab import Laboratory, LaboratoryError
from benchmarks.netlab import laboratory as module
from benchmarks.netlab.laboratory import cores_of
from benchmarks.netlab.ranks import ranks_per_host
from benchmarks.netlab.rates import parse_latency, parse_rate


def test_rates_and_delays() -> None:
    assert [parse_rate(text) for text in ("100mbit", "2.5gbit", "5000kbit")] == [1e8, 2.5e9, 5e6]
    assert [parse_latency(text) for text in ("500us", "10ms", "1s")] == pytest.approx([5e-4, 1e-2, 1.0])


@pytest.mark.parametrize("text", ["", "fast", "100", "100 mbit", "-1gbit", "100MB", "1kbit", "101gbit"])
def test_another_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="rate"):
        Laboratory(2, text)


@pytest.mark.parametrize("text", ["", "1", "0ms", "2s", "1min"])
def test_another_delay_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="delay|latency"):
        Laboratory(2, "1gbit", text)


def test_each_host_has_its_share_of_the_cores() -> None:
    assert [cores_of(host, 2, [3, 4, 5, 6, 7]) for host in range(2)] == [[3, 4], [5, 6]]
    assert [cores_of(host, 4, [0, 1, 2, 3]) for host in range(4)] == [[0], [1], [2], [3]]
    assert [cores_of(host, 4, [5, 7]) for host in range(4)] == [[5], [7], [5], [7]]


def test_numbers_of_hosts_and_ranks() -> None:
    assert ranks_per_host(8, 4) == 2
    for ranks in (0, 3, 6, -4):
        with pytest.raises(ValueError, match="a multiple of the 4 hosts"):
            ranks_per_host(ranks, 4)
    for hosts in (-1, 0, 1, 65):
        with pytest.raises(ValueError, match="the number of hosts must be 2 to 64"):
            Laboratory(hosts, "1gbit")


@pytest.mark.parametrize(
    ("what", "value", "message"),
    [
        ("os.geteuid", lambda: 1000, "need root"),
        ("shutil.which", lambda tool: None if tool == "tc" else tool, "tc is missing.*iproute2"),
        ("sys.platform", "darwin", "need Linux"),
    ],
)
def test_what_this_machine_lacks_is_one_message_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, what: str, value: object, message: str
) -> None:
    monkeypatch.setattr(module, "_run", lambda command: pytest.fail(f"{command} was run"))
    monkeypatch.setattr(f"{module.__name__}.{what}", value)
    with pytest.raises(LaboratoryError, match=message):
        Laboratory(2, "1gbit").__enter__()


def test_the_command_line_prints_one_message() -> None:
    command = [sys.executable, "-m", "benchmarks.netlab", "--hosts", "2", "--rate", "fast", "--", "train.py"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("netlab: 'fast' is not a rate")
    assert done.stderr.count("\n") == 1 and not done.stdout
