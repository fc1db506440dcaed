// Codes of few bits for every element of a buffer: what each instruction set does with a stretch of one segment.
#pragma once

#include <cstdint>

namespace dgc {

// Random bits for the elements from `first` on, a function of their indices alone.
struct Random {
    uint32_t first, key, inner_key;
    bool wanted;  // else rounding is to the nearest
};

// Multiples of this many elements take whole words of every code, so that a segment may be cut there.
constexpr int64_t quantize_grain = 32;

// Of n elements and their codes. The last word of signs and ternary codes is filled up with zeros.
struct QuantizeKernels {
    void (*sign_encode)(const float* v, int64_t n, float cut, float low, float high, uint8_t* codes,
                        float* residual);
    void (*sign_add)(const uint8_t* codes, int64_t n, float low, float high, float* total);
    void (*tern_encode)(const float* v, int64_t n, float threshold, uint8_t* codes, float* residual);
    void (*tern_add)(const uint8_t* codes, int64_t n, float threshold, float* total);
    void (*uniform_encode)(const float* v, int64_t n, float inverse, float step, float levels, int bits,
                           const Random& random, uint8_t* codes, float* residual);
    void (*uniform_add)(const uint8_t* codes, int64_t n, float step, int bits, float* total);
    // The bits of the largest magnitude.
    int32_t (*largest)(const float* v, int64_t n);
    // top: the largest exponent E.
    void (*natural_encode)(const float* v, int64_t n, int32_t top, const Random& random, uint8_t* codes,
                           float* residual);
    void (*natural_add)(const uint8_t* codes, int64_t n, int32_t top, float* total);
    void (*pack)(const uint8_t* levels, int64_t n, int bits, uint8_t* codes);
    void (*unpack)(const uint8_t* codes, int64_t n, int bits, uint8_t* levels);
};

extern const QuantizeKernels quantize_portable;
#if defined(__x86_64__)
extern const QuantizeKernels quantize_avx2;
extern const QuantizeKernels quantize_avx512;
#endif

const QuantizeKernels& quantize_kernels();

}  // namespace dgc
