"""Accuracy with compression: paired folds of one task, all methods compared with the first, same steps and rate.

    python -m benchmarks.convergence --task digits --ranks 4 --folds 5 --methods dense dgc

The test images of a fold are not used to train its model. Over all folds every image is tested once. The accuracy
is that of the last epoch, so no epoch is selected by its test accuracy. The output has each run, the paired
difference to the first method with its standard error, the wire bytes of one rank compared with a dense fp32
all-reduce (docs/bytes.md), and a last line of JSON.

With --simulate the ranks are threads of one process, which exchange the same messages without Horovod and MPI. One
run at a time uses each core. Many runs on few cores then take a third of the time.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import train
from benchmarks.results import print_json
from dgc.comm.lockstep import LockstepWorld
from dgc_training.config import load
from dgc_training.startup.arguments import parse_arguments
from scripts.launch import prepare, usable_cores

DGC = ("configs/dgc/wm5.py", "configs/dgc/fp16.py", "configs/dgc/int32.py")
TASKS = {"digits": ("configs/digits/cnn.py",), "digits-resnet20": ("configs/digits/resnet20.py",)}
METHODS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "fp16": ("configs/dense/fp16.py",),
    "dgc": DGC,
    "dgc-no-warm-up": ("configs/dgc/wm0.py", *DGC[1:]),
    "dgc-no-masking": (*DGC, "configs/dgc/nm.py"),
    "dgc-reduce-scatter": (*DGC, "configs/dgc/reduce_scatter.py"),
    "dgc-gtopk": (*DGC, "configs/dgc/gtopk.py"),
    "dgc-no-warm-up-reduce-scatter": ("configs/dgc/wm0.py", *DGC[1:], "configs/dgc/reduce_scatter.py"),
    "dgc-no-warm-up-gtopk": ("configs/dgc/wm0.py", *DGC[1:], "configs/dgc/gtopk.py"),
    "dgc-fp32-int64": DGC[:1],
    "dgc-fp32-rice": (*DGC[:1], "configs/dgc/rice.py"),
    "dgc-bf16-packed": (*DGC[:1], "configs/dgc/bf16.py", "configs/dgc/packed.py"),
    "dgc-int8-rice": (*DGC[:1], "configs/dgc/int8.py", "configs/dgc/rice.py"),
    "dgc-2-bits-rice": (*DGC[:1], "configs/dgc/twobit.py", "configs/dgc/rice.py"),
    "dgc-sign-rice": (*DGC[:1], "configs/dgc/sign.py", "configs/dgc/rice.py"),
    "dgc-sign-rice-dense-fp32": (
        *DGC[:1],
        "configs/dgc/sign.py",
        "configs/dgc/rice.py",
        "configs/dgc/dense_fp32.py",
    ),
    "chunks": ("configs/chunks/wm5.py",),
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
    "powersgd-1": ("configs/powersgd/rank1.py",),
    "powersgd-2": ("configs/powersgd/rank2.py",),
    "powersgd-4": ("configs/powersgd/rank4.py",),
    "powersgd-2-fp16": ("configs/powersgd/rank2.py", "configs/powersgd/fp16.py"),
    "powersgd-2-paper": ("configs/powersgd/rank2.py", "configs/powersgd/paper.py"),
    "powersgd-2-square": ("configs/powersgd/rank2.py", "configs/powersgd/square.py"),
    "powersgd-adaptive": ("configs/powersgd/adaptive.py",),
    "2bit": ("configs/threshold/2bit.py",),
    "2bit-adaptive": ("configs/threshold/adaptive.py",),
    "1bit": ("configs/threshold/1bit.py",),
    "signsgd": ("configs/quant/signsgd.py",),
    "signum": ("configs/quant/signum.py",),
    "scaled-sign": ("configs/quant/scaled_sign.py",),
    "onebit": ("configs/quant/onebit.py",),
    "qsgd": ("configs/quant/qsgd.py",),
    "terngrad": ("configs/quant/terngrad.py",),
    "natural": ("configs/quant/natural.py",),
    "blockwise": ("configs/quant/blockwise.py",),
    "topk": ("configs/sparse/topk.py",),
    "threshold-v": ("configs/sparse/threshold_v.py",),
    "random-k": ("configs/sparse/random_k.py",),
    "random-block": ("configs/sparse/random_block.py",),
    "svd": ("configs/sparse/svd.py",),
    "atomo": ("configs/sparse/atomo.py",),
    "ar": ("configs/gossip/ar.py",),
    "sgp": ("configs/gossip/sgp.py",),
    "sgp-fp16": ("configs/gossip/sgp.py", "configs/gossip/fp16.py"),
    "sgp-int8": ("configs/gossip/sgp.py", "configs/gossip/int8.py"),
    "osgp": ("configs/gossip/osgp.py",),
    "dpsgd": ("configs/gossip/dpsgd.py",),
    "adpsgd": ("configs/gossip/adpsgd.py",),  # under mpirun only
    "pga": ("configs/gossip/sgp.py", "configs/average/pga.py"),
    "slowmo": ("configs/gossip/sgp.py", "configs/average/slowmo.py"),
    "local-sgd": ("configs/average/local_sgd.py",),
    "diloco": ("configs/average/diloco.py",),
}


def start(ranks: int, words: list[str]) -> None:
    """Run train.py with these arguments under mpirun."""
    command, environment = prepare(ranks, ["train.py", *words])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def simulate(ranks: int, words: list[str]) -> None:
    """Run train.py with these arguments, with its ranks in this process."""
    args, overrides = parse_arguments(words)
    tree = load(args.configs, overrides)
    with redirect_stdout(StringIO()):
        LockstepWorld(ranks).run(lambda transport: train.run(args, tree, transport))


def standard_error(values: list[float]) -> float | None:
    """Return the standard error of the mean. None for a single value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folds", type=int, default=5, help="folds to run, of 5")
    parser.add_argument("--epochs", type=int, default=34)
    parser.add_argument("--batch-size", type=int, default=8, help="per rank")
    parser.add_argument("--simulate", action="store_true", help="ranks in one process, without Horovod")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["dense", "dgc"],
                        help="the others are compared with the first")
    parser.add_argument("overrides", nargs="*", metavar="--configs.KEY=VALUE", help="for every run, after --")
    args = parser.parse_args()
    print(f"{args.task}, {args.ranks} ranks, {args.folds} folds, {args.epochs} epochs of batches of ", end="")
    print(f"{args.batch_size} per rank, python {sys.version.split()[0]}", flush=True)
    runs = [(fold, method) for fold in range(args.folds) for method in args.methods]
    summaries: dict[str, list[dict[str, Any]]] = {method: [] for method in args.methods}
    jobs, train_once = (usable_cores(), simulate) if args.simulate else (1, start)
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        places = [Path(scratch, f"{method}-{fold}") for fold, method in runs]
        words = [to_train(args, fold, method, place) for (fold, method), place in zip(runs, places, strict=True)]
        ended = pool.map(train_once, [args.ranks] * len(runs), words)
        for (fold, method), place, _ in zip(runs, places, ended, strict=True):
            summary = json.loads((place / "summary.json").read_text())
            summaries[method].append(summary)
            print(
                f"fold {fold}  {method:<18} accuracy {summary['final']['acc/test_top1']:6.2f} %   "
                f"{summary['wire_bytes'] / 1e6:8.2f} MB on the wire per rank   {summary['seconds']:6.1f} s",
                flush=True,
            )
    report(args.methods, summaries)


def to_train(args: argparse.Namespace, fold: int, method: str, place: Path) -> list[str]:
    """Return the arguments of train.py for one run."""
    return [
        *("--configs", *TASKS[args.task], *METHODS[method], "--run-dir", str(place), "--devices", "cpu"),
        f"--configs.dataset.fold={fold}",
        f"--configs.train.num_epochs={args.epochs}",
        f"--configs.train.batch_size={args.batch_size}",
        *args.overrides,
    ]


def report(methods: list[str], summaries: dict[str, list[dict[str, Any]]]) -> None:
    accuracy = {m: [s["final"]["acc/test_top1"] for s in summaries[m]] for m in methods}
    wire = {m: sum(s["wire_bytes"] for s in summaries[m]) for m in methods}
    dense = {m: sum(s["dense_wire_bytes"] for s in summaries[m]) for m in methods}
    first = methods[0]
    print(f"\n{'method':<18} {'accuracy %':>10} {'minus ' + first:>20} {'std. error':>10} {'dense / wire':>12}")
    result: dict[str, Any] = {}
    for m in methods:
        differences = [a - b for a, b in zip(accuracy[m], accuracy[first], strict=True)]
        error = standard_error(differences)
        row = {
            "accuracy": mean(accuracy[m]),
            "difference": mean(differences),
            "standard_error": error,
            "wire_bytes": wire[m],
            "dense_wire_bytes": dense[m],
            "dense_over_wire": dense[m] / wire[m] if wire[m] else math.nan,
        }
        result[m] = row
        cell = "" if error is None else f"{error:.2f}"
        print(
            f"{m:<18} {row['accuracy']:10.2f} {row['difference']:20.2f} {cell:>10} {row['dense_over_wire']:12.1f}"
        )
    print_json(result)


if __name__ == "__main__":
    main()
