"""Cost of selectors in a DGC step, and how Laplace and normal distributions fit gradients: the study of LDTE-BS.

    python -m benchmarks.selectors [--models resnet50 densenet121] [--fit-models alexnet]

The study is Chen, Liu, Han 2021. Each network is trained on enlarged digits with DGC at the given ratio, on one
rank with batches of 8. Its u, v and gradients are recorded.

steps     (table 3) gradient in, payload out, without forward and backward. `radix` is the study's radixSelect,
          `sampled` its hierarchical selection, `laplace` LDTE-BS. The floor is the update of u and v. `passes` are
          reads of v beyond it, `sent / k` the elements that are sent. New gradients have the recorded mean and
          deviation of each element. Before the timing, --settle steps fill v, and selectors with a history adapt
fit       (table 1) Wasserstein-1 distances between numbers and their most likely Laplace and normal distribution,
          in standard deviations: the mean over tensors, weighted by size, and of all tensors together. At most
          2**18 numbers are used, evenly spaced. Zeros are left out: no image of the batch activated their units

For accuracies see benchmarks.convergence, which has methods of the same names.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import dgc.kernels as kernels
from benchmarks._harness import Table, middle, options, print_json, ratio
from benchmarks._recordings import MOMENTUM, Gradients, Recording, record, small_images
from benchmarks.step_overhead import Buckets, Ours, Step, TopK, floors, measure
from dgc.kernels import Budget, Moments, PassInputs, Prediction, SelectionKernels, SparseVector, Tail, TopKResult
from dgc.sparse.payloads import CastValues, PlainIndices, SparseFormat
from dgc.sparse.selectors import Predicted, Quota
from scripts.methods import SELECTORS, build

TAKES = "15 min"
MODELS = "alexnet densenet121 densenet169 resnet20 resnet50 resnet101 senet18 vgg19_bn".split()
BATCH, LR = 8, 0.01
FLOOR = "plain update of u and v"
COUNTED = 5  # steps
KINDS = ("gradient", "accumulated")
MOST = 1 << 18
FEWEST = 100  # fewest values for a fit
WIRE = SparseFormat(CastValues("fp16"), PlainIndices("int32"))


class SelectorStep(Ours):
    """A step with a selector, by its name."""

    def __init__(self, name: str, buckets: Buckets, ratio: float):
        super().__init__("auto", build(name).selector, buckets, ratio, MOMENTUM, WIRE, "cpu")
        self.name = name
        # whether a first step differs from later ones
        self.needs_history = bool(self.selector.rows) or isinstance(self.selector, Predicted)


@dataclass
class Counts:
    """Sums over buckets and steps; `reads`, in elements, beyond the update of u and v."""

    reads: float = 0.0
    sent: float = 0.0
    planned: float = 0.0
    numel: float = 0.0

    def row(self) -> dict[str, float]:
        return {"passes": self.reads / self.numel, "sent": self.sent / self.planned}


class Counting(SelectionKernels):
    """Kernels with the results of others, which count. A choice counts as one read, where it is not part of the
    pass over u and v. Not counted are samples, and segments that are read again because a lower bound did not fit.
    """

    def __init__(self, kernel: SelectionKernels, counts: Counts):
        self.kernel, self.counts = kernel, counts

    def moments(self, v: Tensor, bounds: Tensor) -> Moments:
        self.counts.reads += v.numel()
        return self.kernel.moments(v, bounds)

    def tail(self, v: Tensor, bounds: Tensor, lower_bounds: Tensor) -> Tail:
        self.counts.reads += int(bounds.diff()[~lower_bounds.isinf()].sum())
        return self.kernel.tail(v, bounds, lower_bounds)

    def select(self, v: Tensor, budget: Budget, lower_bounds: Tensor | None = None) -> TopKResult:
        self.counts.reads += v.numel()
        return self.kernel.select(v, budget, lower_bounds)

    def radix_select(self, v: Tensor, budget: Budget) -> SparseVector:
        self.counts.reads += 5 * v.numel()  # four digits, and the selected elements
        return self.kernel.radix_select(v, budget)

    def accumulate_and_select_(
        self, inputs: PassInputs, budget: Budget, lower_bounds: Tensor | Prediction | None
    ) -> TopKResult:
        return self.kernel.accumulate_and_select_(inputs, budget, lower_bounds)


@contextmanager
def counting(v: Tensor, counts: Counts) -> Iterator[None]:
    """Within this context, all kernels are the kernels of v's device, with counts."""
    backend = kernels.of(v)
    counted = replace(backend, selection=Counting(backend.selection, counts))
    with patch.object(kernels, "of", return_value=counted):
        yield


def count_step(method: SelectorStep, gradients: list[Tensor], counts: Counts) -> None:
    """Run `method.step` and add its counts."""
    for i, g in enumerate(gradients):
        with counting(g, counts):
            selected = method.select(i, g)
        counts.sent += int(selected.elements.count)
        counts.planned += method.quotas[i].capacity
        counts.numel += g.numel()
        method.send(i, selected)
    method.steps += 1


class Fit(NamedTuple):
    """Distances to the two distributions."""

    laplace: float
    gauss: float

    @property
    def ratio(self) -> float:
        return self.laplace / self.gauss


def fit(x: Tensor) -> Fit | None:
    """Return the distances of at most MOST of the numbers of x. None for fewer than FEWEST values.

    The distance is the mean difference between the p-quantiles of the numbers and of the distribution, at the
    middles of n equal intervals of p.
    """
    # an odd stride, so that a power of two in the tensor's shape cannot line up with it
    x = x[:: -(-x.numel() // MOST) | 1]
    x = x[x != 0].double().cpu().sort().values
    if x.numel() < FEWEST or x[-1] == x[0]:
        return None
    p = (torch.arange(x.numel(), dtype=torch.float64) + 0.5) / x.numel()
    middle, mean, deviation = x.median(), x.mean(), x.std(correction=0)
    laplace = middle - (x - middle).abs().mean() * (p - 0.5).sign() * torch.log1p(-2 * (p - 0.5).abs())
    gauss = mean + deviation * torch.special.ndtri(p)
    return Fit(*(float((x - quantiles).abs().mean() / deviation) for quantiles in (laplace, gauss)))


def fit_tensors(buckets: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> Fit:
    """The mean over tensors, each weighted by its size."""
    tensors = [part for bucket, numels in zip(buckets, sizes, strict=True) for part in bucket.split(list(numels))]
    found = [(part.numel(), of) for part in tensors if (of := fit(part)) is not None]
    total = sum(numel for numel, _ in found)
    if not total:
        raise ValueError(f"no tensor has {FEWEST} different values")
    return Fit(sum(n * of.laplace for n, of in found) / total, sum(n * of.gauss for n, of in found) / total)


def fits_of(recording: Recording) -> dict[str, float]:
    """Distances to Laplace / to Gauss: by kind of values, tensor by tensor and of all tensors together.

    Different widths together give heavier tails.
    """
    found = {}
    for kind in KINDS:
        buckets = getattr(recording, kind)
        together = fit(torch.cat(buckets))
        assert together is not None, "a network has more values"
        found[f"{kind}, by tensor"] = fit_tensors(buckets, recording.sizes).ratio
        found[f"{kind}, together"] = together.ratio
    return found


def threshold_to_mean(buckets: Sequence[Tensor], quotas: Sequence[Quota]) -> float:
    """The exact threshold / the mean magnitude, weighted by tensor size."""
    total = 0.0
    for v, quota in zip(buckets, quotas, strict=True):
        budget, kernel = quota.per_tensor, kernels.of(v).selection
        sizes = budget.bounds.diff()
        means = kernel.moments(v, budget.bounds).magnitudes / sizes.clamp(min=1)
        total += float((sizes * (kernel.select(v, budget).thresholds / means).nan_to_num(0.0)).sum())
    return total / sum(v.numel() for v in buckets)


def compare(recording: Recording, density: float, rounds: int, settle: int) -> dict[str, dict[str, Any]]:
    """Time all selectors in DGC steps from the recorded state, then count, and print. Returns the table's rows."""
    buckets, gradients = recording.segments, Gradients(recording)
    methods = {name: SelectorStep(name, buckets, density) for name in SELECTORS}
    first = methods["predicted"]
    historic = [method for method in methods.values() if method.needs_history]
    for method in historic:
        method.start_from(recording.u, recording.v)
    for _ in range(settle):
        fresh = gradients.next()
        for method in historic:
            method.step(fresh)
    first.settle()
    alone: list[Step] = [TopK(buckets, density, "cpu")]
    plain = floors("native", buckets, MOMENTUM, "cpu")
    for step in (*(m for m in methods.values() if m not in historic), *alone, *plain):
        step.start_from(first.u, first.v)
    times = measure([*methods.values(), *alone, *plain], gradients, rounds, "cpu")
    kernels.use("auto")
    times[FLOOR] = min((times[step.name] for step in plain), key=middle)

    counted = {name: Counts() for name in SELECTORS}
    for _ in range(COUNTED):
        fresh = gradients.next()
        for name, method in methods.items():
            count_step(method, fresh, counted[name])
    first.settle()
    print(f"exact threshold / mean magnitude: {threshold_to_mean(first.v, first.quotas):.2f} of v", end="")
    columns = [("ms", "median ms", "11.2f"), ("radix", "radix /", "10.2f")]
    columns += [("exact", "exact /", "10.2f"), ("floor", "/ floor", "10.2f"), ("passes", "passes", "9.2f")]
    table = Table(recording.model, 24, [*columns, ("sent", "sent / k", "10.3f")])
    for name in (*SELECTORS, FLOOR, TopK.name):
        row: dict[str, float] = {"ms": middle(times[name]), "floor": ratio(times[name], times[FLOOR])}
        if name in SELECTORS:
            row |= {other: ratio(times[other], times[name]) for other in ("radix", "exact")} | counted[name].row()
        table.add(name, row)
    others = (f"{name} {ratio(times[name], times['predicted']):.2f}" for name in SELECTORS if name != "predicted")
    print(f"a step / a step of predicted: {', '.join(others)}")
    return table.rows


def main() -> None:
    parser = options("benchmarks.selectors", __doc__, ratio=0.001, threads=2, rounds=19)
    timed = "resnet101 densenet169 resnet50 densenet121".split()
    fitted = "alexnet vgg19_bn resnet50 densenet121 senet18".split()
    parser.add_argument("--models", nargs="+", choices=MODELS, default=timed, help="for the timing of steps")
    parser.add_argument("--fit-models", nargs="+", choices=MODELS, default=fitted, help="for the fits")
    parser.add_argument("--steps", type=int, default=40, help="training steps; the last one is recorded")
    parser.add_argument("--settle", type=int, default=60, help="further steps before the timing")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = small_images()
    print(f"ratio {args.ratio}, {args.threads} threads, {args.steps} steps recorded, {args.settle} more to settle")
    steps: dict[str, Any] = {}
    fits: dict[str, dict[str, float]] = {}
    for model in dict.fromkeys([*args.models, *args.fit_models]):
        recording = record(model, data, BATCH, args.ratio, args.steps, LR)
        where = f"{sum(map(sum, recording.sizes)):,} elements in {len(recording.segments)} buckets"
        print(f"\n{model}: {where}, loss {recording.loss:.3f}", flush=True)
        if not math.isfinite(recording.loss):
            raise SystemExit(f"{model} did not learn: its results are not meaningful")
        if model in args.models:
            steps[model] = compare(recording, args.ratio, args.rounds, args.settle)
        if model in args.fit_models:
            fits[model] = fits_of(recording)
    print("\ndistance to Laplace / distance to Gauss", end="")
    heads = [f"{kind}, {how}" for kind in KINDS for how in ("by tensor", "together")]
    table = Table("", 13, [(head, head, "24.3f") for head in heads], fits)
    print_json({"benchmark": "selectors", "steps": steps, "fit": table.rows})


if __name__ == "__main__":
    main()
