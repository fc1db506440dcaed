"""Comparison of selectors: the study of LDTE-BS (Chen, Liu, Han 2021), with the selectors of dgc.selection.

    python -m benchmarks.selectors [--quick] [--models resnet50 densenet121] [--figures DIR]

Each network is trained on 32x32 images with DGC at the given ratio, on one rank with batches of 8. Its u, v and
gradients are recorded. The images are CIFAR-10 if it is in data/cifar10, otherwise enlarged scikit-learn digits.
Sections of the output:

counts    (by model) reads of v by each selector beyond the update of u and v, in passes over v; elements that
          reach its thresholds before any cut, and elements that it sends, in units of k; share of the sum of
          squares in these. Both for accumulated v, in steps as below, and for the last gradient in place of v.
          `reached` includes all elements of tensors without a threshold; `sampled` has no threshold if a sample
          would be as large as the tensor
steps     (table 3, by model) gradient in, payload out, without forward and backward: accumulate, select, encode,
          take. `radix` is the study's radixSelect, `sampled` its hierarchical selection, `laplace` LDTE-BS. For
          comparison: the update of u and v only, which is the floor, torch.topk of |v| only, and the selection of
          `exact` only. New gradients have the recorded mean and deviation of each element. Before the timing,
          --settle steps fill v, and selectors with a history adapt. Each method continues with its own u and v
fit       (table 1) Wasserstein distances to Laplace and Gauss, tensor by tensor (see selector_fit)
training  seconds of forward and backward, and the time added by selection: a DGC step less the update of u and v
sizes     (figure 5) the selection only, from one tensor of numbers drawn from the recorded v of a tensor
curves    (figure 6) the digits network with every selector. Differences are mostly chance. For accuracies see
          benchmarks.convergence, which has methods of the same names

Methods alternate within each round. A ratio is the median over rounds of the ratio within a round. The last line
of the output is JSON.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch

from benchmarks.recordings import Recording, record, small_images
from benchmarks.results import print_json
from benchmarks.selector_curves import curves, print_curves
from benchmarks.selector_fit import PUBLISHED_FIT, Fit, fit_tensors, fit_together
from benchmarks.selector_methods import SELECTORS
from benchmarks.selector_sizes import by_size, print_sizes
from benchmarks.selector_timing import Compared, Options, compare, print_counts, print_steps

MODELS = (
    "alexnet",
    "densenet121",
    "densenet169",
    "resnet18",
    "resnet20",
    "resnet50",
    "resnet56",
    "resnet101",
    "senet18",
    "vgg16_bn",
    "vgg19_bn",
)
BATCH, LR = 8, 0.01
QUICK = {
    "models": ["resnet20"],
    "fit_models": ["alexnet"],
    "steps": 10,
    "settle": 20,
    "rounds": 7,
    "epochs": 1,
    "largest": 5.5,
}
KINDS = {"gradient": "raw gradient", "accumulated": "accumulated v"}

Fits = dict[str, dict[str, tuple[Fit, Fit]]]


def fits_of(recording: Recording) -> dict[str, tuple[Fit, Fit]]:
    """Return the fits by kind of values: tensor by tensor, and for the values of all tensors together."""
    found = {}
    for kind in KINDS:
        buckets = getattr(recording, kind)
        found[kind] = (fit_tensors(buckets, recording.sizes), fit_together(buckets))
    return found


def print_fits(fits: Fits) -> None:
    print("\nWasserstein distance to the most likely distribution, in standard deviations; 'as one': values of")
    print("all tensors together")
    heads = "".join(f"{head:>9}" for head in ("Laplace", "Gauss", "ratio", "as one"))
    print(f"{'':<13}{'published':>10}" + "".join(f"{words:^36}" for words in KINDS.values()))
    print(f"{'':<13}{'ratio':>10}{heads * len(KINDS)}")
    for model, row in fits.items():
        known = f"{PUBLISHED_FIT[model]:.3f}" if model in PUBLISHED_FIT else ""
        cells = "".join(f"{a.laplace:9.4f}{a.gauss:9.4f}{a.ratio:9.3f}{b.ratio:9.3f}" for a, b in row.values())
        print(f"{model:<13}{known:>10}{cells}")


def training_share(compared: Compared, seconds: float) -> dict[str, float]:
    """Selection's share of a training step, by method."""
    added = {name: compared.added(name) for name in SELECTORS}
    return {name: more / (seconds * 1e3 + compared.ms(name)) for name, more in added.items()}


def print_training(found: dict[str, Compared], seconds: dict[str, float]) -> None:
    print(f"\nforward and backward of {BATCH} images; milliseconds and share of a training step for selection")
    print(f"{'':<17}" + "".join(f"{model + f' {1e3 * seconds[model]:.0f} ms':>22}" for model in found))
    shares = {model: training_share(compared, seconds[model]) for model, compared in found.items()}
    for name in SELECTORS:
        cells = (f"{found[m].added(name):13.2f} {shares[m][name]:8.2%}" for m in found)
        print(f"{name:<17}" + "".join(cells))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        help="models for the timing of steps",
        default=["resnet101", "densenet169", "resnet50", "densenet121"],
    )
    parser.add_argument(
        "--fit-models",
        nargs="+",
        choices=MODELS,
        help="models for the fits of distributions",
        default=["alexnet", "vgg19_bn", "resnet50", "densenet121", "senet18"],
    )
    parser.add_argument("--ratio", type=float, default=0.001)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="training steps; the last one is recorded")
    parser.add_argument("--settle", type=int, default=60, help="further steps before the timing")
    parser.add_argument("--rounds", type=int, default=19)
    parser.add_argument("--largest", type=float, default=7.5, help="log10 of the largest single tensor")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of the learning curves; 0: none")
    parser.add_argument("--figures", type=Path, default=Path("runs/selectors"), help="folder of the figures")
    parser.add_argument("--quick", action="store_true", help="smaller defaults for a run of about a minute")
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    # here, so that a missing matplotlib fails before the measurements
    from benchmarks import selector_figures as figures

    figures.plots()
    args.figures.mkdir(parents=True, exist_ok=True)
    options = Options(args.ratio, args.rounds, args.settle, args.device)
    what, data = small_images()
    print(f"{what}; ratio {args.ratio}, {args.device}, {args.threads} threads, {args.steps} steps recorded")

    fits: Fits = {}
    found: dict[str, Compared] = {}
    seconds: dict[str, float] = {}
    drawn = None
    for model in dict.fromkeys([*args.models, *args.fit_models]):
        recording = record(model, data, BATCH, args.ratio, args.steps, LR, args.device)
        print(
            f"\n{model}: {recording.numel:,} elements in {len(recording.segments)} buckets, "
            f"loss {recording.loss:.3f}, a pass of {recording.seconds:.2f} s",
            flush=True,
        )
        if not math.isfinite(recording.loss):
            raise SystemExit(f"{model} did not learn: its results are not meaningful")
        fits[model], seconds[model] = fits_of(recording), recording.seconds
        if drawn is None:
            drawn = figures.largest_tensor(recording.accumulated, recording.sizes)
        if model in ("resnet50", args.models[0]):  # the study published ResNet-50's
            gradient = figures.largest_tensor(recording.gradient, recording.sizes)
            accumulated = figures.largest_tensor(recording.accumulated, recording.sizes)
            figures.draw_distributions(model, gradient, accumulated, args.figures / "distributions.png")
        if model in args.models:
            found[model] = compare(recording, options)
            print_counts(found[model])
            print_steps(found[model])
    assert drawn is not None
    print_fits(fits)
    print_training(found, seconds)
    figures.draw_steps(found, args.figures / "steps.png")
    sizes = [round(10 ** (half / 2)) for half in range(8, round(2 * args.largest) + 1)]
    times = by_size(drawn, sizes, min(7, args.rounds), options)
    print_sizes(times)
    figures.draw_sizes(times, args.figures / "sizes.png")
    learned = curves(args.ratio, args.epochs) if args.epochs else {}
    if learned:
        print_curves(learned)
        figures.draw_curves(learned, args.figures / "curves.png")
    print(f"\nfigures in {args.figures}")
    for model, compared in found.items():
        print(
            f"{model}: {compared.best} is fastest, {compared.over('exact', compared.best):.2f} times as fast as "
            f"exact, {compared.over('laplace', compared.best):.2f} times as fast as laplace"
        )
    result: dict[str, Any] = {
        "models": {model: compared.summary() for model, compared in found.items()},
        "fit": {model: {kind: pair[0].ratio for kind, pair in row.items()} for model, row in fits.items()},
        "fit_as_one": {model: {kind: pair[1].ratio for kind, pair in row.items()} for model, row in fits.items()},
        "fit_published": {model: PUBLISHED_FIT[model] for model in fits if model in PUBLISHED_FIT},
        "forward_backward_s": {model: seconds[model] for model in found},
        "selection_share": {model: training_share(compared, seconds[model]) for model, compared in found.items()},
        "sizes_ms": times,
        "accuracy": {name: curve.accuracy[-1] for name, curve in learned.items()},
        "loss": {name: curve.loss[-1] for name, curve in learned.items()},
    }
    print_json(result)


if __name__ == "__main__":
    main()
