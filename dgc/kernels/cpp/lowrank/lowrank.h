// Products of a matrix with factors of few rows: what each instruction set does with some rows of one matrix.
#pragma once

#include <cstdint>

namespace dgc {

// M [n, m] of one matrix, and what becomes of each of its rows:
//     M -= U^T W;  M += g, what is NaN or too large counting as zero;  and of the outcome Y [r, m] += X M, or Y [r, n] = X M^T
struct LowRankWork {
    float* M;
    int64_t n, m;
    const float* U;  // [R, n]
    const float* W;  // [R, m]
    int64_t R;       // 0: nothing is subtracted
    const float* g;  // null: nothing is added
    const float* X;  // [r, n] where even, else [r, m]
    int64_t r;       // 0: no product
    bool even;
};

struct LowRankKernels {
    // Does rows begin .. end - 1. Returns the first element of g there that is NaN or too large, -1 where there is none.
    int64_t (*rows)(const LowRankWork& work, int64_t begin, int64_t end, float* Y);
    // out [n, m] = U^T W, rows begin .. end - 1. R is at least 1.
    void (*outer)(const float* U, const float* W, int64_t R, int64_t n, int64_t m, int64_t begin, int64_t end,
                  float* out);
};

extern const LowRankKernels lowrank_portable;
#if defined(__x86_64__)
extern const LowRankKernels lowrank_avx2;
extern const LowRankKernels lowrank_avx512;
#endif

}  // namespace dgc
