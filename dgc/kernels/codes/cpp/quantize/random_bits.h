// Random bits of an element, as random_bits of dgc/kernels/codes/__init__.py. In an anonymous namespace, for the reason
// given in quantize_fields.h.
#pragma once

#include <cstdint>

#include "quantize/quantize.h"

namespace dgc {
namespace {

inline uint32_t random_bits(uint32_t i, const Random& random) {
    uint32_t x = random.first + i + random.key;
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15 ^ random.inner_key) * 0x846CA68Bu;
    return x ^ x >> 16;
}

}  // namespace
}  // namespace dgc
