// Numbers of 16 bits: the kernels of one instruction set.
#pragma once

#include <cstdint>

namespace dgc {

struct HalvesKernels {
    // Round n numbers to nearest, ties to even. What is too large becomes infinite, and NaN stays NaN. `to` may be at
    // any address. Return whether all numbers are finite.
    bool (*to_fp16)(const float* from, int64_t n, uint8_t* to);
    bool (*to_bf16)(const float* from, int64_t n, uint8_t* to);
    // sums += the n numbers from `halves` on, at any address
    void (*add_bf16)(const uint8_t* halves, int64_t n, float* sums);
};

extern const HalvesKernels halves_portable;
#if defined(__x86_64__)
extern const HalvesKernels halves_avx2;
extern const HalvesKernels halves_avx512;
#endif

const HalvesKernels& halves_kernels();

}  // namespace dgc
