"""Digits on 8 simulated ranks: exchanges that select twice are as accurate as the all-gather, with fewer bytes."""

import statistics
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from simulated import CNN, summary_of, train_in

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1800), pytest.mark.usefixtures("no_type_checks")]
STACK = [CNN, "configs/dgc/wm0.py", "configs/dgc/fp16.py", "configs/dgc/int32.py"]
TOLERANCE = 0.5  # points
SETTINGS = "num_epochs=30 batch_size=16 warmup_lr_epochs=3 checkpoint_every=null check_replicas_every=5"
SETTINGS += " compression.compress_ratio=0.01"


def trained(exchange: str, fold: int, folder: Path) -> Any:
    settings = [f"train.{setting}" for setting in f"{SETTINGS} compression.exchange={exchange}".split()]
    settings += ["data.num_threads_per_worker=1", "model.width=8", f"dataset.fold={fold}"]
    train_in(folder, STACK, settings, size=8)
    return summary_of(folder)["final"]["acc/test_top1"], summary_of(folder)["wire_over_dense"]


def test_fewer_bytes_for_the_same_accuracy(tmp_path: Path) -> None:
    runs: dict[str, list[Any]] = {
        exchange: [trained(exchange, fold, tmp_path / f"{exchange}{fold}") for fold in range(5)]
        for exchange in ("all_gather", "reduce_scatter")
    }
    gathered = runs.pop("all_gather")
    for exchange, others in runs.items():
        differences = [own - all_gather for (own, _), (all_gather, _) in zip(others, gathered, strict=True)]
        mean, error = statistics.fmean(differences), statistics.stdev(differences) / sqrt(len(differences))
        print(f"{exchange} minus all_gather: {mean:.2f} points, standard error {error:.2f}")
        assert mean > -TOLERANCE, (exchange, differences)
        assert others[0][1] < gathered[0][1], exchange
