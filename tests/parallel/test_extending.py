"""docs/extending.md: its files and its commands work as they stand there, with another folder for ~/my."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from documented import DOCS, code
from environment import REPOSITORY, patient
from warm import python

from scripts.launch import prepare

PAGE = "extending.md"


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


@pytest.mark.proof
@pytest.mark.horovod
def test_the_page_s_files_and_commands(tmp_path: Path) -> None:
    my = tmp_path / "my"
    my.mkdir()
    for block in code(PAGE):
        name = re.match(r"# ~/my/(\w+\.py)\n", block)
        assert name, block
        (my / name[1]).write_text(block)
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / PAGE).read_text(), re.S)
    commands = "".join(blocks).replace("~/my", shlex.quote(str(my)))
    _, environment = prepare(2, [])
    environment |= {"OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(python()).parent}:{environment['PATH']}"
    environment["PYTHONPATH"] = f"{REPOSITORY}:{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        ["bash", "-euxc", commands],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(380),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    assert re.findall(r"(\d+) passed", done.stdout) == ["19"]
    ends = {run.name: summary(run) for run in (my / "runs").iterdir()}
    ranks = {name: end["ranks"] for name, end in ends.items()}
    assert ranks == {"experiment": 1, "ternary": 2, "share": 1, "chords": 2, "smoothed": 1}
    for run in ("experiment", "share", "chords"):
        assert ends[run]["metric"] == "recall/test_malignant" and ends[run]["best"]["recall/test_malignant"] > 80
        assert ends[run]["final"]["acc/test_top1"] > 90, (run, ends[run])
    assert ends["ternary"]["final"]["acc/test_top1"] > 50 and ends["ternary"]["wire_over_dense"] < 0.2
