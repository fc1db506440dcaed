"""Time limits of tests: every one is scaled by the speed of the machine."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from environment import SLOWNESS, patient, python_path, slowness

TESTS = Path(__file__).parent
# .run(..., timeout=60), .wait(60), .join(60), time.monotonic() + 60; of less than 5 seconds it is a pause
CALLS = r"\.(?:run|wait|join|communicate)\((?:[^()]|\([^()]*\))*\btimeout=|\.(?:wait|join)\("
LIMIT = re.compile(rf"(?:{CALLS}|time\.monotonic\(\) \+ )(\d[\d.]*)")


def test_no_time_limit_is_a_bare_number() -> None:
    others = (path for path in TESTS.rglob("*.py") if path != Path(__file__))
    found = {
        path.name: [limit for limit in LIMIT.findall(path.read_text()) if float(limit) >= 5] for path in others
    }
    assert {name: limits for name, limits in found.items() if limits} == {}
    text = "x.run(c(1),\n timeout=5)\np.wait(9)\np.wait(0.1)\nt.join(patient(9))\nx = time.monotonic() + 60"
    assert LIMIT.findall(text) == ["5", "9", "0.1", "60"]


@pytest.mark.timeout(50)
def test_limits_of_pytest_are_scaled_and_started_processes_know_the_speed() -> None:
    assert 40 * slowness() < signal.getitimer(signal.ITIMER_REAL)[0] <= 50 * slowness()
    assert slowness() >= 2 and patient(3) == 3 * slowness()
    words = [sys.executable, "-c", "import environment; print(environment.slowness())"]
    told = subprocess.check_output(words, env={**os.environ, "PYTHONPATH": python_path(TESTS)}, text=True)
    assert float(told) == slowness() == float(os.environ[SLOWNESS])
