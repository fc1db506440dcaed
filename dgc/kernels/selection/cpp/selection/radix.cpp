// The exact selection of each segment by radix digits alone, as published: without the samples and lower bounds of
// `choice.cpp`. 8 bits of |v| at a time, most significant first. Each thread takes whole segments.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "common/float_bits.h"
#include "common/pool.h"

namespace dgc {
namespace {

constexpr int digit_bits = 8;
constexpr int bins = 1 << digit_bits;
constexpr uint32_t magnitude = 0x7fffffffu;

// Writes the indices and values of the k largest magnitudes of v[begin] .. v[end - 1], no zero. Returns their number.
int64_t radix_select(const float* v, int64_t begin, int64_t end, int64_t k, int32_t* indices, float* values) {
    k = std::min(k, end - begin);
    uint32_t prefix = 0, mask = 0;
    int64_t rank = k;
    for (int shift = 32 - digit_bits; shift >= 0 && k; shift -= digit_bits) {
        int64_t counts[bins] = {};
        for (int64_t i = begin; i < end; ++i) {
            uint32_t bits = bits_of(v[i]) & magnitude;
            if ((bits & mask) == prefix) ++counts[bits >> shift & (bins - 1)];
        }
        int digit = bins - 1;
        while (rank > counts[digit]) rank -= counts[digit--];
        prefix |= static_cast<uint32_t>(digit) << shift;
        mask |= static_cast<uint32_t>(bins - 1) << shift;
    }
    int64_t found = 0;
    for (int64_t i = begin; i < end && found < k; ++i) {
        uint32_t bits = bits_of(v[i]) & magnitude;
        if (bits < prefix || bits == 0 || (bits == prefix && rank-- <= 0)) continue;
        indices[found] = static_cast<int32_t>(i);
        values[found++] = v[i];
    }
    return found;
}

}  // namespace
}  // namespace dgc

// The ks[s] largest magnitudes of each segment, with room for the sum of ks in `indices` and `values`. Returns their
// number.
DGC_EXPORT int64_t dgc_radix_select(const float* v, const int64_t* bounds, const int64_t* ks, int64_t segments,
                                    int32_t* indices, float* values, int threads) {
    std::vector<int64_t> place(segments + 1, 0), found(segments);
    for (int64_t s = 0; s < segments; ++s) place[s + 1] = place[s] + ks[s];
    std::atomic<int64_t> next{0};
    dgc::parallel_for(threads, [&](int) {
        for (int64_t s; (s = next++) < segments;)
            found[s] = dgc::radix_select(v, bounds[s], bounds[s + 1], ks[s], indices + place[s], values + place[s]);
    });
    int64_t at = 0;
    for (int64_t s = 0; s < segments; at += found[s++]) {
        std::memmove(indices + at, indices + place[s], found[s] * sizeof *indices);
        std::memmove(values + at, values + place[s], found[s] * sizeof *values);
    }
    return at;
}
