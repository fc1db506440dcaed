"""Time of a DGC step before communication: gradient in, payload out.

    python -m benchmarks.step_overhead --model resnet50 --ratio 0.001 --device cpu --threads 2

ours      remove the elements sent in the previous step from u and v, accumulate, select, encode into a payload; by
          backend of kernels and by selection engine, all of which send the same elements
floor     only u = m u + g, v = v + u. On a CPU: the faster one of a loop without branches, compiled for this
          machine, and our own pass. On a GPU: our own pass
eager     the original DGC algorithm in plain PyTorch, tensor by tensor: sampled threshold, adaptation, masking.
          It produces only indices and values, no payload.

The tensors are those of the named model with two or more dimensions, fp32, in buckets of 25 MB. Every step has a
new gradient (heavy tails: normal times log-normal), equal for all methods. u and v come from many DGC steps, since
accumulated gradients differ strongly from new ones. Methods alternate within each round. A ratio is the median
over rounds of the ratio within a round. The output is a table and a last line of JSON.
"""

import argparse
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

import dgc.kernels as kernels
from benchmarks.harness import Table, in_turns, middle, options, print_json, ratio
from benchmarks.step_methods import Copy, Eager, Ours, Step, TopK, floors
from dgc.bucket import Segment, lay_out
from dgc.compression.sparse import INDICES, VALUES
from dgc.selection import Exact, Histogram, Predicted
from dgc.wire import SparseFormat

TAKES = "30 s"
BUCKET_BYTES = 25 * 1024 * 1024
SPARE = 1 << 24  # range of the random start of a gradient, in elements
MOMENTUM = 0.9


def tensors_of(model: str) -> dict[str, Tensor]:
    """Return the tensors of two or more dimensions, without memory."""
    if model == "resnet50":
        return resnet50()
    from torchvision import models

    import dgc_datasets.torchvision_compat  # noqa: F401

    with torch.device("meta"):
        return {name: p for name, p in getattr(models, model)().named_parameters() if p.dim() >= 2}


def resnet50() -> dict[str, Tensor]:
    """Return those of torchvision's network (He et al. 2015, table 1) without torchvision."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                shapes.append((4 * width, channels, 1, 1))
            channels = 4 * width
    shapes.append((1000, channels))
    return {str(i): torch.empty(shape, device="meta") for i, shape in enumerate(shapes)}


def gpt2_medium() -> dict[str, Tensor]:
    """Return those of the network with 355 million parameters (Radford et al. 2019)."""
    width, blocks = 1024, 24
    block = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    shapes = [(50257, width), (1024, width), *block * blocks]
    return {str(i): torch.empty(shape, device="meta") for i, shape in enumerate(shapes)}


def plan_buckets(tensors: Mapping[str, Tensor]) -> list[tuple[Segment, ...]]:
    """Return buckets of whole tensors, in the order of backward."""
    buckets: list[list[tuple[str, Tensor]]] = [[]]
    for name, tensor in reversed(list(tensors.items())):
        if buckets[-1] and 4 * sum(t.numel() for t in [*dict(buckets[-1]).values(), tensor]) > BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append((name, tensor))
    return [lay_out(bucket) for bucket in buckets]


class Gradients:
    """New gradients at no cost: each is a random part of one pool of random numbers."""

    def __init__(self, buckets: list[tuple[Segment, ...]], device: str):
        self.sizes = [[segment.numel for segment in bucket] for bucket in buckets]
        self.where = random.Random(1)
        size = max(sum(sizes) for sizes in self.sizes) + SPARE
        generator = torch.Generator().manual_seed(1)
        self.pool = torch.randn(size, generator=generator)
        self.pool.mul_(torch.randn(size, generator=generator).exp_())
        self.pool = self.pool.to(device)

    def next(self) -> list[Tensor]:
        starts = [self.where.randrange(SPARE // 16) * 16 for _ in self.sizes]
        return [self.pool[start : start + sum(sizes)] for start, sizes in zip(starts, self.sizes, strict=True)]


def tiers_on(device: str) -> list[str]:
    return ["native", "reference"] if device == "cpu" else ["triton", "reference"]


def make_steps(args: argparse.Namespace, buckets: list[tuple[Segment, ...]], gradients: Gradients) -> list[Step]:
    """Return our step, warmed up, then all others, which start from the same u and v."""
    fast, plain = tiers_on(args.device)
    wire = SparseFormat(VALUES[args.values](), INDICES[args.indices]())

    def ours(backend: str, engine: Exact) -> Ours:
        return Ours(backend, engine, buckets, args.ratio, MOMENTUM, wire, args.device)

    first = ours(fast, Predicted())
    for _ in range(args.warm_up):
        first.step(gradients.next())
    first.settle()
    others: list[Step] = [
        *floors(fast, buckets, MOMENTUM, args.device),
        ours(fast, Histogram()),
        ours(fast, Exact()),
        ours(plain, Exact()),
        Eager(buckets, args.ratio, MOMENTUM, args.device),
        TopK(buckets, args.ratio, args.device),
        Copy(sum(sum(sizes) for sizes in gradients.sizes), args.device),
    ]
    for other in others:
        other.start_from(first.u, first.v)
    return [first, *others]


def measure(steps: Sequence[Step], gradients: Gradients, rounds: int, device: str) -> dict[str, dict[int, float]]:
    """Return milliseconds by method and round. All methods of a round have the same gradient."""
    fresh: list[Tensor] = []

    def draw(number: int) -> None:
        fresh[:] = gradients.next()

    def once(step: Step, number: int) -> float:
        wait(device)
        start = time.perf_counter()
        step.step(fresh)
        wait(device)
        return 1e3 * (time.perf_counter() - start)

    works: dict[str, Callable[[int], float]] = {step.name: partial(once, step) for step in steps}
    return in_turns(works, rounds, slow=[step.name for step in steps if step.is_slow], before=draw)


def wait(device: str) -> None:
    """Wait for what the device has to do. A CPU needs no synchronization."""
    if device == "cuda":
        torch.cuda.synchronize()


def arguments() -> argparse.ArgumentParser:
    parser = options("benchmarks.step_overhead", __doc__)
    parser.add_argument("--model", choices=["resnet50", "vgg16"], default="resnet50")
    parser.add_argument("--ratio", type=float, default=0.001)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=36)
    parser.add_argument("--warm-up", type=int, default=100, help="steps before the timing")
    parser.add_argument("--indices", choices=INDICES, default="int32")
    parser.add_argument("--values", choices=VALUES, default="fp16")
    return parser


def report(args: argparse.Namespace) -> dict[str, float]:
    """Print the table. Returns the results."""
    torch.set_num_threads(args.threads)
    buckets = plan_buckets(tensors_of(args.model))
    gradients = Gradients(buckets, args.device)
    numel = sum(sum(sizes) for sizes in gradients.sizes)
    steps = make_steps(args, buckets, gradients)
    times = measure(steps, gradients, args.rounds, args.device)

    ours = steps[0].name
    floor = min((s.name for s in steps if s.is_floor), key=lambda name: middle(times[name]))
    kernels.use(tiers_on(args.device)[0])
    backend = kernels.describe(torch.device(args.device))
    print(f"{args.model}: {numel:,} parameters in {len(buckets)} buckets, ratio {args.ratio}")
    print(f"{args.values} values, {args.indices} indices; {args.device}, {backend}, {args.threads} threads")
    columns = [("ms", "median ms", "11.3f"), ("least", "least", "10.3f"), ("ratio", "/ floor", "9.3f")]
    table = Table("", 34, [*columns, ("rate", "GB/s", "7.1f")])
    for step in steps:
        row = times[step.name]
        rate = step.bytes_per_parameter * numel / middle(row) / 1e6 if step.bytes_per_parameter else None
        against = {"least": min(row.values()), "ratio": ratio(row, times[floor])}
        table.add(step.name, {"ms": middle(row), **against, "rate": rate})
    result = {
        "floor_ms": middle(times[floor]),
        "ours_ms": middle(times[ours]),
        "ratio_to_floor": ratio(times[ours], times[floor]),
        "eager_ms": middle(times["eager"]),
        "speedup_vs_eager": ratio(times["eager"], times[ours]),
        "copy_gb_per_s": Copy.bytes_per_parameter * numel / middle(times[Copy.name]) / 1e6,
    }
    assert all(math.isfinite(number) for number in result.values())
    return result


def main() -> None:
    print_json({"benchmark": "step_overhead", **report(arguments().parse_args())})


if __name__ == "__main__":
    main()
