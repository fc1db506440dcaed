"""Radix selection as published and as in GPU libraries: the exact top-k of each tensor, digit by digit.

The bits of |v| are processed 8 at a time, most significant first. Each pass counts the elements of each bin, among
the elements that share the digits found so far. The bin that contains rank k gives the next digit. Four passes
find the threshold. One more pass collects the elements above it, and as many ties as needed. Every thread
processes whole tensors. This is the `radixSelect` of the study that `benchmarks.selectors` repeats, without any of
the optimizations of `dgc.selection.Exact`.
"""

import ctypes
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from dgc.kernels import SparseVector
from dgc.kernels.build import compiler
from dgc.selection import Plan, Selector

SOURCE = r"""
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

static inline uint32_t magnitude(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffffu;
}

static int64_t select(const float* v, int64_t begin, int64_t end, int64_t k, int32_t* indices, float* values) {
    if (k > end - begin) k = end - begin;
    uint32_t prefix = 0, mask = 0;
    int64_t rank = k;
    for (int shift = 24; shift >= 0 && k; shift -= 8) {
        int64_t counts[256] = {};
        for (int64_t i = begin; i < end; ++i) {
            uint32_t bits = magnitude(v[i]);
            if ((bits & mask) == prefix) ++counts[bits >> shift & 255];
        }
        int digit = 255;
        while (rank > counts[digit]) rank -= counts[digit--];
        prefix |= static_cast<uint32_t>(digit) << shift;
        mask |= 255u << shift;
    }
    int64_t found = 0;
    for (int64_t i = begin; i < end && found < k; ++i) {
        uint32_t bits = magnitude(v[i]);
        if (bits < prefix || bits == 0 || (bits == prefix && rank-- <= 0)) continue;
        indices[found] = static_cast<int32_t>(i);
        values[found++] = v[i];
    }
    return found;
}

extern "C" int64_t select_all(const float* v, const int64_t* bounds, const int64_t* ks, int64_t ranges,
                              int threads, int32_t* indices, float* values) {
    std::vector<int64_t> place(ranges + 1, 0), found(ranges);
    for (int64_t s = 0; s < ranges; ++s) place[s + 1] = place[s] + ks[s];
    std::atomic<int64_t> next{0};
    auto work = [&] {
        for (int64_t s; (s = next++) < ranges;)
            found[s] = select(v, bounds[s], bounds[s + 1], ks[s], indices + place[s], values + place[s]);
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back(work);
    work();
    for (auto& other : others) other.join();
    int64_t at = 0;
    for (int64_t s = 0; s < ranges; at += found[s++]) {
        std::memmove(indices + at, indices + place[s], found[s] * sizeof *indices);
        std::memmove(values + at, values + place[s], found[s] * sizeof *values);
    }
    return at;
}
"""


@cache
def library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "radix.cpp"), Path(folder, "radix.so")
        source.write_text(SOURCE)
        words = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread"]
        subprocess.run([*compiler(), *words, str(source), "-o", str(target)], check=True)
        loaded = ctypes.CDLL(str(target))
    loaded.select_all.restype = ctypes.c_int64
    return loaded


@dataclass(frozen=True)
class RadixSelect(Selector):
    """Radix selection for CPU tensors."""

    def choose(self, v: Tensor, plan: Plan, seed: int) -> SparseVector:
        budget = plan.per_tensor
        indices = torch.zeros(budget.capacity, dtype=torch.int32)
        values = torch.zeros(budget.capacity)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (v, budget.bounds, budget.ks)]
        results = [ctypes.c_void_p(t.data_ptr()) for t in (indices, values)]
        ranges = ctypes.c_int64(budget.ks.numel())
        count = library().select_all(*pointers, ranges, torch.get_num_threads(), *results)
        indices[count:], values[count:] = 0, 0.0
        return SparseVector(indices, values, torch.full((), count, dtype=torch.int32))
