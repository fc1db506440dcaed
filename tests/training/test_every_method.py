"""Every config file that names a method trains: a few steps on digits, two simulated ranks."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from simulated import train_on

CONFIGS = Path(__file__).parents[2] / "configs"
FOLDERS = ("chunks", "powersgd", "threshold", "quant", "sparse", "adam", "route")
QUICK = [
    "--configs.train.num_epochs=1",
    "--configs.train.batch_size=180",
    "--configs.train.warmup_lr_epochs=0",
    "--configs.train.checkpoint_every=null",
    "--configs.train.check_replicas_every=1",
    "--configs.data.num_threads_per_worker=1",
    "--configs.model.width=8",
]
BEFORE = {
    "server": ["configs/threshold/2bit.py"],
    "matrices_only": ["configs/quant/qsgd.py"],
    "reduce_scatter": ["configs/dgc/wm0.py", "configs/dgc/int32.py"],
    "gtopk": ["configs/dgc/wm0.py", "configs/dgc/int32.py"],
    "adam/fp16": ["configs/adam/zero_one_adam.py"],
}
ZERO_ONE = ["--configs.train.local.var_freeze_step=2", "--configs.train.check_replicas_every=0"]
# the small model is less than one chunk of the default size, and an epoch has four steps
ALSO = {
    "chunks": ["--configs.train.compression.chunk_size=200"],
    "onebit_adam": ["--configs.train.optimizer.freeze_step=2"],
    "zero_one_adam": ZERO_ONE,
    "adam/fp16": ZERO_ONE,
    "dgc_adam": ["--configs.train.optimizer.freeze_step=2"],
    "dgc": ["--configs.train.compression.warmup_epochs=0"],
}
FILES = [path for folder in FOLDERS for path in sorted((CONFIGS / folder).glob("*.py")) if path.stem != "__init__"]
FILES += [CONFIGS / "dgc/reduce_scatter.py", CONFIGS / "dgc/gtopk.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
@pytest.mark.usefixtures("no_type_checks")
def test_it_trains(path: Any, tmp_path: Path) -> None:
    folder, stem = path.parent.name, path.stem
    before = BEFORE.get(f"{folder}/{stem}", BEFORE.get(stem, []))
    words = ["--configs", "configs/digits/cnn.py", *before, str(path.relative_to(CONFIGS.parent))]
    also = ALSO.get(f"{folder}/{stem}", ALSO.get(folder, ALSO.get(stem, [])))
    words += ["--devices", "cpu", *QUICK, *also, "--run-dir", str(tmp_path / "run")]
    train_on(2, words)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 < summary["wire_over_dense"] < 1.0
    assert math.isfinite(summary["best"]["acc/test_top1"])
