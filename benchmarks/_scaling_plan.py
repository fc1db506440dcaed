"""What the scaling study trains: sizes, arms, the search of learning rates, and the order of the runs.

A learning rate is the rate of the AdamW part for all ranks together. Muon's matrices have twice it. Each arm is
searched with seed 0 at the two smaller sizes, in factors of 2: two rates that are neighbours, then the next one on
the side of the better one, until the best has a worse neighbour on both sides. The other seeds have the best rate.
The largest size is not searched. A parabola through the best rate and its neighbours gives each arm's optimum at
both sizes, and the optimum is taken for a power of the number of parameters:

    rate(N) = optimum(N_B) (N_B / N)**a        a: mean of log(optimum_A / optimum_B) / log(N_B / N_A) over the arms
                                                 with the same optimizer
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import mean
from typing import Any

RANKS = 4
EPOCHS = 8  # evaluations, and places where a killed run is continued
FIRST_RATE = {"adamw": 0.006, "muon": 0.006}  # where the search of the smallest size begins
MOST_RATES = 6  # of a search, which then has found no optimum
FREEZE = 0.15  # share of the steps of DGC for Adam that are dense
WARM_UP = 0.05  # share of the steps in which the learning rate rises


@dataclass(frozen=True)
class Size:
    """A model and its data.

    Attributes:
        parameters: for the rule of transfer and the table.
        rows, context: of a rank in one step.
        seeds: runs of each arm.
        search_after: the size whose best rates a search begins with. None: the first.
        transferred_from: the two sizes whose rates are transferred. Then nothing is searched.
    """

    name: str
    width: int
    layers: int
    heads: int
    parameters: int
    subwords: bool = False
    steps: int = 2048
    rows: int = 8
    context: int = 128
    seeds: int = 3
    test_tokens: int = 262144
    search_after: str | None = None
    transferred_from: tuple[str, str] | None = None

    @property
    def vocabulary(self) -> int:
        return 4096 if self.subwords else 128

    @property
    def tokens(self) -> int:
        return self.steps * RANKS * self.rows * self.context

    @property
    def words(self) -> list[str]:
        """Changes of keys for train.py."""
        model = {"width": self.width, "layers": self.layers, "heads": self.heads}
        dataset = {"vocabulary_size": self.vocabulary, "subwords": self.subwords, "test_tokens": self.test_tokens}
        return [f"model.{key}={value}" for key, value in model.items()] + [
            f"dataset.{key}={value}" for key, value in dataset.items()
        ]


# on a GPU, in the 10 minutes of one command: 134 million subwords at 30m, 67 million at 120m
ON_GPU: dict[str, Any] = {"context": 1024, "subwords": True, "seeds": 1, "test_tokens": 131072}
ON_GPU |= {"transferred_from": ("0.4m", "2m")}
SIZES = {
    size.name: size
    for size in (
        Size("tiny", 16, 1, 1, 7_408, steps=8 * EPOCHS, seeds=1, test_tokens=2048),
        Size("0.4m", 128, 2, 4, 429_568),
        Size("2m", 192, 4, 6, 1_828_992, search_after="0.4m"),
        Size(
            "8m",
            320,
            5,
            10,
            7_517_120,
            subwords=True,
            seeds=1,
            test_tokens=131072,
            transferred_from=("0.4m", "2m"),
        ),
        Size("30m", 512, 8, 8, 27_841_536, rows=16, **ON_GPU),
        Size("120m", 896, 12, 14, 120_334_592, steps=4096, rows=4, **ON_GPU),
    )
}
QUEUE = ("0.4m", "2m", "8m")


@dataclass(frozen=True)
class Arm:
    """A method of `scripts.methods`, with the name that the table shows, and the optimizer."""

    method: str
    title: str
    optimizer: str


ARMS = {
    arm.method: arm
    for arm in (
        Arm("muon", "dense Muon", "muon"),
        Arm("dense", "dense AdamW", "adamw"),
        Arm("muon-4-bits", "4 bits per step, Muon", "muon"),
        Arm("muon-local-2-bits-h20", "local Muon, models in 2 bits, H = 20", "muon"),
        Arm("muon-local-sign-h32", "local Muon, signs, H = 32", "muon"),
        Arm("int8", "8 bits per step, AdamW", "adamw"),
        Arm("dgc-adam", "DGC for Adam, 1 %", "adamw"),
        Arm("muon-powersgd-4", "PowerSGD rank 4, Muon", "muon"),
    )
}
FIRST, ADAMW = "muon", "dense"  # what gaps are measured to


@dataclass(frozen=True)
class Run:
    size: str
    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.size}-{self.arm}-lr{self.rate:.6g}-seed{self.seed}"

    @staticmethod
    def of(name: str) -> "Run":
        """The run of a name. Raises ValueError if there is none."""
        found = re.fullmatch(r"(?P<size>[^-]+)-(?P<arm>.+)-lr(?P<rate>[0-9.e-]+)-seed(?P<seed>\d+)", name)
        if found is None or found["size"] not in SIZES or found["arm"] not in ARMS:
            raise ValueError(f"{name!r} is not SIZE-ARM-lrRATE-seedN, with a size and an arm of the study")
        return Run(found["size"], found["arm"], float(found["rate"]), int(found["seed"]))


Losses = Mapping[Run, float]  # of finished runs


def searched(losses: Losses, size: str, arm: str) -> dict[float, float]:
    """{rate: loss} of the search's finished runs, by rising rate."""
    found = {run.rate: loss for run, loss in losses.items() if (run.size, run.arm, run.seed) == (size, arm, 0)}
    return dict(sorted(found.items()))


def next_rates(found: Mapping[float, float], first: float) -> list[float]:
    """The rates that a search lacks, given the loss of those that it has. Empty: it has ended."""
    if missing := [rate for rate in (first, first / 2) if rate not in found]:
        return missing
    rates = sorted(found)
    best = min(rates, key=lambda rate: found[rate])
    if len(found) >= MOST_RATES or rates[0] < best < rates[-1]:
        return []
    return [best / 2 if best == rates[0] else best * 2]


def best_rate(found: Mapping[float, float]) -> float:
    return min(found, key=lambda rate: found[rate])


def optimum(found: Mapping[float, float]) -> float:
    """The minimum of the parabola through the best rate and its neighbours, which are a factor of 2 apart."""
    rates = sorted(found)
    at = rates.index(best_rate(found))
    if not 0 < at < len(rates) - 1:
        return rates[at]
    low, middle, high = (found[rate] for rate in rates[at - 1 : at + 2])
    return float(rates[at] * 2 ** ((low - high) / (2 * (low - 2 * middle + high))))


def exponent(losses: Losses, optimizer: str, sizes: Sequence[str]) -> float:
    """a of the rule above."""
    a, b = (SIZES[name] for name in sizes)
    arms = [arm.method for arm in ARMS.values() if arm.optimizer == optimizer]
    pairs = [[optimum(searched(losses, size.name, arm)) for size in (a, b)] for arm in arms]
    return mean(log(small / large) for small, large in pairs) / log(b.parameters / a.parameters)


def transferred_rate(losses: Losses, size: Size, arm: Arm) -> float:
    """The rate of an arm at a size that is not searched, to two digits."""
    assert size.transferred_from is not None
    base = SIZES[size.transferred_from[1]]
    rate = optimum(searched(losses, base.name, arm.method))
    shrink = (base.parameters / size.parameters) ** exponent(losses, arm.optimizer, size.transferred_from)
    return float(f"{rate * shrink:.2g}")


def first_rate(losses: Losses, size: Size, arm: Arm) -> float | None:
    """Where a search begins. None: it is not known yet."""
    if size.search_after is None:
        return FIRST_RATE[arm.optimizer]
    before = SIZES[size.search_after]
    start = first_rate(losses, before, arm)
    found = searched(losses, before.name, arm.method)
    return best_rate(found) if start is not None and not next_rates(found, start) else None


def ends(losses: Losses, size: Size, arm: Arm) -> bool:
    """Whether the search of an arm has ended."""
    first = first_rate(losses, size, arm)
    return first is not None and not next_rates(searched(losses, size.name, arm.method), first)


def rate_of(losses: Losses, size: Size, arm: Arm) -> float | None:
    """The rate of an arm's seeds. None: it is not known yet."""
    if size.name == "tiny":
        return FIRST_RATE[arm.optimizer]
    if size.transferred_from is None:
        return best_rate(searched(losses, size.name, arm.method)) if ends(losses, size, arm) else None
    family = [other for other in ARMS.values() if other.optimizer == arm.optimizer]
    known = all(ends(losses, SIZES[name], other) for name in size.transferred_from for other in family)
    return transferred_rate(losses, size, arm) if known else None


def wanted(
    losses: Losses, sizes: Iterable[str], arms: Sequence[str], seeds: int | None = None, rate: float | None = None
) -> Iterator[Run]:
    """The runs that are not finished and can begin, the most useful first. Others follow from their results.

    rate: in place of what the rules above give.
    """
    for name in sizes:
        size = SIZES[name]
        of_size: list[Run] = []
        if size.transferred_from is None and name != "tiny" and rate is None:
            for arm in (ARMS[each] for each in arms):
                first = first_rate(losses, size, arm)
                rates = [] if first is None else next_rates(searched(losses, name, arm.method), first)
                of_size += [Run(name, arm.method, rate, 0) for rate in rates]
        for seed in range(size.seeds if seeds is None else seeds):
            for arm in (ARMS[each] for each in arms):
                own = rate_of(losses, size, arm) if rate is None else rate
                of_size += [] if own is None else [Run(name, arm.method, own, seed)]
        yield from (run for run in of_size if run not in losses)


def words_of(run: Run, root: str) -> list[str]:
    """Changes of keys for train.py. root: folder of the tokens."""
    size = SIZES[run.size]
    settings: dict[str, Any] = {
        "dataset.root": root,
        "task.steps_per_epoch": size.steps // EPOCHS,
        "train.num_epochs": EPOCHS,
        "train.batch_size": size.rows,
        "task.context": size.context,
        "train.optimizer.lr": f"{run.rate / RANKS:.6g}",
        "train.scheduler.warmup_steps": round(WARM_UP * size.steps),
        "data.num_threads_per_worker": 1,
        "seed": run.seed,
    }
    if ARMS[run.arm].optimizer == "muon":
        settings["train.optimizer.ns_precision"] = "bf16"
    if run.arm == "dgc-adam":
        settings["train.optimizer.freeze_step"] = round(FREEZE * size.steps)
    return [f"--configs.{word}" for word in size.words] + [f"--configs.{k}={v}" for k, v in settings.items()]
