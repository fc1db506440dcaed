// Codes of a few bits per element. The buffer is split into units within one segment, and threads take units in turn.
// The codes of a unit depend only on the unit, so the number of threads does not change the result.
#include "quantize.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "common/float_bits.h"
#include "common/isa.h"
#include "common/pool.h"
#include "quantize/units.h"

namespace dgc {

const QuantizeKernels& quantize_kernels() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return quantize_avx512;
    if (isa() == Isa::avx2) return quantize_avx2;
#endif
    return quantize_portable;
}

namespace {

float* at(float* residual, int64_t first) { return residual ? residual + first : nullptr; }

Random at(Random random, int64_t first) {
    random.first = static_cast<uint32_t>(first);
    return random;
}

}  // namespace
}  // namespace dgc

using namespace dgc;

// v = g, with zeros for elements that are not usable. Returns the index of the first of these, or n. A piece that is
// in its place is not copied.
DGC_EXPORT int64_t dgc_assign(const float* const* pieces, const int64_t* begins, int count, float* v, int64_t n,
                              int threads) {
    const auto largest = quantize_kernels().largest;
    std::atomic<int64_t> first{n};
    for_units(n, threads, [&](int64_t begin, int64_t end) {
        int64_t piece = std::upper_bound(begins, begins + count, begin) - begins - 1;
        for (int64_t i = begin; i < end; ++piece) {
            const int64_t stop = std::min(end, begins[piece + 1]);
            const float* from = pieces[piece] + (i - begins[piece]);
            if (from != v + i && i < stop) std::memcpy(v + i, from, (stop - i) * sizeof(float));
            i = stop;
        }
        if (static_cast<uint32_t>(largest(v + begin, end - begin)) < too_large_bits) return;
        int64_t own = end;
        for (int64_t i = end; i-- > begin;)
            if ((bits_of(v[i]) & 0x7FFFFFFF) >= too_large_bits) v[own = i] = 0.0f;
        int64_t known = first.load(std::memory_order_relaxed);
        while (own < known && !first.compare_exchange_weak(known, own, std::memory_order_relaxed)) continue;
    });
    return first.load();
}

// In all functions: bounds has shape [segments + 1]; starts and all other per-segment arrays have shape [segments].
DGC_EXPORT void dgc_largest(const float* v, const int64_t* bounds, int64_t segments, float* found, int threads) {
    const auto kernel = quantize_kernels().largest;
    std::vector<std::atomic<int32_t>> bits(segments);
    for_units(bounds, segments, threads, [&](int64_t s, int64_t i, int64_t n) {
        const int32_t own = kernel(v + i, n);
        int32_t known = bits[s].load(std::memory_order_relaxed);
        while (known < own && !bits[s].compare_exchange_weak(known, own, std::memory_order_relaxed)) continue;
    });
    for (int64_t s = 0; s < segments; ++s) found[s] = float_of(static_cast<uint32_t>(bits[s].load()));
}

DGC_EXPORT void dgc_quantize_signs(const float* v, const int64_t* bounds, const int64_t* starts, int64_t segments,
                                   const float* cuts, const float* scales, uint8_t* codes, float* residual,
                                   int threads) {
    const auto kernel = quantize_kernels().sign_encode;
    for_units({bounds, starts, segments}, 1, threads, [&](int64_t s, int64_t i, int64_t n, int64_t place) {
        kernel(v + i, n, cuts[s], scales[s], codes + place, at(residual, i));
    });
}

DGC_EXPORT void dgc_add_signs(const uint8_t* codes, const int64_t* bounds, const int64_t* starts, int64_t segments,
                              const float* scales, float* total, int threads) {
    const auto kernel = quantize_kernels().sign_add;
    for_units({bounds, starts, segments}, 1, threads, [&](int64_t s, int64_t i, int64_t n, int64_t place) {
        kernel(codes + place, n, scales[s], total + i);
    });
}

// A threshold of inf sends nothing.
DGC_EXPORT void dgc_quantize_ternary(const float* v, const int64_t* bounds, const int64_t* starts, int64_t segments,
                                     const float* thresholds, uint8_t* codes, float* residual, int threads) {
    const auto kernel = quantize_kernels().tern_encode;
    for_units({bounds, starts, segments}, 2, threads, [&](int64_t s, int64_t i, int64_t n, int64_t place) {
        kernel(v + i, n, thresholds[s], codes + place, at(residual, i));
    });
}

DGC_EXPORT void dgc_quantize_levels(const float* v, const int64_t* bounds, const int64_t* starts, int64_t segments,
                                    const float* inverses, const float* steps, int levels, int bits, int randomly,
                                    uint32_t key, uint32_t inner_key, uint8_t* codes, float* residual,
                                    int threads) {
    const auto kernel = quantize_kernels().uniform_encode;
    const Random random{0, key, inner_key, randomly != 0};
    for_units({bounds, starts, segments}, bits, threads, [&](int64_t s, int64_t i, int64_t n, int64_t place) {
        const float most = static_cast<float>(levels);
        kernel(v + i, n, inverses[s], steps[s], most, bits, at(random, i), codes + place, at(residual, i));
    });
}

DGC_EXPORT void dgc_add_levels(const uint8_t* codes, const int64_t* bounds, const int64_t* starts, int64_t segments,
                               const float* steps, int bits, float* total, int threads) {
    const auto kernel = quantize_kernels().uniform_add;
    for_units({bounds, starts, segments}, bits, threads, [&](int64_t s, int64_t i, int64_t n, int64_t place) {
        kernel(codes + place, n, steps[s], bits, total + i);
    });
}
