"""README's run of DGC on handwritten digits keeps its accuracy after the warm-up, on 4 simulated ranks."""

import re
import shlex
from pathlib import Path

import pytest
from environment import REPOSITORY
from simulated import events_of, train_on

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1800)]
WARM_UP = 5  # epochs


@pytest.mark.parametrize("fold", range(5))
def test_no_epoch_after_the_warm_up_is_below_95_percent(fold: int, tmp_path: Path) -> None:
    line = r"horovodrun -np 4 (python train\.py --configs configs/digits/cnn\.py \\\n.*?)\n\n"
    command = re.search(line, (REPOSITORY / "README.md").read_text(), re.S)
    assert command is not None
    words = shlex.split(command[1].replace("\\\n", " "))[2:]
    run = tmp_path / "run"
    train_on(4, [*words, f"--configs.dataset.fold={fold}", "--devices", "cpu", "--run-dir", str(run)])
    accuracy = [point.value for point in events_of(run).Scalars("acc/test_top1")]
    assert len(accuracy) == 40 and min(accuracy[WARM_UP:]) > 95 and accuracy[-1] > 98, accuracy
