// Products of many matrices of one shape with low-rank factors. Threads share the matrices, or the rows of a matrix.
#include "lowrank.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "selection/choice.h"
#include "common/isa.h"
#include "common/pool.h"

namespace dgc {
namespace {

constexpr int64_t worth_a_thread = 65536;  // elements

const LowRankKernels& kernels() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return lowrank_avx512;
    if (isa() == Isa::avx2) return lowrank_avx2;
#endif
    return lowrank_portable;
}

// The number of parts into which the rows of each of B matrices are split.
int parts_of(int64_t B, int64_t numel, int threads) {
    if (B >= threads) return 1;
    return static_cast<int>(std::min<int64_t>(threads, 1 + numel / worth_a_thread));
}

int useful(int64_t tasks, int64_t numel, int threads) {
    return static_cast<int>(std::min({static_cast<int64_t>(threads), tasks, 1 + numel / worth_a_thread}));
}

}  // namespace
}  // namespace dgc

// LowRankWork for B consecutive matrices in M, with factors U [B, R, n], W [B, R, m], X and Y [B, r, ..]. g: the
// address of each matrix's gradient, or null. Returns the index of the first gradient element that is NaN or too
// large, or B * n * m if there is none.
DGC_EXPORT int64_t dgc_lowrank(float* M, int64_t B, int64_t n, int64_t m, const float* U, const float* W, int64_t R,
                               const float* const* g, const float* X, int64_t r, int even, float* Y, int threads) {
    using namespace dgc;
    const int parts = parts_of(B, n * m, threads);
    const int64_t x = even ? n : m, y = even ? m : n;
    // Columns are summed over all rows: every part except the first has a separate buffer for its sums.
    std::vector<float> sums(even ? static_cast<size_t>(B * (parts - 1) * r * m) : 0);
    if (even) std::fill(Y, Y + B * r * m, 0.0f);
    std::vector<int64_t> found(static_cast<size_t>(B * parts), -1);
    share_out(B * parts, useful(B * parts, B * n * m, threads), [&](int64_t task, int) {
        const int64_t b = task / parts, part = task % parts;
        LowRankWork work{M + b * n * m, n, m, nullptr, nullptr, R, nullptr, nullptr, r, even != 0};
        if (R) work.U = U + b * R * n, work.W = W + b * R * m;
        if (g) work.g = g[b];
        if (r) work.X = X + b * r * x;
        float* mine = even && part ? sums.data() + (b * (parts - 1) + part - 1) * r * m : Y + b * r * y;
        const int64_t begin = part_begin(n, parts, static_cast<int>(part), 4);
        found[task] = kernels().rows(work, begin, part_begin(n, parts, static_cast<int>(part) + 1, 4), mine);
    });
    for (int64_t b = 0; b < B && even; ++b)
        for (int64_t part = 0; part < parts - 1; ++part)
            for (int64_t i = 0; i < r * m; ++i) Y[b * r * m + i] += sums[(b * (parts - 1) + part) * r * m + i];
    for (int64_t task = 0; task < B * parts; ++task)
        if (found[task] >= 0) return task / parts * n * m + found[task];
    return B * n * m;
}

// out[b] [n, m] = U[b]^T W[b] for each of B matrices.
DGC_EXPORT void dgc_outer(const float* U, const float* W, int64_t B, int64_t R, int64_t n, int64_t m,
                          float* const* out, int threads) {
    using namespace dgc;
    const int parts = parts_of(B, n * m, threads);
    share_out(B * parts, useful(B * parts, B * n * m, threads), [&](int64_t task, int) {
        const int64_t b = task / parts;
        const int part = static_cast<int>(task % parts);
        kernels().outer(U + b * R * n, W + b * R * m, R, n, m, part_begin(n, parts, part, 4),
                        part_begin(n, parts, part + 1, 4), out[b]);
    });
}
