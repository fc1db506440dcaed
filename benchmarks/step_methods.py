"""The methods that `benchmarks.step_overhead` compares. Each is one step over all buckets."""

import ctypes
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import dgc.kernels as kernels
from dgc.core.bucket import Segment
from dgc.kernels import PassInputs, SparseVector
from dgc.kernels.build import compiler
from dgc.sparse.payloads import SparseFormat
from dgc.sparse.payloads.payload import PayloadPlan
from dgc.sparse.selectors import Selector, SelectorResult, plan_selection

Layout = Sequence[Sequence[Segment]]


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

    def __init__(self, buckets: Layout, device: str):
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
        buckets: Layout,
        ratio: float,
        momentum: float,
        wire: SparseFormat,
        device: str,
    ):
        super().__init__(buckets, device)
        self.name = f"{backend}, {type(selector).__name__.lower()}"
        self.is_slow = backend == "reference"
        self.backend, self.selector, self.wire, self.momentum = backend, selector, wire, momentum
        self.plans = [plan_selection(bucket, ratio, torch.device(device)) for bucket in buckets]
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
        return self.selector.select(inputs, self.plans[i], self.steps)

    def send(self, i: int, selected: SelectorResult) -> None:
        v = self.v[i]
        payload = PayloadPlan(self.wire, self.plans[i].per_tensor, v.numel())
        encoded = payload.encode(kernels.of(v).codec, selected.elements, selected.first_nonfinite)
        self.sent[i] = encoded.sent


class Pass(Stateful):
    """Our own pass over g, u and v, without any selection."""

    is_floor = True
    bytes_per_parameter = 20

    def __init__(self, backend: str, buckets: Layout, momentum: float, device: str):
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

    def __init__(self, buckets: Layout, momentum: float):
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


def floors(backend: str, buckets: Layout, momentum: float, device: str) -> list[Step]:
    own: list[Step] = [Pass(backend, buckets, momentum, device)]
    return [PlainLoop(buckets, momentum), *own] if device == "cpu" else own


class Eager(Stateful):
    """DGC as published (specification 1.2 and 4.1): for each tensor, a threshold from a strided sample of 1 %,
    adapted by 0.8 or 1.3 up to 10 times until 0.8 k to 1.3 k elements pass, resampled if more do.
    """

    name = "eager"
    is_slow = True
    sample_ratio, lower, upper, retries = 0.01, 0.8, 1.3, 10

    def __init__(self, buckets: Layout, ratio: float, momentum: float, device: str):
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

    def __init__(self, buckets: Layout, ratio: float, device: str):
        super().__init__(buckets, device)
        self.ks = [plan_selection(bucket, ratio).ks for bucket in buckets]

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
