// The kernels of decode.h, shared by all instruction sets. The compiler vectorizes the loops for each instruction
// set. Everything is in an anonymous namespace: no other file may link to a copy compiled for AVX-512.
#include "decode.h"

#include <algorithm>

#include "common/float_bits.h"

namespace dgc {
namespace {

constexpr int64_t lanes = 16;
constexpr uint32_t infinity_bits = 0x7F800000;

// Most groups of a sparse sum are zero, and a division takes as long as ten stores.
uint32_t divide_group(float* sums, float size, float* means) {
    uint32_t any = 0, largest = 0;
    for (int64_t i = 0; i < lanes; ++i) any |= bits_of(sums[i]);
    if (!any) {
        for (int64_t i = 0; i < lanes; ++i) means[i] = 0.0f;
        return 0;
    }
    for (int64_t i = 0; i < lanes; ++i) {
        means[i] = sums[i] / size;
        sums[i] = 0.0f;
        largest = std::max(largest, bits_of(means[i]) & 0x7FFFFFFFu);
    }
    return largest;
}

// The product with an inverse has the same bits as the quotient if the inverse is exact.
uint32_t multiply(float* sums, int64_t n, float inverse, float* means) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        means[i] = sums[i] * inverse;
        sums[i] = 0.0f;
        largest = std::max(largest, bits_of(means[i]) & 0x7FFFFFFFu);
    }
    return largest;
}

bool divide(float* sums, int64_t n, float size, float* means) {
    const bool power_of_two = (bits_of(size) & 0x007FFFFFu) == 0;
    if (power_of_two) return multiply(sums, n, 1.0f / size, means) < infinity_bits;
    uint32_t largest = 0;
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) largest = std::max(largest, divide_group(sums + i, size, means + i));
    for (; i < n; ++i) {
        means[i] = sums[i] / size;
        sums[i] = 0.0f;
        largest = std::max(largest, bits_of(means[i]) & 0x7FFFFFFFu);
    }
    return largest < infinity_bits;
}

const DecodeKernels table = {divide};

}  // namespace
}  // namespace dgc
