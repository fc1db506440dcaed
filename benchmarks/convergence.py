"""Does compression keep the accuracy? Paired folds of one task, each method against one, same steps and rate.

    python -m benchmarks.convergence --task digits --ranks 4 --folds 5 --methods dense dgc

Each fold's test images are tested by a model that never saw them; over all folds every image is tested once.
The accuracy is that of the last epoch: no epoch is chosen by its test accuracy. Prints each run, the paired
difference to the first method with its standard error, the bytes that one rank sent, and, last, one line of JSON.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scripts.launch import prepare

DGC = ("configs/dgc/wm5.py", "configs/dgc/fp16.py", "configs/dgc/int32.py")
TASKS = {"digits": ("configs/digits/cnn.py",), "digits-resnet20": ("configs/digits/resnet20.py",)}
METHODS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "dgc": DGC,
    "dgc-no-warm-up": ("configs/dgc/wm0.py", *DGC[1:]),
    "dgc-no-masking": (*DGC, "configs/dgc/nm.py"),
    "dgc-fp32-int64": DGC[:1],
    "dgc-fp32-rice": (*DGC[:1], "configs/dgc/rice.py"),
    "dgc-bf16-packed": (*DGC[:1], "configs/dgc/bf16.py", "configs/dgc/packed.py"),
    "dgc-int8-rice": (*DGC[:1], "configs/dgc/int8.py", "configs/dgc/rice.py"),
    "dgc-sign-rice": (*DGC[:1], "configs/dgc/sign.py", "configs/dgc/rice.py"),
    "exact": (*DGC, "configs/selection/exact.py"),
    "histogram": (*DGC, "configs/selection/histogram.py"),
    "predicted": (*DGC, "configs/selection/predicted.py"),
    "sampled": (*DGC, "configs/selection/sampled.py"),
    "trimmed": (*DGC, "configs/selection/trimmed.py"),
    "bisection": (*DGC, "configs/selection/bisection.py"),
    "mstopk": (*DGC, "configs/selection/mstopk.py"),
    "laplace": (*DGC, "configs/selection/laplace.py"),
    "exponential": (*DGC, "configs/selection/exponential.py"),
    "gaussian": (*DGC, "configs/selection/gaussian.py"),
}


def run(ranks: int, configs: tuple[str, ...], overrides: list[str], directory: Path) -> dict[str, Any]:
    words = ["train.py", "--configs", *configs, "--run-dir", str(directory), "--devices", "cpu", *overrides]
    command, environment = prepare(ranks, words)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return summary


def standard_error(values: list[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folds", type=int, default=5, help="folds to run, of 5")
    parser.add_argument("--epochs", type=int, default=34)
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["dense", "dgc"],
                        help="the first is what the others are compared with")
    parser.add_argument("overrides", nargs="*", metavar="--configs.KEY=VALUE", help="for every run, after --")
    args = parser.parse_args()
    print(f"{args.task}, {args.ranks} ranks, {args.folds} folds, {args.epochs} epochs of batches of ", end="")
    print(f"{args.batch_size} per rank, python {sys.version.split()[0]}", flush=True)
    summaries: dict[str, list[dict[str, Any]]] = {method: [] for method in args.methods}
    with tempfile.TemporaryDirectory() as scratch:
        for fold in range(args.folds):
            for method in args.methods:
                overrides = [
                    f"--configs.dataset.fold={fold}",
                    f"--configs.train.num_epochs={args.epochs}",
                    f"--configs.train.batch_size={args.batch_size}",
                    *args.overrides,
                ]
                configs = (*TASKS[args.task], *METHODS[method])
                summary = run(args.ranks, configs, overrides, Path(scratch, f"{method}-{fold}"))
                summaries[method].append(summary)
                print(
                    f"fold {fold}  {method:<16} accuracy {summary['final']['acc/test_top1']:6.2f} %   "
                    f"{summary['payload_bytes'] / 1e6:8.2f} MB sent per rank   {summary['seconds']:6.1f} s",
                    flush=True,
                )
    report(args.methods, summaries)


def report(methods: list[str], summaries: dict[str, list[dict[str, Any]]]) -> None:
    accuracy = {m: [s["final"]["acc/test_top1"] for s in summaries[m]] for m in methods}
    bytes_sent = {m: sum(s["payload_bytes"] for s in summaries[m]) for m in methods}
    first = methods[0]
    print(f"\n{'method':<16} {'accuracy %':>10} {'minus ' + first:>20} {'std. error':>10} {'fewer bytes':>11}")
    result: dict[str, Any] = {}
    for m in methods:
        differences = [a - b for a, b in zip(accuracy[m], accuracy[first], strict=True)]
        row = {
            "accuracy": mean(accuracy[m]),
            "difference": mean(differences),
            "standard_error": standard_error(differences),
            "payload_bytes": bytes_sent[m],
            "fewer_bytes": bytes_sent[first] / bytes_sent[m],
        }
        result[m] = row
        print(
            f"{m:<16} {row['accuracy']:10.2f} {row['difference']:20.2f} {row['standard_error']:10.2f} "
            f"{row['fewer_bytes']:10.1f}x"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
