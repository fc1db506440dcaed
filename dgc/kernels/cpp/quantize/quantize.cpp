// Codes of a few bits per element. The buffer is split into units within one segment, and threads take units in turn.
// The codes of a unit depend only on the unit, so the number of threads does not change the result.
#include "quantize.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

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

Random at(Random random, int64_t first) {
    random.first = static_cast<uint32_t>(first);
    return random;
}

// The exponent E, from the bits of the largest magnitude.
int32_t natural_top(int32_t largest) { return std::min(127, std::max(0, (largest >> 23) - 126)); }

}  // namespace
}  // namespace dgc

using namespace dgc;

// In all functions: bounds has shape [segments + 1]; starts and all other per-segment arrays have shape [segments].
DGC_EXPORT void dgc_quantize_signs(const float* v, const int64_t* bounds, const int64_t* starts, int64_t segments,
                                   const float* cuts, const float* lows, const float* highs, uint8_t* codes,
                                   float* residual, int threads) {
    const auto kernel = quantize_kernels().sign_encode;
    for_units({bounds, starts, segments}, 1, threads, [&](int64_t s, int64_t i, int64_t n, int64_t place) {
        kernel(v + i, n, cuts[s], lows[s], highs[s], codes + place, residual + i);
    });
}

DGC_EXPORT void dgc_add_signs(const uint8_t* codes, const int64_t* bounds, const int64_t* starts, int64_t segments,
                              const float* lows, const float* highs, float* total, int threads) {
    const auto kernel = quantize_kernels().sign_add;
    for_units({bounds, starts, segments}, 1, threads, [&](int64_t s, int64_t i, int64_t n, int64_t place) {
        kernel(codes + place, n, lows[s], highs[s], total + i);
    });
}

// A threshold of inf sends nothing.
DGC_EXPORT void dgc_quantize_ternary(const float* v, const int64_t* bounds, const int64_t* starts, int64_t segments,
                                     const float* thresholds, uint8_t* codes, float* residual, int threads) {
    const auto kernel = quantize_kernels().tern_encode;
    for_units({bounds, starts, segments}, 2, threads, [&](int64_t s, int64_t i, int64_t n, int64_t place) {
        kernel(v + i, n, thresholds[s], codes + place, residual + i);
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
        kernel(v + i, n, inverses[s], steps[s], most, bits, at(random, i), codes + place, residual + i);
    });
}

DGC_EXPORT void dgc_add_levels(const uint8_t* codes, const int64_t* bounds, const int64_t* starts, int64_t segments,
                               const float* steps, int bits, float* total, int threads) {
    const auto kernel = quantize_kernels().uniform_add;
    for_units({bounds, starts, segments}, bits, threads, [&](int64_t s, int64_t i, int64_t n, int64_t place) {
        kernel(codes + place, n, steps[s], bits, total + i);
    });
}

// codes [4 + n]
DGC_EXPORT void dgc_quantize_natural(const float* v, int64_t n, int randomly, uint32_t key, uint32_t inner_key,
                                     uint8_t* codes, float* residual, int threads) {
    const QuantizeKernels& kernels = quantize_kernels();
    const Random random{0, key, inner_key, randomly != 0};
    // v is read once: each unit is encoded, while in the cache, for the largest E found so far, usually the final
    // one. The second loop repeats only the units that were encoded for a smaller E.
    std::atomic<int32_t> known{0};
    std::vector<int32_t> tops((n + unit - 1) / unit);
    for_units(n, threads, [&](int64_t begin, int64_t end) {
        const int32_t own_top = natural_top(kernels.largest(v + begin, end - begin));
        int32_t top = known.load(std::memory_order_relaxed);
        while (top < own_top && !known.compare_exchange_weak(top, own_top, std::memory_order_relaxed)) continue;
        tops[begin / unit] = top = std::max(top, own_top);
        kernels.natural_encode(v + begin, end - begin, top, at(random, begin), codes + 4 + begin,
                               residual + begin);
    });
    const int32_t top = known.load();
    for_units(n, threads, [&](int64_t begin, int64_t end) {
        if (tops[begin / unit] == top) return;
        kernels.natural_encode(v + begin, end - begin, top, at(random, begin), codes + 4 + begin,
                               residual + begin);
    });
    std::memcpy(codes, &top, sizeof top);
}
