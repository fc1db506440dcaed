"""Digits on 8 simulated ranks: exchanges that select twice are as accurate as the all-gather, with fewer bytes.

All have the same ratio. A step changes at most 2 k elements with them, and with the all-gather up to 8 k.
"""

import json
import statistics
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from simulated import train_on

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1800), pytest.mark.usefixtures("no_type_checks")]
STACK = ["configs/digits/cnn.py", "configs/dgc/wm0.py", "configs/dgc/fp16.py", "configs/dgc/int32.py"]
TOLERANCE = 0.5  # points
WORDS = [
    "--configs.train.num_epochs=30",
    "--configs.train.batch_size=16",
    "--configs.train.warmup_lr_epochs=3",
    "--configs.train.checkpoint_every=null",
    "--configs.train.check_replicas_every=5",
    "--configs.data.num_threads_per_worker=1",
    "--configs.model.width=8",
]


def trained(exchange: str, fold: int, folder: Path) -> Any:
    chosen = [
        f"--configs.train.compression.exchange={exchange}",
        "--configs.train.compression.compress_ratio=0.01",
        f"--configs.dataset.fold={fold}",
        "--run-dir",
        str(folder),
    ]
    train_on(8, ["--configs", *STACK, "--devices", "cpu", *WORDS, *chosen])
    summary = json.loads((folder / "summary.json").read_text())
    return summary["final"]["acc/test_top1"], summary["wire_over_dense"]


def test_fewer_bytes_for_the_same_accuracy(tmp_path: Path) -> None:
    runs: dict[str, list[Any]] = {
        exchange: [trained(exchange, fold, tmp_path / f"{exchange}{fold}") for fold in range(5)]
        for exchange in ("all_gather", "reduce_scatter", "gtopk")
    }
    gathered = runs.pop("all_gather")
    for exchange, others in runs.items():
        differences = [own - all_gather for (own, _), (all_gather, _) in zip(others, gathered, strict=True)]
        mean, error = statistics.fmean(differences), statistics.stdev(differences) / sqrt(len(differences))
        print(f"{exchange} minus all_gather: {mean:.2f} points, standard error {error:.2f}")
        assert mean > -TOLERANCE, (exchange, differences)
        assert others[0][1] < gathered[0][1], exchange
