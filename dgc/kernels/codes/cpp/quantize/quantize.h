// Codes of a few bits per element: the kernels of one instruction set for consecutive elements of one segment.
#pragma once

#include <cstdint>

namespace dgc {

// Random bits for the elements from `first` on. They depend only on the index and the keys.
struct Random {
    uint32_t first, key, inner_key;
    bool enabled;  // false: round to nearest
};

// This many elements fill whole words of every code, so a segment may be split at any multiple.
constexpr int64_t quantize_grain = 32;

// Elements that a block's transform takes together.
constexpr int64_t group = 64;

// All kernels process n elements and their codes. The last word of sign and ternary codes is padded with zeros. No
// residual is written if it is null.
struct QuantizeKernels {
    void (*sign_encode)(const float* v, int64_t n, float cut, float scale, uint8_t* codes, float* residual);
    void (*sign_add)(const uint8_t* codes, int64_t n, float scale, float* total);
    void (*tern_encode)(const float* v, int64_t n, float threshold, uint8_t* codes, float* residual);
    void (*uniform_encode)(const float* v, int64_t n, float inverse, float step, float levels, int bits,
                           const Random& random, uint8_t* codes, float* residual);
    void (*uniform_add)(const uint8_t* codes, int64_t n, float step, int bits, float* total);
    // Returns the bits of the largest magnitude.
    int32_t (*largest)(const float* v, int64_t n);
    void (*pack)(const uint8_t* levels, int64_t n, int bits, uint8_t* codes);
    void (*unpack)(const uint8_t* codes, int64_t n, int bits, uint8_t* levels);
    // Consecutive blocks of `size` elements: n elements, and zeros that fill the last block. scales: two bytes of each.
    void (*blocks_encode)(const float* v, int64_t n, int64_t size, int bits, bool rotating, uint8_t* scales,
                          uint8_t* codes, float* residual);
    // The same after v += g. Elements of g that are NaN or too large count as zero. Returns the first of them, or n.
    int64_t (*blocks_add_encode)(const float* g, float* v, int64_t n, int64_t size, int bits, bool rotating,
                                 uint8_t* scales, uint8_t* codes, float* residual);
    // Overwrites n elements with the values divided by `divisor`, or adds the values to them if it is 0.
    void (*blocks_decode)(const uint8_t* scales, const uint8_t* codes, int64_t n, int64_t size, int bits,
                          bool rotating, float divisor, float* out);
};

extern const QuantizeKernels quantize_portable;
#if defined(__x86_64__)
extern const QuantizeKernels quantize_avx2;
extern const QuantizeKernels quantize_avx512;
#endif

const QuantizeKernels& quantize_kernels();

}  // namespace dgc
