"""Digits on 8 simulated ranks: exchanges that select twice are as accurate as the all-gather, with fewer bytes.

A step changes at most k elements with them, and with the all-gather up to 8 k. They therefore get twice the ratio.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

import train
from dgc.comm.lockstep import LockstepWorld
from dgc_training.config import load
from dgc_training.startup.arguments import parse_arguments

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600), pytest.mark.usefixtures("no_type_checks")]
STACK = ["configs/digits/cnn.py", "configs/dgc/wm0.py", "configs/dgc/int32.py"]
WORDS = [
    "--configs.train.num_epochs=30",
    "--configs.train.batch_size=16",
    "--configs.train.warmup_lr_epochs=3",
    "--configs.train.checkpoint_every=null",
    "--configs.train.check_replicas_every=5",
    "--configs.data.num_threads_per_worker=1",
    "--configs.model.width=8",
]


def trained(exchange: str, ratio: float, seed: int, folder: Path) -> Any:
    chosen = [
        f"--configs.train.compression.exchange={exchange}",
        f"--configs.train.compression.compress_ratio={ratio}",
        f"--configs.seed={seed}",
        "--run-dir",
        str(folder),
    ]
    args, overrides = parse_arguments(["--configs", *STACK, "--devices", "cpu", *WORDS, *chosen])
    tree = load(args.configs, overrides)
    LockstepWorld(8).run(lambda transport: train.run(args, tree, transport))
    summary = json.loads((folder / "summary.json").read_text())
    return summary["final"]["acc/test_top1"], summary["wire_over_dense"]


def test_fewer_bytes_for_the_same_accuracy(tmp_path: Path) -> None:
    results = {}
    for exchange, ratio in (("all_gather", 0.01), ("reduce_scatter", 0.02), ("gtopk", 0.02)):
        runs = [trained(exchange, ratio, seed, tmp_path / f"{exchange}{seed}") for seed in (1, 2)]
        results[exchange] = tuple(statistics.fmean(values) for values in zip(*runs, strict=True))
    accuracy, nbytes = results.pop("all_gather")
    for exchange, (found, sent) in results.items():
        assert found > accuracy - 1.0 and sent < nbytes, (exchange, found, accuracy, sent, nbytes)
