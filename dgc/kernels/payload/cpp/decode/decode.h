// Decoding of the payloads of all ranks and their mean.
#pragma once

#include <cstdint>

namespace dgc {

constexpr int64_t large = 1 << 20;  // elements: more than stays in the caches until the optimizer reads it

struct DecodeKernels {
    // Writes sums * factor / size, rounded twice, to `means` and zeros to `sums`, which begins at a multiple of 64
    // bytes. Returns whether all means are finite. streaming: store past the caches.
    bool (*divide)(float* sums, int64_t n, float factor, float size, bool streaming, float* means);
};

extern const DecodeKernels decode_portable;
#if defined(__x86_64__)
extern const DecodeKernels decode_avx2;
extern const DecodeKernels decode_avx512;
#endif

const DecodeKernels& decode_kernels();

}  // namespace dgc
