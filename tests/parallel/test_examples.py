"""Every script of examples/ trains, and its ranks end with the state that examples/README.md promises."""

import json
import re
import sys
from pathlib import Path

import pytest
from parallel.ranks import REPOSITORY, mpirun, torchrun, two_agents

EXAMPLES = REPOSITORY / "examples"
SCRIPTS = sorted(EXAMPLES.glob("train_*.py"))  # with Horovod


@pytest.mark.horovod
def test_the_examples_train_and_end_with_one_state(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("examples_worker.py")
    done = mpirun(2, ["-W", "error", *map(str, [worker, tmp_path, 5, *SCRIPTS])])
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert len(first) == len(SCRIPTS) == 4
    for name, end in first.items():
        assert len(end["losses"]) == 5 and end["losses"][-1] < 0.4 * end["losses"][0], (name, end)
        assert end["accuracy"] > 80, (name, end)
        assert end["state"] == second[name]["state"], name
    assert len({end["state"] for end in first.values()}) == 4
    assert done.stdout.count("epoch 4: loss") == 4


def test_fsdp2_on_two_machines() -> None:
    words = ["--no-python", sys.executable, "-W", "error", str(EXAMPLES / "fsdp2.py"), "12"]
    done = two_agents(4, words)
    assert done.returncode == 0, done.stdout + done.stderr
    epochs = re.findall(r"epoch \d+: loss (\S+), test accuracy (\S+) %", done.stdout)
    assert len(epochs) == 12 and float(epochs[-1][0]) < 0.4 * float(epochs[0][0])
    assert float(epochs[-1][1]) > 85
    sent, dense = map(float, re.findall(r"([\d.]+) MB", done.stdout))
    assert sent < dense / 10


def test_ddp() -> None:
    done = torchrun(2, ["-W", "error", str(EXAMPLES / "ddp.py"), "8"])
    assert done.returncode == 0, done.stdout + done.stderr
    epochs = re.findall(r"epoch \d+: loss (\S+), test accuracy (\S+) %", done.stdout)
    assert len(epochs) == 8 and float(epochs[-1][0]) < 0.1 * float(epochs[0][0])
    assert float(epochs[-1][1]) > 90
    sent, dense = map(float, re.findall(r"([\d.]+) MB", done.stdout))
    assert sent < dense / 10


def test_the_page_names_every_script() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"[{path.name}]({path.name})" in page for path in EXAMPLES.glob("*.py"))
    assert all(len(path.read_text().splitlines()) < 80 for path in EXAMPLES.glob("*.py"))
