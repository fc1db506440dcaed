// A float as its bits, and back. Each file has its own, compiled for its own instructions.
#pragma once

#include <cstdint>

namespace dgc {

// Of 2^64, TOO_LARGE of protocol.py: a gradient element of this magnitude, or NaN, counts as zero.
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
