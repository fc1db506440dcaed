// The kernels of lowrank.h, shared by all instruction sets. The including file defines `lanes`, the floats per
// vector, first. The kernels process four rows at a time, so that each load of the factors is used four times.
//
// The R terms of U^T W are added in order, and each product and difference is rounded separately. The bits are
// therefore the same with every instruction set. The order of sums along rows and columns depends on the vector
// width.
#include "common/float_bits.h"
#include "lowrank.h"

namespace dgc {
namespace {

typedef float F __attribute__((vector_size(lanes * sizeof(float))));
typedef int32_t I __attribute__((vector_size(lanes * sizeof(float))));

constexpr int64_t block = 4;    // rows
constexpr int64_t at_once = 4;  // rows of X with sums kept in registers

template <class V>
inline V load(const float* p) {
    V x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}

template <class V>
inline void store(float* p, V x) {
    __builtin_memcpy(p, &x, sizeof x);
}

// Returns x, or zero if x is NaN or too large, which sets `bad`.
inline F usable(F x, I& bad) {
    const I bits = reinterpret_cast<I>(x);
    const I lost = (bits & 0x7FFFFFFF) >= static_cast<int32_t>(too_large_bits);
    bad |= lost;
    return reinterpret_cast<F>(bits & ~lost);
}

inline float usable(float x, int32_t& bad) {
    const bool lost = (bits_of(x) & 0x7FFFFFFF) >= too_large_bits;
    bad |= lost;
    return lost ? 0.0f : x;
}

inline float sum_of(F x) {
    float sum = 0.0f;
    for (int lane = 0; lane < lanes; ++lane) sum += x[lane];
    return sum;
}

// Processes columns j .. j + (lanes of V) - 1 of rows i .. i + B - 1. K: the number of rows of X for the products
// along the rows, accumulated in `sums`.
template <int64_t B, int64_t K, class V, class Bad>
inline void columns(const LowRankWork& w, int64_t i, int64_t j, float* Y, V (&sums)[K ? K : 1][B], Bad& bad) {
    V x[B];
    // The next rows: the hardware does not follow so many.
    for (int64_t b = 0; b < B; ++b) __builtin_prefetch(w.M + (i + B + b) * w.m + j, 1);
    if (w.g)
        for (int64_t b = 0; b < B; ++b) __builtin_prefetch(w.g + (i + B + b) * w.m + j);
    for (int64_t b = 0; b < B; ++b) x[b] = load<V>(w.M + (i + b) * w.m + j);
    for (int64_t k = 0; k < w.R; ++k) {
        const V along = load<V>(w.W + k * w.m + j);
        for (int64_t b = 0; b < B; ++b) x[b] -= w.U[k * w.n + i + b] * along;
    }
    if (w.g)
        for (int64_t b = 0; b < B; ++b) x[b] += usable(load<V>(w.g + (i + b) * w.m + j), bad);
    if (w.R || w.g)
        for (int64_t b = 0; b < B; ++b) store(w.M + (i + b) * w.m + j, x[b]);
    for (int64_t k = 0; k < K; ++k) {
        const V along = load<V>(w.X + k * w.m + j);
        for (int64_t b = 0; b < B; ++b) sums[k][b] += x[b] * along;
    }
    if (K) return;
    for (int64_t k = 0; k < w.r; ++k) {
        V y = load<V>(Y + k * w.m + j);
        for (int64_t b = 0; b < B; ++b) y += w.X[k * w.n + i + b] * x[b];
        store(Y + k * w.m + j, y);
    }
}

// Processes rows i .. i + B - 1, with the first K rows of X and Y [K, n] if K > 0. Returns whether all of g was
// usable.
template <int64_t B, int64_t K>
inline bool rows_of(const LowRankWork& w, int64_t i, float* Y) {
    F sums[K ? K : 1][B] = {};
    float rest[K ? K : 1][B] = {};
    I bad = {};
    int32_t bad_rest = 0;
    int64_t j = 0;
    for (; j + lanes <= w.m; j += lanes) columns<B, K>(w, i, j, Y, sums, bad);
    for (; j < w.m; ++j) columns<B, K>(w, i, j, Y, rest, bad_rest);
    for (int64_t k = 0; k < K; ++k)
        for (int64_t b = 0; b < B; ++b) Y[k * w.n + i + b] = sum_of(sums[k][b]) + rest[k][b];
    for (int lane = 0; lane < lanes; ++lane) bad_rest |= bad[lane];
    return bad_rest == 0;
}

// The products along rows, at most `at_once` rows of X at a time. Only the first round changes M; later rounds read
// it from the cache.
template <int64_t B>
inline bool all_rows_of(LowRankWork w, int64_t i, float* Y) {
    if (w.even || !w.r) return rows_of<B, 0>(w, i, Y);
    bool all_usable = true;
    for (int64_t left = w.r; left > 0; left -= at_once, w.X += at_once * w.m, Y += at_once * w.n) {
        all_usable &= left >= 4   ? rows_of<B, 4>(w, i, Y)
                      : left == 3 ? rows_of<B, 3>(w, i, Y)
                      : left == 2 ? rows_of<B, 2>(w, i, Y)
                                  : rows_of<B, 1>(w, i, Y);
        w.R = 0;
        w.g = nullptr;
    }
    return all_usable;
}

int64_t first_bad(const float* g, int64_t n) {
    int32_t bad = 0;
    for (int64_t i = 0; i < n; ++i) {
        usable(g[i], bad);
        if (bad) return i;
    }
    return n;
}

int64_t rows(const LowRankWork& work, int64_t begin, int64_t end, float* Y) {
    int64_t found = -1;
    for (int64_t i = begin; i < end;) {
        const bool whole = i + block <= end;
        const int64_t count = whole ? block : 1;
        const bool all_usable = whole ? all_rows_of<block>(work, i, Y) : all_rows_of<1>(work, i, Y);
        if (!all_usable && found < 0) found = i * work.m + first_bad(work.g + i * work.m, count * work.m);
        i += count;
    }
    return found;
}

template <int64_t B, class V>
inline void outer_columns(const float* U, const float* W, int64_t R, int64_t n, int64_t m, int64_t i, int64_t j,
                          float* out) {
    V x[B];
    V along = load<V>(W + j);
    for (int64_t b = 0; b < B; ++b) x[b] = U[i + b] * along;
    for (int64_t k = 1; k < R; ++k) {
        along = load<V>(W + k * m + j);
        for (int64_t b = 0; b < B; ++b) x[b] += U[k * n + i + b] * along;
    }
    for (int64_t b = 0; b < B; ++b) store(out + (i + b) * m + j, x[b]);
}

template <int64_t B>
inline void outer_rows(const float* U, const float* W, int64_t R, int64_t n, int64_t m, int64_t i, float* out) {
    int64_t j = 0;
    for (; j + lanes <= m; j += lanes) outer_columns<B, F>(U, W, R, n, m, i, j, out);
    for (; j < m; ++j) outer_columns<B, float>(U, W, R, n, m, i, j, out);
}

void outer(const float* U, const float* W, int64_t R, int64_t n, int64_t m, int64_t begin, int64_t end, float* out) {
    int64_t i = begin;
    for (; i + block <= end; i += block) outer_rows<block>(U, W, R, n, m, i, out);
    for (; i < end; ++i) outer_rows<1>(U, W, R, n, m, i, out);
}

constexpr LowRankKernels table{rows, outer};

}  // namespace
}  // namespace dgc
