// The pass with 16 lanes. Collected lanes are compressed in a register and stored as a whole vector, because
// compressing into memory is microcoded on some CPUs.
#if defined(__x86_64__)

#include <immintrin.h>

#include "pass.h"

namespace dgc {
namespace {

struct Lanes {
    static constexpr int width = 16;
    using F = __m512;

    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static F fill(float x) { return _mm512_set1_ps(x); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F without(F x, uint32_t lanes) { return _mm512_maskz_mov_ps(static_cast<__mmask16>(~lanes), x); }
    static __m512i bits(F x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(magnitude_bits)); }
    static uint32_t at_least(F x, uint32_t lower_bound) {
        return _mm512_cmpge_epu32_mask(bits(x), _mm512_set1_epi32(static_cast<int>(lower_bound)));
    }
    static void collect(F x, uint32_t lanes, int32_t first, Candidates& found) {
        const __m512i count_up = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        append(_mm512_add_epi32(_mm512_set1_epi32(first), count_up), x, lanes, found);
    }
    static void collect_from(const int32_t* indices, F x, uint32_t lanes, Candidates& found) {
        append(_mm512_loadu_si512(indices), x, lanes, found);
    }
    static void append(__m512i indices, F x, uint32_t lanes, Candidates& found) {
        __mmask16 mask = static_cast<__mmask16>(lanes);
        _mm512_storeu_si512(found.indices + found.count, _mm512_maskz_compress_epi32(mask, indices));
        _mm512_storeu_ps(found.values + found.count, _mm512_maskz_compress_ps(mask, x));
        found.count += __builtin_popcount(lanes);
    }
    static void raise(uint32_t* maxima, F x) {
        _mm512_storeu_si512(maxima, _mm512_max_epu32(_mm512_loadu_si512(maxima), bits(x)));
    }

    using D = __m512d;
    using Counts = __m256i;

    static D zero() { return _mm512_setzero_pd(); }
    static D add(D a, D b) { return _mm512_add_pd(a, b); }
    static D mul(D a, D b) { return _mm512_mul_pd(a, b); }
    static D abs(D x) { return _mm512_abs_pd(x); }
    static D max(D a, D b) { return _mm512_max_pd(a, b); }
    static void spread(D x, double* lanes) { _mm512_storeu_pd(lanes, x); }
    static D widen(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
    static Counts none() { return _mm256_setzero_si256(); }
    static int64_t count(Counts counts) {
        alignas(32) int32_t lanes[8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), counts);
        int64_t sum = 0;
        for (int32_t lane : lanes) sum += lane;
        return sum;
    }
    static D widen_at_least(const float* p, uint32_t lower_bound, Counts& counts) {
        const __m256i bits = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                                              _mm256_set1_epi32(magnitude_bits));
        const __mmask8 lanes = _mm256_cmpge_epu32_mask(bits, _mm256_set1_epi32(static_cast<int>(lower_bound)));
        counts = _mm256_mask_add_epi32(counts, lanes, counts, _mm256_set1_epi32(1));
        return _mm512_maskz_cvtps_pd(lanes, _mm256_castsi256_ps(bits));
    }
};

}  // namespace
}  // namespace dgc

#include "pass_body.h"

namespace dgc {

const PassKernels pass_avx512 = table;

}  // namespace dgc

#endif
