"""Demonstration: four ranks train on handwritten digits, once dense and once with DGC at 0.1 % of the gradient.

`make demo` starts both runs anew in runs/demo and compares them. Further arguments are passed to both runs:

    python -m scripts.demo --configs.train.num_epochs 20

Both use a fifth of the experiment's learning rate: 0.02 on four ranks. At 0.1, DGC loses accuracy for some epochs
at the end of its ratio warm-up, and a demonstration has too few epochs to recover it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from dgc_training.logging.formatting import against_dense, human_bytes
from scripts.launch import prepare
from scripts.methods import files_of

RANKS = 4
RUNS = Path("runs/demo")
METHODS = {"dense": "dense", "DGC": "dgc"}  # by name in the output, of the table in scripts/methods.py
SETTINGS = {"num_epochs": 12, "batch_size": 16, "optimizer.lr": 0.005}
METRIC = "acc/test_top1"


def train(method: str, words: list[str]) -> dict[str, Any]:
    """Trains in a new directory and returns the summary. Raises SystemExit with the run's status if it fails."""
    directory = RUNS / method.lower()
    settings = [f"--configs.train.{key}={value}" for key, value in SETTINGS.items()]
    configs = ["--configs", "configs/digits/cnn.py", *files_of(METHODS[method])]
    place = ["--devices", "cpu", "--run-dir", str(directory)]
    command, environment = prepare(RANKS, ["train.py", *configs, *place, *settings, *words])
    print(f"\n=== {method}, {RANKS} ranks", flush=True)
    if status := subprocess.run(command, env=environment, check=False).returncode:
        raise SystemExit(status)
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return summary


def comparison(summaries: dict[str, dict[str, Any]]) -> str:
    """A table of both runs, and their comparison as text."""
    lines = [f"{'':<7} {'accuracy':>9} {'bytes on the wire':>18} {'% of dense':>11} {'seconds':>8}"]
    for method, found in summaries.items():
        share = 100 * found["wire_over_dense"]
        lines.append(
            f"{method:<7} {found['final'][METRIC]:>8.2f}% {human_bytes(found['wire_bytes']):>18} {share:>11.3g} "
            f"{found['seconds']:>8.1f}"
        )
    dense, dgc = summaries["dense"], summaries["DGC"]
    apart = dgc["final"][METRIC] - dense["final"][METRIC]
    lines += [
        "",
        f"DGC: {against_dense(dgc['wire_bytes'], dgc['dense_wire_bytes'])} over the whole run, warm-up included.",
        f"Its accuracy after the last epoch differs by {apart:+.2f} points from dense, with one seed.",
        "The ranks share this machine, so fewer bytes save no time here: compression is for slow networks.",
        f"Curves: tensorboard --logdir {RUNS}; figures: python -m scripts.plot {RUNS}/dense {RUNS}/dgc",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    shutil.rmtree(RUNS, ignore_errors=True)  # an earlier demonstration has curves that would mix with the new ones
    print(f"\n{comparison({method: train(method, sys.argv[1:]) for method in METHODS})}")
