"""Time limits of tests: every one is scaled by the speed of the machine."""

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from environment import SLOWNESS, patient, python_path, slowness

TESTS = Path(__file__).parent
PAUSE = 5.0  # seconds; a shorter wait is a pause, no limit


def unscaled(tree: ast.AST) -> Iterator[int]:
    """Lines with a limit that is a bare number: run(timeout=60), .wait(60), .join(60), time.monotonic() + 60."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr):
            continue
        limits: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("run", "wait", "join", "communicate"):
                limits = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
            if node.func.attr in ("wait", "join"):
                limits += node.args
        elif isinstance(node, ast.BinOp) and ast.unparse(node.left) == "time.monotonic()":
            limits = [node.right]
        numbers = [limit.value for limit in limits if isinstance(limit, ast.Constant)]
        if any(isinstance(number, int | float) and number >= PAUSE for number in numbers):
            yield node.lineno


def test_no_time_limit_is_a_bare_number() -> None:
    files = [*TESTS.rglob("*.py")]
    assert [f"{path.name}:{line}" for path in files for line in unscaled(ast.parse(path.read_text()))] == []
    assert [*unscaled(ast.parse("x.run(c, timeout=5)\np.wait(9)\np.wait(0.1)\nt.join(patient(9))"))] == [1, 2]


@pytest.mark.timeout(50)
def test_limits_of_pytest_are_scaled_and_started_processes_know_the_speed() -> None:
    assert 40 * slowness() < signal.getitimer(signal.ITIMER_REAL)[0] <= 50 * slowness()
    assert slowness() >= 2 and patient(3) == 3 * slowness()
    words = [sys.executable, "-c", "import environment; print(environment.slowness())"]
    told = subprocess.check_output(words, env={**os.environ, "PYTHONPATH": python_path(TESTS)}, text=True)
    assert float(told) == slowness() == float(os.environ[SLOWNESS])
