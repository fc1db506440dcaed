// The pass with 8 lanes. Few lanes are collected in practice, so they are stored one at a time.
#if defined(__x86_64__)

#include <immintrin.h>

#include "pass.h"

namespace dgc {
namespace {

struct Lanes {
    static constexpr int width = 8;
    using F = __m256;

    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static F fill(float x) { return _mm256_set1_ps(x); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static __m256i bits(F x) {
        return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(magnitude_bits));
    }
    static uint32_t mask(__m256i lanes) {
        return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes)));
    }
    static F without(F x, uint32_t lanes) {
        const __m256i bit = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
        __m256i chosen = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(lanes)), bit);
        return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(chosen, bit)), x);
    }
    static uint32_t at_least(F x, uint32_t lower_bound) {
        // The comparison is signed: an unreachable lower bound must not become negative.
        uint32_t below = lower_bound > magnitude_bits ? magnitude_bits : lower_bound - 1;
        return mask(_mm256_cmpgt_epi32(bits(x), _mm256_set1_epi32(static_cast<int>(below))));
    }
    static void collect(F x, uint32_t lanes, int32_t first, Candidates& found) {
        alignas(32) float values[width];
        _mm256_store_ps(values, x);
        for (; lanes; lanes &= lanes - 1) {
            int lane = __builtin_ctz(lanes);
            found.indices[found.count] = first + lane;
            found.values[found.count++] = values[lane];
        }
    }
    static void collect_from(const int32_t* indices, F x, uint32_t lanes, Candidates& found) {
        alignas(32) float values[width];
        _mm256_store_ps(values, x);
        for (int lane = 0; lane < width; ++lane) {
            found.indices[found.count] = indices[lane];
            found.values[found.count] = values[lane];
            found.count += lanes >> lane & 1;
        }
    }
    static void raise(uint32_t* maxima, F x) {
        __m256i* to = reinterpret_cast<__m256i*>(maxima);
        _mm256_storeu_si256(to, _mm256_max_epu32(_mm256_loadu_si256(to), bits(x)));
    }

    struct D {
        __m256d low, high;
    };
    using Counts = __m256i;

    static D zero() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
    static D add(D a, D b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
    static D mul(D a, D b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }
    static D max(D a, D b) { return {_mm256_max_pd(a.low, b.low), _mm256_max_pd(a.high, b.high)}; }
    static D abs(D x) {
        const __m256d sign = _mm256_set1_pd(-0.0);
        return {_mm256_andnot_pd(sign, x.low), _mm256_andnot_pd(sign, x.high)};
    }
    static void spread(D x, double* lanes) {
        _mm256_storeu_pd(lanes, x.low);
        _mm256_storeu_pd(lanes + 4, x.high);
    }
    static D widen(const float* p) {
        return {_mm256_cvtps_pd(_mm_loadu_ps(p)), _mm256_cvtps_pd(_mm_loadu_ps(p + 4))};
    }
    static Counts none() { return _mm256_setzero_si256(); }
    static int64_t count(Counts counts) {
        alignas(32) int32_t lanes[8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), counts);
        int64_t sum = 0;
        for (int32_t lane : lanes) sum += lane;
        return sum;
    }
    static D widen_at_least(const float* p, uint32_t lower_bound, Counts& counts) {
        const __m256i size = bits(_mm256_loadu_ps(p));
        const __m256i lanes = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(static_cast<int>(lower_bound - 1)));
        counts = _mm256_sub_epi32(counts, lanes);
        const __m256 kept = _mm256_castsi256_ps(_mm256_and_si256(size, lanes));
        return {_mm256_cvtps_pd(_mm256_castps256_ps128(kept)), _mm256_cvtps_pd(_mm256_extractf128_ps(kept, 1))};
    }
};

}  // namespace
}  // namespace dgc

#include "pass_body.h"

namespace dgc {

const PassKernels pass_avx2 = table;

}  // namespace dgc

#endif
