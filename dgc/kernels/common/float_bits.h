// Converts a float to its bits and back. The functions are static: each file compiles them for its instruction set.
#pragma once

#include <cstdint>

namespace dgc {

// The bits of 2^64 (TOO_LARGE in selection.py). A gradient element of at least this magnitude, or NaN, counts as zero.
constexpr uint32_t too_large_bits = 0x5f800000u;

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

}  // namespace dgc
