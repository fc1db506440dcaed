// Decoding of the payloads of all ranks and their mean.
#pragma once

#include <cstdint>

namespace dgc {

struct DecodeKernels {
    // Writes sums / size to `means` and zeros to `sums`, which begins at a multiple of 64 bytes. Returns whether all
    // means are finite. streaming: store past the caches.
    bool (*divide)(float* sums, int64_t n, float size, bool streaming, float* means);
};

extern const DecodeKernels decode_portable;
#if defined(__x86_64__)
extern const DecodeKernels decode_avx2;
extern const DecodeKernels decode_avx512;
#endif

const DecodeKernels& decode_kernels();

}  // namespace dgc
