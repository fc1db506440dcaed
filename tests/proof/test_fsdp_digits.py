"""FSDP2 on two machines: compressed training is as accurate as native HSDP."""

import json
import os
from pathlib import Path

import pytest
from environment import REPOSITORY
from parallel.ranks import two_agents


@pytest.mark.proof
@pytest.mark.timeout(3000)
def test_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seeds on folds of their own. 0.5 points are less than two test images."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(REPOSITORY / "examples"), os.environ.get("PYTHONPATH", "")])
    )
    done = two_agents(4, [str(Path(__file__).with_name("fsdp_digits.py"))], timeout=2400)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(abs(result["points"]) <= 0.5 for result in found.values()), done.stdout
    assert found["DGC 1 %"]["factor"] > 20 and found["PowerSGD 4"]["factor"] > 5
