// Numbers of 16 bits: the kernels of one instruction set.
#pragma once

#include <cstdint>

#include "quantize/quantize.h"

namespace dgc {

struct HalvesKernels {
    // Round n numbers to nearest, ties to even. What is too large becomes infinite, and NaN stays NaN. `to` may be at
    // any address. Return whether all numbers are finite.
    bool (*to_fp16)(const float* from, int64_t n, uint8_t* to);
    bool (*to_bf16)(const float* from, int64_t n, uint8_t* to);
    // sums += the n numbers from `halves` on, at any address
    void (*add_bf16)(const uint8_t* halves, int64_t n, float* sums);
    // to = bf16 of n finite numbers, to nearest or stochastically. No residual is written if it is null.
    void (*encode_bf16)(const float* v, int64_t n, const Random& random, uint8_t* to, float* residual);
    // The same after v += g, or of g alone if v is null. Elements of g that are NaN or too large count as zero. Returns
    // the first of them, or n.
    int64_t (*add_encode_bf16)(const float* g, float* v, int64_t n, const Random& random, uint8_t* to, float* residual);
    // Overwrites n numbers with the values divided by `divisor`.
    void (*decode_bf16)(const uint8_t* halves, int64_t n, float divisor, float* out);
};

extern const HalvesKernels halves_portable;
#if defined(__x86_64__)
extern const HalvesKernels halves_avx2;
extern const HalvesKernels halves_avx512;
#endif

const HalvesKernels& halves_kernels();

}  // namespace dgc
