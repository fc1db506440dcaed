// Products of a matrix with low-rank factors: the kernels of one instruction set for some rows of one matrix.
#pragma once

#include <cstdint>

namespace dgc {

// One matrix M [n, m] and the operations on its rows, in this order:
//     M -= U^T W
//     M += g, where elements of g that are NaN or too large count as zero
//     if even: Y [r, m] += X M, else: Y [r, n] = X M^T
struct LowRankWork {
    float* M;
    int64_t n, m;
    const float* U;  // [R, n]
    const float* W;  // [R, m]
    int64_t R;       // 0: nothing is subtracted
    const float* g;  // null: nothing is added
    const float* X;  // [r, n] if even, else [r, m]
    int64_t r;       // 0: no product
    bool even;
};

struct LowRankKernels {
    // Processes rows begin .. end - 1. Returns the first element of g in them that is NaN or too large, or -1.
    int64_t (*rows)(const LowRankWork& work, int64_t begin, int64_t end, float* Y);
    // Rows begin .. end - 1 of out [n, m] = U^T W. R is at least 1.
    void (*outer)(const float* U, const float* W, int64_t R, int64_t n, int64_t m, int64_t begin, int64_t end,
                  float* out);
};

extern const LowRankKernels lowrank_portable;
#if defined(__x86_64__)
extern const LowRankKernels lowrank_avx2;
extern const LowRankKernels lowrank_avx512;
#endif

}  // namespace dgc
