// Products of many matrices of one shape with low-rank factors. Threads share the matrices, or the rows of a matrix.
#include "lowrank.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
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

// LowRankWork for B consecutive matrices in M, with factors U [B, R, n], W [B, R, m], X and Y [B, r, ..]. g: the
// address of each matrix's gradient, or null. Returns the index of the first gradient element that is NaN or too
// large, or -1 if there is none.
int64_t work_on(float* M, int64_t B, int64_t n, int64_t m, const float* U, const float* W, int64_t R,
                const float* const* g, const float* X, int64_t r, int even, float* Y, int threads) {
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
    return -1;
}

}  // namespace
}  // namespace dgc

// For B consecutive matrices in M: M -= U^T W if R > 0, then Y = M^T X or M X if r > 0.
DGC_EXPORT void dgc_lowrank(float* M, int64_t B, int64_t n, int64_t m, const float* U, const float* W, int64_t R,
                            const float* X, int64_t r, int even, float* Y, int threads) {
    dgc::work_on(M, B, n, m, U, W, R, nullptr, X, r, even, Y, threads);
}

// The first pass of a step over v [numel]. sizes: offset in v, B, n, m, R and r of each batch. factors: its U, W
// (null if R is 0), X and Y. g: the gradient of each matrix, and then `pieces` pieces for the rest of v, with
// `begins` [pieces + 1] in the rest. errors: if `replaces`, what the rest of v becomes before its gradient is added,
// null for zeros. Returns the index in v of the first element of g that is NaN or too large, or numel.
DGC_EXPORT int64_t dgc_lowrank_first(float* v, int64_t numel, const int64_t* sizes, int64_t batches,
                                     float* const* factors, int even, const float* const* g, const int64_t* begins,
                                     int pieces, int replaces, const float* errors, int threads) {
    int64_t first = numel, begin = 0;
    for (int64_t b = 0; b < batches; ++b, sizes += 6, factors += 4) {
        const int64_t offset = sizes[0], B = sizes[1], n = sizes[2], m = sizes[3];
        const int64_t found = dgc::work_on(v + offset, B, n, m, factors[0], factors[1], sizes[4], g, factors[2],
                                           sizes[5], even, factors[3], threads);
        if (found >= 0) first = std::min(first, offset + found);
        g += B;
        begin = offset + B * n * m;
    }
    if (const int64_t rest = numel - begin; rest > 0) {
        if (replaces && errors) std::copy_n(errors, rest, v + begin);
        if (replaces && !errors) std::fill_n(v + begin, rest, 0.0f);
        threads = static_cast<int>(std::min<int64_t>(threads, 1 + rest / dgc::worth_a_thread));
        const dgc::Source source{dgc::residual, g, begins, pieces, nullptr, v + begin, 1.0f, {}};
        const int64_t found = dgc::update(source, rest, threads);
        if (found < rest) first = std::min(first, begin + found);
    }
    return first;
}

// out = x / |x| for each of `rows` rows of d elements, |x| from sums in fp64 in one order on every CPU. Returns
// whether all lengths are positive and finite.
DGC_EXPORT int dgc_unit_rows(const float* x, int64_t rows, int64_t d, float* out) {
    constexpr int64_t lanes = 8;
    bool usable = true;
    for (int64_t row = 0; row < rows; ++row, x += d, out += d) {
        double sums[lanes] = {}, sum = 0.0;
        for (int64_t i = 0; i < d; ++i) sums[i % lanes] += static_cast<double>(x[i]) * x[i];
        for (double part : sums) sum += part;
        const float length = static_cast<float>(std::sqrt(sum));
        for (int64_t i = 0; i < d; ++i) out[i] = x[i] / length;
        usable &= length > 0.0f && length <= std::numeric_limits<float>::max();
    }
    return usable;
}

// out[b] [n, m] = U[b]^T W[b] for each matrix of several batches. sizes: B, R, n and m of each batch. factors: its U
// and W. out: the addresses of all matrices, and then the addresses of `rest` places for consecutive parts of `mean`, with
// `lengths` elements each.
DGC_EXPORT void dgc_outer(float* const* factors, const int64_t* sizes, int64_t batches, float* const* out,
                          const float* mean, const int64_t* lengths, int64_t rest, int threads) {
    using namespace dgc;
    for (int64_t i = 0; i < batches; ++i, sizes += 4, factors += 2) {
        const int64_t B = sizes[0], R = sizes[1], n = sizes[2], m = sizes[3];
        const float *U = factors[0], *W = factors[1];
        const int parts = parts_of(B, n * m, threads);
        share_out(B * parts, useful(B * parts, B * n * m, threads), [&](int64_t task, int) {
            const int64_t b = task / parts;
            const int part = static_cast<int>(task % parts);
            kernels().outer(U + b * R * n, W + b * R * m, R, n, m, part_begin(n, parts, part, 4),
                            part_begin(n, parts, part + 1, 4), out[b]);
        });
        out += B;
    }
    for (int64_t i = 0; i < rest; mean += lengths[i++]) std::copy_n(mean, lengths[i], out[i]);
}
