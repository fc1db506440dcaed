"""Bits per character against bytes: dense AdamW, outer steps and 0/1 Adam on Python sources, in equal steps.

    python -m benchmarks.outer_steps --seeds 1 2 3 --keep runs/outer_steps --figure outer.svg

Four simulated ranks train a small GPT (`configs/pysource/gpt`) with AdamW. `bits` are bits per character of
held-out files after the last step, `to dense` is the difference in percent, and +- the standard error of its mean
over the seeds. `payload` are the bytes that a rank contributes per step, `wire` what it sends for it
(docs/bytes.md). The last line is JSON.

A finished run in the folder of --keep is not trained again. Without --keep nothing is kept.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.convergence.report import standard_error
from benchmarks.convergence.runs import simulate, summary_of
from benchmarks.results import print_json
from dgc.local import ZeroOneSteps
from scripts.launch import usable_cores

RANKS, EVALUATE_EVERY = 4, 1000
BITS = "bits_per_character/test"
LOCAL = "--configs.train.local"
SPARSE = f"{LOCAL}.compression"


def every(steps: int) -> str:
    return f"{LOCAL}.average_every={steps}"


def sparse(of: int) -> tuple[str, ...]:
    """The 16 largest of each `of` elements, or 64 of each 4096."""
    chunk = 4096 if of == 64 else 16 * of
    ratio = f"{SPARSE}.compress_ratio={1 / of}"
    return "configs/local/sparseloco.py", ratio, f"{SPARSE}.selector.chunk_size={chunk}"


def nesterov(lr: float, momentum: float) -> tuple[str, ...]:
    outer = f"{LOCAL}.outer"
    return f"{outer}._target_=dgc.local.Nesterov", f"{outer}.outer_lr={lr}", f"{outer}.momentum={momentum}"


# The second moment is updated 37 and 23 times in 200 steps, in fp16. Gaps then double every 50 steps to 10 and 6.
FREEZE: dict[str, Any] = {"var_freeze_step": 200, "local_step_scaler": 50}
ZERO_ONE: dict[str, dict[str, Any]] = {
    "zero-one-h10": {**FREEZE, "var_update_scaler": 8, "local_step_clipper": 10},
    "zero-one-h6": {**FREEZE, "var_update_scaler": 4, "local_step_clipper": 6},
}


def zero_one(method: str) -> tuple[str, ...]:
    settings = (f"{LOCAL}.{name}={value}" for name, value in ZERO_ONE[method].items())
    return "configs/adam/zero_one_adam.py", "configs/adam/fp16.py", *settings


STREAMING = ("configs/local/streaming.py", every(10), f"{LOCAL}.fragment_mb=0.13")
METHODS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "local-h10": ("configs/local/local_sgd.py", every(10)),
    "diloco-h10": ("configs/local/diloco.py", every(10)),
    "diloco-h20": ("configs/local/diloco.py", every(20)),
    "diloco-h40": ("configs/local/diloco.py", every(40)),
    "sparse4-h10": (*sparse(4), every(10)),
    "sparse16-h4": (*sparse(16), every(4)),
    "sparse16-h10": (*sparse(16), every(10)),
    "sparse16-h20": (*sparse(16), every(20)),
    "sparse64-h10": (*sparse(64), every(10)),
    "powersgd4-h10": ("configs/local/powersgd.py", every(10)),
    "sign-h10": ("configs/local/sign.py", every(10)),
    "sign-h32-momentum": ("configs/local/sign.py", every(32), *nesterov(0.7, 0.8)),
    "2bit-h10": ("configs/local/twobit.py", every(10)),
    "streaming-1": (*STREAMING, f"{LOCAL}.delay=1"),
    "streaming-2": (*STREAMING, f"{LOCAL}.delay=2"),
    **{method: zero_one(method) for method in ZERO_ONE},
}


def words(args: argparse.Namespace, method: str, seed: int, place: Path) -> list[str]:
    """The arguments of train.py for one run."""
    files = [word for word in METHODS[method] if word.endswith(".py")]
    settings = [word for word in METHODS[method] if not word.endswith(".py")]
    return [
        *("--configs", "configs/pysource/gpt.py", *files, "--run-dir", str(place), "--devices", "cpu"),
        f"--configs.model.width={args.width}",
        f"--configs.train.batch_size={args.batch_size}",
        f"--configs.task.steps_per_epoch={EVALUATE_EVERY}",
        f"--configs.train.num_epochs={args.steps // EVALUATE_EVERY}",
        f"--configs.seed={seed}",
        "--configs.data.num_threads_per_worker=1",
        *settings,
        *args.overrides,
    ]


def exchanges(method: str, steps: int) -> int:
    """Number of exchanges of each element."""
    if method in ZERO_ONE:
        return ZeroOneSteps(**ZERO_ONE[method]).schedule.exchanges(steps)
    found = [word for word in METHODS[method] if word.startswith(every(0)[:-1])]
    return steps // int(found[-1].rpartition("=")[2]) if found else steps


def rows(steps: int, summaries: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float | None]]:
    """What the table shows of each method. The first method is dense."""
    first = [summary["final"][BITS] for summary in summaries["dense"]]
    dense = mean(summary["dense_wire_bytes"] for summary in summaries["dense"])
    dense_payload = mean(summary["payload_bytes"] for summary in summaries["dense"])
    found: dict[str, dict[str, float | None]] = {}
    for method, runs in summaries.items():
        bits = [run["final"][BITS] for run in runs]
        differences = [100 * (b / d - 1) for b, d in zip(bits, first, strict=True)]
        payload, wire = (mean(run[key] for run in runs) for key in ("payload_bytes", "wire_bytes"))
        found[method] = {
            "bits": mean(bits),
            "to_dense_percent": mean(differences),
            "standard_error": standard_error(differences),
            "exchanges": exchanges(method, steps),
            "payload_per_step": payload / steps,
            "wire_per_step": wire / steps,
            "fewer_payload": dense_payload / payload if payload else math.nan,
            "fewer_wire": dense / wire if wire else math.nan,
        }
    return found


def print_table(found: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'method':<16}{'bits':>8}{'to dense %':>12}{'+-':>6}{'exchanges':>11}", end="")
    print(f"{'payload/step':>14}{'fewer':>8}{'wire/step':>12}{'fewer':>8}")
    for method, row in found.items():
        error = "" if row["standard_error"] is None else f"{row['standard_error']:.2f}"
        print(f"{method:<16}{row['bits']:8.4f}{row['to_dense_percent']:12.2f}{error:>6}", end="")
        print(f"{row['exchanges']:11d}{row['payload_per_step']:14,.0f}{row['fewer_payload']:8.1f}", end="")
        print(f"{row['wire_per_step']:12,.0f}{row['fewer_wire']:8.1f}")


def draw(found: dict[str, dict[str, Any]], title: str, file: Path) -> None:
    """Draw bits against bytes as an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "outer", "svg.fonttype": "none", "font.size": 9}
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    dense = found["dense"]["bits"]
    for percent in (0, 2, 6):
        axes.axhline(dense * (1 + percent / 100), color="gray", linewidth=0.6, linestyle=":")
        label = f"dense + {percent} %" if percent else "dense"
        axes.annotate(label, (0.9, dense * (1 + percent / 100)), fontsize=7, color="gray", va="bottom")
    families = sorted({method.partition("-")[0].rstrip("0123456789") for method in found})
    for method, row in found.items():
        color = f"C{families.index(method.partition('-')[0].rstrip('0123456789')) % 10}"
        error = row["standard_error"]
        height = 0.0 if error is None else dense * error / 100
        place = (row["fewer_payload"], row["bits"])
        axes.errorbar(*place, height, fmt="o", color=color, markersize=4, elinewidth=0.6)
        axes.annotate(method, place, xytext=(4, 3), textcoords="offset points", fontsize=7, color=color)
    axes.set_xscale("log")
    axes.set_xlabel("times fewer bytes than dense fp32 that a rank contributes, whole run")
    axes.set_ylabel("bits per character of held-out files")
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, format="svg", metadata={"Date": None})
    plt.close(figure)


def train_all(args: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The summaries of all runs, by method and in the order of the seeds."""
    runs = [(seed, method) for seed in args.seeds for method in args.methods]
    summaries: dict[str, list[dict[str, Any]]] = {method: [] for method in args.methods}
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        places = [folder / f"{method}-{seed}" for seed, method in runs]
        arguments = [words(args, method, seed, place) for (seed, method), place in zip(runs, places, strict=True)]
        ended = pool.map(partial(summary_of, simulate, RANKS), arguments, places)
        for (seed, method), summary in zip(runs, ended, strict=True):
            summaries[method].append(summary)
            bits, seconds = summary["final"][BITS], summary["seconds"]
            print(f"seed {seed}  {method:<16} {bits:.4f} bits  {seconds:.0f} s", flush=True)
    return summaries


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.outer_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=4000, help=f"a multiple of {EVALUATE_EVERY}")
    parser.add_argument("--width", type=int, default=64, help="of the GPT; its own is 128")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of 64 characters per rank; its own is 16")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="runs at a time")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs; repeat no finished one")
    parser.add_argument("--figure", type=Path, help="an SVG file to draw")
    parser.add_argument("overrides", nargs="*", metavar="--configs.KEY=VALUE", help="for every run, after --")
    args = parser.parse_args(argv)
    if args.steps < EVALUATE_EVERY or args.steps % EVALUATE_EVERY:
        parser.error(f"--steps must be a multiple of {EVALUATE_EVERY}")
    if args.methods[0] != "dense":
        args.methods = ["dense", *(method for method in args.methods if method != "dense")]
    batch = f"{RANKS} ranks x {args.batch_size} rows of 64 characters"
    title = f"GPT of width {args.width}, {batch}, {args.steps} steps"
    print(f"{title}, seeds {args.seeds}, python {sys.version.split()[0]}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        found = rows(args.steps, train_all(args, args.keep or Path(scratch)))
    print_table(found)
    if args.figure is not None:
        draw(found, title, args.figure)
    print_json({"benchmark": "outer_steps", "title": title, "seeds": args.seeds, "methods": found})


if __name__ == "__main__":
    main()
