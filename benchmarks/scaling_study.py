"""How the gap to dense training changes with the size of a model: sizes x methods x seeds, 4 simulated ranks.

    python -m benchmarks.scaling_study --keep runs/scaling --minutes 60
    python -m benchmarks.scaling_study --draw docs

The data are `dgc_datasets.PackageSources`. Learning rates are searched at the two smaller sizes and transferred by
the rule of `benchmarks/_scaling_plan.py`. A run uses one core. Start the command once for each core: each process
takes the next run that no other has. It stops after --minutes with exit status 75 if runs are left, and the same
command continues, with the bits of an uninterrupted run. If it is killed, it continues at the last evaluation.

With --batched the ranks' forward and backward passes are one batch (`benchmarks/_batched_ranks.py`), and --device
cuda does that on a GPU. Such runs keep no checkpoints. The sizes 30m and 120m are for a GPU:

    python -m benchmarks.scaling_study --device cuda --sizes 30m --arms muon muon-4-bits --keep runs --rate 0.002

Each finished run is a file of JSON in --results: losses, bytes, seconds, command, commit, versions, and hash of
the data. --draw makes a table and two pictures of these files: the gap to dense Muon against parameters, and the
seconds after which the largest model is as good as dense AdamW at its end, on three links. A step takes
the time of one rank on one core, and its bytes over the rate of the link. Dense exchanges have 16 bits an element.
"""

import argparse
import fcntl
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks._batched_ranks import BatchedRun
from benchmarks._harness import Table, options, print_json, to_json
from benchmarks._runs import GPT, simulate, summary_of
from benchmarks._scaling_plan import (
    ADAMW,
    ARMS,
    FIRST,
    QUEUE,
    RANKS,
    SIZES,
    Losses,
    Run,
    best_rate,
    exponent,
    rate_of,
    searched,
    wanted,
    words_of,
)
from benchmarks.convergence import standard_error
from benchmarks.figures import axes_of, write
from dgc_datasets import PackageSources
from dgc_training.atomic_write import write_atomically
from dgc_training.config import load
from dgc_training.faults.interruption import EXIT_SAVED
from dgc_training.startup.arguments import parse_arguments
from scripts.methods import changes_of, files_of
from scripts.plot import read

TAKES = "days on 2 cores; 5 min to an hour a run"
RESULTS = Path("benchmarks/scaling")
LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
POLL = 30.0  # seconds between two looks for a run, while other processes have all of them
Result = Mapping[str, Any]


# --- running --------------------------------------------------------------------------------------


def to_train(run: Run, place: Path, data: str) -> list[str]:
    """The arguments of train.py."""
    return [
        *("--configs", GPT, "configs/pysource/packages.py", *files_of(run.arm)),
        *("--run-dir", str(place), "--devices", "cpu"),
        *changes_of(run.arm),
        *words_of(run, data),
    ]


def read_results(folder: Path) -> dict[Run, Result]:
    """The finished runs."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    return {Run(each["size"], each["arm"], each["rate"], each["seed"]): each for each in found}


def losses_of(results: Mapping[Run, Result]) -> Losses:
    return {run: result["bits_per_character"] for run, result in results.items()}


@contextmanager
def claimed(place: Path) -> Iterator[bool]:
    """Context in which this process alone has a run, or False. The system frees it when the process ends."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{place}.lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def commit() -> str:
    """The commit of this repository, with a + if files differ from it."""
    found = []
    for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            return "unknown"
        found.append(done.stdout.strip())
    return found[0] + "+" * bool(found[1])


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def common(run: Run, words: Sequence[str], about: Result) -> dict[str, Any]:
    """What the result of a run says about how it was made."""
    size, at = SIZES[run.size], list(words).index("--run-dir")
    # with neither the folders of this machine nor its device
    how = [word for word in (*words[:at], *words[at + 4 :]) if not word.startswith("--configs.dataset.root=")]
    return {
        **{"size": run.size, "arm": run.arm, "rate": run.rate, "seed": run.seed},
        **{"parameters": size.parameters, "steps": size.steps, "tokens": size.tokens, "ranks": RANKS},
        "command": f"python -m benchmarks.scaling_study --run {run.name}",
        "train": " ".join(how),
        "commit": commit(),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "processor": processor()},
        "data": about,
    }


def train_batched(run: Run, data: str, device: torch.device) -> Result:
    """A run whose ranks are one batch, from its beginning to its end."""
    size, start = SIZES[run.size], time.perf_counter()
    words = to_train(run, Path("unused"), data)
    args, overrides = parse_arguments(words)
    batched = BatchedRun(load(args.configs, overrides), RANKS, device)
    curve, seconds = batched.train()
    about = batched.dataset.about
    share = about["tokens"]["test"] / about["characters"]["test"]
    points = [
        {"step": at["step"], "bits_per_character": share * at["bits"], "wire_bytes": at["wire_bytes"]}
        for at in curve
    ]
    sent = ("wire_bytes", "payload_bytes", "dense_wire_bytes")
    found = common(run, words, about)
    if device.type == "cuda":
        found["versions"]["device"] = torch.cuda.get_device_name(device)
    return {
        **found,
        "bits_per_character": points[-1]["bits_per_character"],
        "curve": points,
        **{key: curve[-1][key] for key in sent},
        **{"dropped_steps": 0, "minutes": (time.perf_counter() - start) / 60, "cpu_ms_per_step": None},
        **{"batched": True, "tokens_per_second": size.tokens / seconds},
    }


def train(run: Run, keep: Path, data: str, until: float) -> Result | None:
    """Begin or continue a run. Returns its result, or None if it was stopped."""
    size, place = SIZES[run.size], keep / run.name
    words, is_new = to_train(run, place, data), not place.exists()
    start = time.process_time()
    summary = summary_of(simulate, RANKS, words, place, until)
    seconds = time.process_time() - start
    if summary is None:
        return None
    about = PackageSources(size.vocabulary, size.subwords, root=data).about
    # bits per token -> bits per character
    share = about["tokens"]["test"] / about["characters"]["test"]
    curve = read(str(place)).validation
    of_training = summary["training_seconds"] / summary["seconds"]
    return {
        **common(run, words, about),
        "bits_per_character": share * summary["final"]["bits_per_character/test"],
        "curve": [
            {"step": round(step), "bits_per_character": share * bits, "wire_bytes": round(wire)}
            for step, bits, wire in zip(curve.steps, curve.y, curve.wire, strict=True)
        ],
        **{key: summary[key] for key in ("wire_bytes", "payload_bytes", "dense_wire_bytes", "dropped_steps")},
        "minutes": summary["seconds"] / 60,
        # of one rank, without evaluation; only of a run that was not cut, whose seconds are all known
        "cpu_ms_per_step": 1e3 * seconds * of_training / size.steps / RANKS if is_new else None,
    }


def work(args: argparse.Namespace, until: float) -> bool:
    """Train what is wanted, run after run, and write the results. Returns whether nothing is left."""
    args.results.mkdir(parents=True, exist_ok=True)
    while True:
        losses = losses_of(read_results(args.results))
        if args.run is None:
            left = list(wanted(losses, args.sizes, args.arms, args.seeds, args.rate))
        else:
            left = [] if args.run in losses else [args.run]
        if not left:
            return True
        for run in left:
            with claimed(args.keep / run.name) as is_mine:
                file = args.results / f"{run.name}.json"
                if not is_mine or file.exists():
                    continue
                if args.batched:
                    result: Result | None = train_batched(run, args.data, torch.device(args.device))
                else:
                    result = train(run, args.keep, args.data, until)
                if result is None:
                    print(f"{run.name} is saved: the same command continues", flush=True)
                    return False
                text = to_json(result).encode() + b"\n"
                write_atomically(file, lambda to, text=text: to.write(text))  # type: ignore[misc]
                print(
                    f"{run.name:<44} {result['bits_per_character']:.4f}  {result['minutes']:.1f} min", flush=True
                )
                break
        else:
            if time.time() > until:
                return False
            time.sleep(POLL)


# --- table and pictures ---------------------------------------------------------------------------


def compared(results: Mapping[Run, Result]) -> dict[str, dict[str, list[Result]]]:
    """{size: {arm: its runs at the best rate, by seed}}."""
    losses = losses_of(results)
    found: dict[str, dict[str, list[Result]]] = {}
    for size in (name for name in SIZES if name != "tiny"):
        for arm in ARMS.values():
            rates = searched(losses, size, arm.method)
            rate = rate_of(losses, SIZES[size], arm) if size in QUEUE else best_rate(rates) if rates else None
            if own := [
                results[run]
                for run in sorted(results, key=lambda run: run.seed)
                if (run.size, run.arm, run.rate) == (size, arm.method, rate)
            ]:
                found.setdefault(size, {})[arm.method] = own
    return found


def gaps(runs: Sequence[Result], first: Sequence[Result]) -> list[float]:
    """Percent above the first arm with the same seed."""
    base = {run["seed"]: run["bits_per_character"] for run in first}
    return [100 * (run["bits_per_character"] / base[run["seed"]] - 1) for run in runs if run["seed"] in base]


def rows_of(arms: Mapping[str, Sequence[Result]]) -> dict[str, dict[str, Any]]:
    """A row of the table for each arm of a size."""
    rows = {}
    for arm, runs in arms.items():
        row: dict[str, Any] = {"bits": mean(run["bits_per_character"] for run in runs), "seeds": len(runs)}
        for key, first in (("muon", FIRST), ("adamw", ADAMW)):
            if first in arms and arm != first and (found := gaps(runs, arms[first])):
                row |= {f"to_{key}": mean(found), f"error_{key}": standard_error(found)}
        sent, dense = (sum(run[f"{kind}wire_bytes"] for run in runs) for kind in ("", "dense_"))
        cpu = [run["cpu_ms_per_step"] for run in runs if run["cpu_ms_per_step"] is not None]
        rows[ARMS[arm].title] = row | {
            "rate": runs[0]["rate"],
            "dense_over_wire": dense / sent,
            "minutes": mean(run["minutes"] for run in runs),
            "cpu_ms": mean(cpu) if cpu else None,
        }
    return rows


COLUMNS = [
    ("bits", "bits per character", "20.4f"),
    ("to_muon", "to dense Muon, %", "18.2f"),
    ("error_muon", "+-", "7.2f"),
    ("to_adamw", "to dense AdamW, %", "19.2f"),
    ("error_adamw", "+-", "7.2f"),
    ("dense_over_wire", "dense / wire", "14.1f"),
    ("rate", "lr", "10.4g"),
    ("seeds", "seeds", "7d"),
    ("cpu_ms", "ms per step", "13.1f"),
]


def step_of(curve: Sequence[Mapping[str, float]], bits: float) -> float | None:
    """The step after which a run is as good, between two evaluations. None: it never is."""
    before: Mapping[str, float] | None = None
    for point in curve:
        if point["bits_per_character"] <= bits:
            if before is None:
                return point["step"]
            fall = before["bits_per_character"] - point["bits_per_character"]
            share = (before["bits_per_character"] - bits) / fall
            return before["step"] + share * (point["step"] - before["step"])
        before = point
    return None


def seconds_to_reach(runs: Sequence[Result], base: Sequence[Result], rate: float) -> float | None:
    """Mean seconds until runs are as good as dense AdamW's at their end. None: one never is, or has no times."""
    ends = {run["seed"]: run["bits_per_character"] for run in base}
    found = []
    for run in runs:
        if run["seed"] not in ends:
            continue
        step = step_of(run["curve"], ends[run["seed"]])
        if step is None or run["cpu_ms_per_step"] is None:
            return None
        wire = run["wire_bytes"] / run["steps"]
        if run["arm"] in (FIRST, ADAMW):
            wire /= 2  # 16 bits
        found.append(step * (run["cpu_ms_per_step"] / 1e3 + 8 * wire / rate))
    return mean(found) if found else None


def colors() -> dict[str, str]:
    return {arm: "black" if arm == FIRST else f"C{number - 1}" for number, arm in enumerate(ARMS)}


def draw_gaps(found: Mapping[str, Mapping[str, Sequence[Result]]], file: Path) -> None:
    """The gap to dense Muon against parameters."""
    figure, axes = axes_of("size-gap", (7.6, 4.4))
    axes.axhline(0.0, color="black", linewidth=0.8, linestyle=":")
    for arm, color in colors().items():
        points = []
        for size, arms in found.items():
            if arm != FIRST and arm in arms and FIRST in arms and (values := gaps(arms[arm], arms[FIRST])):
                points.append((SIZES[size].parameters, mean(values), standard_error(values) or 0.0))
        if points:
            x, y, error = zip(*points, strict=True)
            axes.errorbar(x, y, error, fmt="o-", color=color, markersize=4, linewidth=1.2, label=ARMS[arm].title)
    axes.set(xscale="log", xlabel="parameters", ylabel="bits per character above dense Muon, %")
    axes.grid(alpha=0.2)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    write(figure, file)


def draw_seconds(size: str, arms: Mapping[str, Sequence[Result]], file: Path) -> None:
    """Seconds until dense AdamW's final loss on each link."""
    figure, axes = axes_of("size-seconds", (7.6, 4.4))
    for arm, color in colors().items():
        if arm in arms:
            times = [seconds_to_reach(arms[arm], arms[ADAMW], rate) for rate in LINKS.values()]
            known = [(name, value) for name, value in zip(LINKS, times, strict=True) if value is not None]
            if known:
                axes.plot(
                    *zip(*known, strict=True),
                    "o-",
                    color=color,
                    markersize=4,
                    linewidth=1.2,
                    label=ARMS[arm].title,
                )
    axes.set(yscale="log", ylabel=f"seconds to the loss of dense AdamW, {SIZES[size].parameters:,} parameters")
    axes.grid(alpha=0.2)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    write(figure, file)


def report(results: Mapping[Run, Result], folder: Path | None) -> None:
    """Print the table of each size, the rules of transfer, and a line of JSON; draw the pictures."""
    found, losses = compared(results), losses_of(results)
    data: dict[str, set[str]] = defaultdict(set)
    for result in results.values():
        data[result["data"]["sha256"]].add(result["size"])
    if len(data) > 1:
        raise SystemExit(f"results of different data cannot be compared: {dict(data)}")
    tables = {}
    for name, arms in found.items():
        size = SIZES[name]
        kind = "subwords" if size.subwords else "characters"
        print(f"\n{size.parameters:,} parameters, {size.tokens:,} {kind}, {size.steps} steps of {RANKS} ranks")
        tables[name] = Table("method", 38, COLUMNS, rows_of(arms)).rows
    rules = {}
    for optimizer in ("adamw", "muon"):
        if all(rate_of(losses, SIZES[QUEUE[2]], arm) for arm in ARMS.values() if arm.optimizer == optimizer):
            rules[optimizer] = exponent(losses, optimizer, QUEUE[:2])
            print(f"{optimizer}: the best rate falls with parameters**-{rules[optimizer]:.2f}")
    print_json({"benchmark": "scaling_study", "data": list(data), "exponents": rules, "sizes": tables})
    if folder is not None and found:
        draw_gaps(found, folder / "size_gap.svg")
        largest = list(found)[-1]
        if ADAMW in found[largest]:
            draw_seconds(largest, found[largest], folder / "size_seconds.svg")


def main(argv: Sequence[str] | None = None) -> None:
    parser = options("benchmarks.scaling_study", __doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(QUEUE), metavar="SIZE")
    parser.add_argument("--model", choices=["tiny"], help="as --sizes tiny")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", type=int, help="default: 3, and 1 of the largest size")
    parser.add_argument("--rate", type=float, help="learning rate in place of the one that the rule gives")
    parser.add_argument("--batched", action="store_true", help="the passes of all ranks as one batch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: --batched on a GPU")
    parser.add_argument(
        "--run", type=Run.of, metavar="NAME", help="one run alone, by the name that its result has"
    )
    parser.add_argument("--minutes", type=float, help="stop after so many; the same command continues")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="runs and checkpoints; with it runs are trained"
    )
    parser.add_argument("--data", default="data/package-sources", metavar="FOLDER", help="tokens")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FOLDER", help="a file of each finished run"
    )
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="where the pictures go")
    args = parser.parse_args(argv)
    if args.model:
        args.sizes = [args.model]
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here")
    args.batched |= args.device == "cuda"
    torch.set_num_threads(1)
    if args.keep is not None:
        # with an end, finished runs keep no checkpoints
        until = time.time() + 60 * (args.minutes or 1e6)
        if not work(args, until):
            raise SystemExit(EXIT_SAVED)
    report(read_results(args.results), args.draw)


if __name__ == "__main__":
    main()
