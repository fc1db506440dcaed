"""600 damaged inputs: each run trains or ends with a message. None exceeds its time limit or changes a file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CASES = [("dgc", "config", 110), ("dgc", "words", 70), ("dgc", "checkpoint", 90), ("dgc", "saved_config", 30)]
OTHERS = ("powersgd", "qsgd", "2bit", "onebit", "osgp", "diloco")
CASES += [(method, kind, n) for method in OTHERS for kind, n in (("config", 15), ("words", 5), ("checkpoint", 30))]


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("method", "kind", "count"), CASES)
def test_mutated(method: str, kind: str, count: int) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "proof.mutations", kind, "0", str(count), method],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/tests", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
