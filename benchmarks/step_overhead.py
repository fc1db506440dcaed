"""Time of a DGC step before communication: gradient in, payload out.

    python -m benchmarks.step_overhead --model resnet50 --ratio 0.001 --threads 2

ours      remove the elements sent in the previous step from u and v, accumulate, select, encode into a payload; by
          backend of kernels and by selection engine, all of which send the same elements
floor     only u = m u + g, v = v + u: the faster one of a loop without branches, compiled for this machine, and
          our own pass
eager     the original DGC algorithm in plain PyTorch, tensor by tensor: sampled threshold, adaptation, masking.
          It produces only indices and values, no payload.

The tensors are those of ResNet-50 with two or more dimensions, fp32, in buckets of 25 MB. Every step has a
new gradient (heavy tails: normal times log-normal), equal for all methods. u and v come from many DGC steps, since
accumulated gradients differ strongly from new ones.
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
from dgc.core.bucket import Segment, lay_out
from dgc.sparse.payloads import CastValues, PlainIndices, SparseFormat
from dgc.sparse.selectors import Exact, Predicted

TAKES = "30 s"
BUCKET_BYTES = 25 * 1024 * 1024
SPARE = 1 << 24  # range of the random start of a gradient, in elements
MOMENTUM = 0.9


def resnet50() -> dict[str, Tensor]:
    """Return the tensors of two or more dimensions of torchvision's network (He et al. 2015, table 1)."""
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


def make_steps(args: argparse.Namespace, buckets: list[tuple[Segment, ...]], gradients: Gradients) -> list[Step]:
    """Return our step, warmed up, then all others, which start from the same u and v."""
    wire = SparseFormat(CastValues("fp16"), PlainIndices("int32"))

    def ours(backend: str, engine: Exact) -> Ours:
        return Ours(backend, engine, buckets, args.ratio, MOMENTUM, wire, "cpu")

    first = ours("native", Predicted())
    for _ in range(args.warm_up):
        first.step(gradients.next())
    first.settle()
    others: list[Step] = [
        *floors("native", buckets, MOMENTUM, "cpu"),
        ours("native", Exact()),
        ours("reference", Exact()),
        Eager(buckets, args.ratio, MOMENTUM, "cpu"),
        TopK(buckets, args.ratio, "cpu"),
        Copy(sum(map(sum, gradients.sizes)), "cpu"),
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


def report(args: argparse.Namespace) -> dict[str, float]:
    """Print the table. Returns the results."""
    torch.set_num_threads(args.threads)
    buckets = plan_buckets(resnet50())
    gradients = Gradients(buckets, "cpu")
    numel = sum(map(sum, gradients.sizes))
    steps = make_steps(args, buckets, gradients)
    times = measure(steps, gradients, args.rounds, "cpu")
    ours = steps[0].name
    floor = min((s.name for s in steps if s.is_floor), key=lambda name: middle(times[name]))
    kernels.use("native")
    backend = kernels.describe(torch.device("cpu"))
    print(f"{args.model}: {numel:,} parameters in {len(buckets)} buckets, ratio {args.ratio}")
    print(f"fp16 values, int32 indices; cpu, {backend}, {args.threads} threads")
    columns = [("ms", "median ms", "11.3f"), ("least", "least", "10.3f"), ("ratio", "/ floor", "9.3f")]
    table = Table("", 34, [*columns, ("rate", "GB/s", "7.1f")])
    for step in steps:
        row = times[step.name]
        rate = step.bytes_per_parameter * numel / middle(row) / 1e6 if step.bytes_per_parameter else None
        against = {"least": min(row.values()), "ratio": ratio(row, times[floor])}
        table.add(step.name, {"ms": middle(row), **against, "rate": rate})
    named = {"floor": times[floor], "ours": times[ours], "eager": times["eager"]}
    result = {f"{what}_ms": middle(own) for what, own in named.items()}
    result["ratio_to_floor"] = ratio(times[ours], times[floor])
    result["speedup_vs_eager"] = ratio(times["eager"], times[ours])
    result["copy_gb_per_s"] = Copy.bytes_per_parameter * numel / middle(times[Copy.name]) / 1e6
    assert all(math.isfinite(number) for number in result.values())
    return result


def main() -> None:
    threads = torch.get_num_threads()
    parser = options("benchmarks.step_overhead", __doc__, ratio=0.001, threads=threads, rounds=36, warm_up=100)
    parser.add_argument("--model", choices=["resnet50"], default="resnet50")
    print_json({"benchmark": "step_overhead", **report(parser.parse_args())})


if __name__ == "__main__":
    main()
