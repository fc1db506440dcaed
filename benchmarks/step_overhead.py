"""Time of a DGC step before communication: gradient in, payload out.

    python -m benchmarks.step_overhead --model resnet50 --ratio 0.001 --threads 2

ours      remove the elements sent in the previous step from u and v, accumulate, select, encode into a payload; by
          backend of kernels and by selection engine, all of which send the same elements
floor     only u = m u + g, v = v + u: the faster one of a loop without branches, compiled for this machine, and
          our own pass
eager     the original DGC algorithm in plain PyTorch, tensor by tensor: sampled threshold, adaptation, masking.
          It produces only indices and values, no payload.

The tensors are ResNet-50's with two or more dimensions, fp32, in buckets of 25 MB. Every step has a
new gradient (heavy tails: normal times log-normal), equal for all methods. u and v come from many DGC steps, since
accumulated gradients differ strongly from new ones.
"""

import argparse
import ctypes
import math
import random
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import dgc.kernels as kernels
from benchmarks._harness import Table, in_turns, middle, options, print_json, ratio
from dgc.core.bucket import Segment, lay_out
from dgc.kernels import PassInputs, SparseVector
from dgc.kernels.build import compiler
from dgc.sparse.payloads import CastValues, PlainIndices, SparseFormat
from dgc.sparse.payloads.payload import PayloadPlan
from dgc.sparse.selectors import Exact, Predicted, Selector, SelectorResult, quota_of

TAKES = "30 s"
BUCKET_BYTES = 25 * 1024 * 1024
SPARE = 1 << 24  # range of the random start of a gradient, in elements
MOMENTUM = 0.9

Buckets = Sequence[Sequence[Segment]]


class Step(ABC):
    """What one of the methods does with the gradients of all buckets."""

    name: str
    is_floor = False
    is_slow = False
    bytes_per_parameter = 0  # memory traffic; 0 if it depends on the data

    @abstractmethod
    def start_from(self, u: list[Tensor], v: list[Tensor]) -> None: ...

    @abstractmethod
    def step(self, gradients: list[Tensor]) -> None: ...


class Stateful(Step):
    """u and v of every bucket, and the sent elements that the next step removes from them."""

    def __init__(self, buckets: Buckets, device: str):
        self.sizes = [[segment.numel for segment in bucket] for bucket in buckets]
        self.u = [torch.zeros(sum(sizes), device=device) for sizes in self.sizes]
        self.v = [torch.zeros(sum(sizes), device=device) for sizes in self.sizes]
        self.sent: list[SparseVector | None] = [None] * len(self.sizes)

    def settle(self) -> None:
        """Remove the sent elements, so that u and v can be read."""
        for b, (u, v, sent) in enumerate(zip(self.u, self.v, self.sent, strict=True)):
            if sent is not None:
                kernels.of(v).selection.remove_sent_(sent, u, v)
            self.sent[b] = None

    def start_from(self, u: list[Tensor], v: list[Tensor]) -> None:
        for mine, theirs in zip((*self.u, *self.v), (*u, *v), strict=True):
            mine.copy_(theirs)
        self.sent = [None] * len(self.sent)


class Ours(Stateful):
    """A step: remove the previous step's sent elements from u and v; gradient in, payload out."""

    def __init__(
        self,
        backend: str,
        selector: Selector,
        buckets: Buckets,
        ratio: float,
        momentum: float,
        wire: SparseFormat,
        device: str,
    ):
        super().__init__(buckets, device)
        self.name = f"{backend}, {type(selector).__name__.lower()}"
        self.is_slow = backend == "reference"
        self.backend, self.selector, self.momentum = backend, selector, momentum
        self.quotas = [quota_of(bucket, ratio, torch.device(device)) for bucket in buckets]
        self.payloads = [
            PayloadPlan(wire, quota.per_tensor, sum(sizes))
            for quota, sizes in zip(self.quotas, self.sizes, strict=True)
        ]
        self.steps = 0

    def step(self, gradients: list[Tensor]) -> None:
        kernels.use(self.backend)
        for i, g in enumerate(gradients):
            self.send(i, self.select(i, g))
        self.steps += 1

    def select(self, i: int, g: Tensor) -> SelectorResult:
        """Do the step of bucket i with gradient g."""
        pieces = g.split(self.sizes[i])
        inputs = PassInputs(pieces, self.u[i], self.v[i], self.momentum, sent=self.sent[i], masking=True)
        return self.selector.select(inputs, self.quotas[i], self.steps)

    def send(self, i: int, selected: SelectorResult) -> None:
        codec = kernels.of(self.v[i]).codec
        encoded = self.payloads[i].encode(codec, selected.elements, selected.first_nonfinite)
        self.sent[i] = encoded.sent


class Pass(Stateful):
    """Our own pass over g, u and v, without any selection."""

    is_floor = True
    bytes_per_parameter = 20

    def __init__(self, backend: str, buckets: Buckets, momentum: float, device: str):
        super().__init__(buckets, device)
        self.name, self.backend, self.momentum = f"{backend}, accumulate only", backend, momentum

    def step(self, gradients: list[Tensor]) -> None:
        kernels.use(self.backend)
        for g, u, v in zip(gradients, self.u, self.v, strict=True):
            kernels.of(v).selection.accumulate_(PassInputs((g,), u, v, self.momentum))


PLAIN_LOOP = r"""
#include <cstdint>
#include <thread>
#include <vector>

static void update(float* __restrict u, float* __restrict v, const float* __restrict g, int64_t n, float m) {
    for (int64_t i = 0; i < n; ++i) {
        float x = m * u[i] + g[i];
        u[i] = x;
        v[i] += x;
    }
}

extern "C" void update_all(float** u, float** v, float** g, const int64_t* sizes, int buckets, float m,
                           int threads) {
    auto share = [=](int t) {
        for (int b = 0; b < buckets; ++b) {
            int64_t begin = sizes[b] * t / threads / 16 * 16;
            int64_t end = t + 1 == threads ? sizes[b] : sizes[b] * (t + 1) / threads / 16 * 16;
            update(u[b] + begin, v[b] + begin, g[b] + begin, end - begin, m);
        }
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(share, t);
    share(0);
    for (auto& other : others) other.join();
}
"""


class PlainLoop(Stateful):
    """The update as vectorized by a compiler for this machine, for all buckets in one call."""

    name = "plain update of u and v"
    is_floor = True
    bytes_per_parameter = 20

    def __init__(self, buckets: Buckets, momentum: float):
        super().__init__(buckets, "cpu")
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "loop.cpp"), Path(folder, "loop.so")
            source.write_text(PLAIN_LOOP)
            words = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread", str(source), "-o", str(target)]
            subprocess.run([*compiler(), *words], check=True)
            self.library = ctypes.CDLL(str(target))
        self.momentum = ctypes.c_float(momentum)
        self.counts = (ctypes.c_int64 * len(self.v))(*[v.numel() for v in self.v])

    def step(self, gradients: list[Tensor]) -> None:
        pointers = [(ctypes.c_void_p * len(ts))(*[t.data_ptr() for t in ts]) for ts in (self.u, self.v, gradients)]
        self.library.update_all(*pointers, self.counts, len(self.counts), self.momentum, torch.get_num_threads())


def floors(backend: str, buckets: Buckets, momentum: float, device: str) -> list[Step]:
    own: list[Step] = [Pass(backend, buckets, momentum, device)]
    return [PlainLoop(buckets, momentum), *own] if device == "cpu" else own


class Eager(Stateful):
    """DGC as published (specification 1.2 and 4.1): for each tensor, a threshold from a strided sample of 1 %,
    adapted by 0.8 or 1.3 up to 10 times until 0.8 k to 1.3 k elements pass, resampled if more do.
    """

    name = "eager"
    is_slow = True
    sample_ratio, lower, upper, retries = 0.01, 0.8, 1.3, 10

    def __init__(self, buckets: Buckets, ratio: float, momentum: float, device: str):
        super().__init__(buckets, device)
        self.ratio, self.momentum = ratio, momentum
        self.tensors = [
            [(u, v) for u, v in zip(us.split(sizes), vs.split(sizes), strict=True)]
            for us, vs, sizes in zip(self.u, self.v, self.sizes, strict=True)
        ]

    def step(self, gradients: list[Tensor]) -> None:
        for flat, sizes, states in zip(gradients, self.sizes, self.tensors, strict=True):
            for g, (u, v) in zip(flat.split(sizes), states, strict=True):
                u.mul_(self.momentum).add_(g)
                v.add_(u)
                indices = self.choose(v)
                values = v[indices]
                assert values.numel() == indices.numel()
                u.index_fill_(0, indices, 0)
                v.index_fill_(0, indices, 0)

    def choose(self, v: Tensor) -> Tensor:
        n = v.numel()
        k = max(1, -int(-n * self.ratio // 1))
        magnitudes = v.abs()
        least = max(-int(-n * self.sample_ratio // 1), -int(-2 // self.ratio))
        if least >= n:
            samples = magnitudes
        else:
            stride = -int(-n // least // 32) * 32 + 1
            while n // stride < least:
                stride -= 8
            samples = magnitudes[int(torch.randint(stride, ())) :: stride]
        count = max(1, -int(-samples.numel() * self.ratio // 1))
        threshold = torch.topk(samples, count, sorted=False).values.min()
        indices = (magnitudes >= threshold).nonzero().view(-1)
        for _ in range(0 if samples is magnitudes else self.retries):
            if indices.numel() > self.upper * k:
                return indices[torch.topk(magnitudes[indices], k, sorted=False).indices]
            if indices.numel() >= self.lower * k:
                break
            threshold = threshold * self.lower
            indices = (magnitudes >= threshold).nonzero().view(-1)
        return indices[:k]


class TopK(Stateful):
    """torch.topk of each tensor, on the same v as our step."""

    name = "torch.topk of |v| alone"
    is_slow = True

    def __init__(self, buckets: Buckets, ratio: float, device: str):
        super().__init__(buckets, device)
        self.ks = [quota_of(bucket, ratio).ks for bucket in buckets]

    def step(self, gradients: list[Tensor]) -> None:
        for v, sizes, ks in zip(self.v, self.sizes, self.ks, strict=True):
            for part, k in zip(v.split(sizes), ks, strict=True):
                torch.topk(part.abs(), k, sorted=False)


class Copy(Step):
    """A copy of one fp32 value per parameter."""

    name = "copy of g"
    bytes_per_parameter = 8

    def __init__(self, numel: int, device: str):
        self.source, self.target = (torch.ones(numel, device=device) for _ in range(2))

    def start_from(self, u: list[Tensor], v: list[Tensor]) -> None:
        """A copy has no state."""

    def step(self, gradients: list[Tensor]) -> None:
        self.target.copy_(self.source)


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
