// The kernels of halves.h, shared by all instruction sets. The compiler vectorizes the loops. Everything is in an
// anonymous namespace: no other file may link to a copy compiled for another instruction set.
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "common/float_bits.h"
#include "halves.h"
#include "quantize/random_bits.h"

namespace dgc {
namespace {

constexpr uint32_t infinity_bits = 0x7F800000;

inline uint32_t mask_of(bool x) { return 0u - static_cast<uint32_t>(x); }

// All cases are computed and masked, which avoids branches.
inline uint16_t fp16_of(float x) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000, bits = bits_of(x) & 0x7FFFFFFF;
    // Below 2**-14 the steps of fp16 are 2**-24, as the steps of fp32 from 0.5 to 1. Adding 0.5 therefore rounds.
    const uint32_t small = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);
    const uint32_t rounded = (bits - (112u << 23) + 0xFFF + (bits >> 13 & 1)) >> 13;
    const uint32_t normal = rounded < 0x7C00 ? rounded : 0x7C00;
    const uint32_t is_small = mask_of(bits < (113u << 23)), is_nan = mask_of(bits > infinity_bits);
    return static_cast<uint16_t>(sign | (is_small & small) | (~is_small & normal) | (is_nan & 0x7E00));
}

inline uint16_t bf16_of(float x) {
    const uint32_t bits = bits_of(x), is_nan = mask_of((bits & 0x7FFFFFFF) > infinity_bits);
    return static_cast<uint16_t>((~is_nan & ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)) | (is_nan & 0x7FC0));
}

// Stores round(x) for each number.
template <class Round>
inline bool to_halves(const float* from, int64_t n, uint8_t* to, Round&& round) {
    int32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t magnitude = static_cast<int32_t>(bits_of(from[i]) & 0x7FFFFFFF);
        largest = magnitude > largest ? magnitude : largest;
        const uint16_t half = round(from[i]);
        std::memcpy(to + 2 * i, &half, sizeof half);
    }
    return largest < static_cast<int32_t>(infinity_bits);
}

bool to_fp16(const float* from, int64_t n, uint8_t* to) {
    bool finite = true;
#if defined(__F16C__)
    constexpr int64_t lanes = 8;
    const __m256i most = _mm256_set1_epi32(static_cast<int32_t>(infinity_bits) - 1);
    __m256i lost = _mm256_setzero_si256();
    for (; n >= lanes; n -= lanes, from += lanes, to += 2 * lanes) {
        const __m256 x = _mm256_loadu_ps(from);
        const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF));
        lost = _mm256_or_si256(lost, _mm256_cmpgt_epi32(magnitude, most));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    finite = _mm256_testz_si256(lost, lost);
#endif
    return to_halves(from, n, to, fp16_of) && finite;
}

bool to_bf16(const float* from, int64_t n, uint8_t* to) { return to_halves(from, n, to, bf16_of); }

void add_bf16(const uint8_t* halves, int64_t n, float* sums) {
    for (int64_t i = 0; i < n; ++i) {
        uint16_t half;
        std::memcpy(&half, halves + 2 * i, sizeof half);
        sums[i] += float_of(static_cast<uint32_t>(half) << 16);
    }
}

inline float value_of(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

// Whole vectors of elements go through this many in the cache: the conversion of the codes is a loop of its own, which
// the compiler vectorizes better than a store of two bytes beside one of four.
constexpr int64_t run = 1024;

// read(i) returns the element at i.
template <bool randomly, bool keeps, class Read>
inline void encode_as(int64_t n, const Random& random, uint8_t* to, float* residual, Read&& read) {
    alignas(64) uint32_t halves[run];
    for (int64_t begin = 0; begin < n; begin += run, to += 2 * run) {
        const int64_t m = n - begin < run ? n - begin : run;
        for (int64_t k = 0; k < m; ++k) {
            const float x = read(begin + k);
            const uint32_t bits = bits_of(x);
            const uint32_t rounding = randomly ? random_bits(static_cast<uint32_t>(begin + k), random) >> 16
                                               : 0x7FFF + (bits >> 16 & 1);
            halves[k] = (bits + rounding) >> 16;
            if (keeps) residual[begin + k] = x - float_of(halves[k] << 16);
        }
        for (int64_t k = 0; k < m; ++k) {
            const uint16_t half = static_cast<uint16_t>(halves[k]);
            std::memcpy(to + 2 * k, &half, sizeof half);
        }
    }
}

template <class Read>
inline void encode_from(int64_t n, const Random& random, uint8_t* to, float* residual, Read&& read) {
    if (random.enabled && residual) return encode_as<true, true>(n, random, to, residual, read);
    if (random.enabled) return encode_as<true, false>(n, random, to, residual, read);
    if (residual) return encode_as<false, true>(n, random, to, residual, read);
    encode_as<false, false>(n, random, to, residual, read);
}

void encode_bf16(const float* v, int64_t n, const Random& random, uint8_t* to, float* residual) {
    encode_from(n, random, to, residual, [=](int64_t i) { return v[i]; });
}

int64_t add_encode_bf16(const float* g, float* v, int64_t n, const Random& random, uint8_t* to, float* residual) {
    int32_t worst = 0;
    const auto usable = [&worst, g](int64_t i) {
        const int32_t size = static_cast<int32_t>(bits_of(g[i]) & 0x7FFFFFFF);
        worst = size > worst ? size : worst;
        return float_of(bits_of(g[i]) & mask_of(size < static_cast<int32_t>(too_large_bits)));
    };
    if (v) encode_from(n, random, to, residual, [&usable, v](int64_t i) { return v[i] = v[i] + usable(i); });
    else encode_from(n, random, to, residual, usable);
    if (worst < static_cast<int32_t>(too_large_bits)) return n;
    int64_t first = 0;
    while ((bits_of(g[first]) & 0x7FFFFFFF) < too_large_bits) ++first;
    return first;
}

void decode_bf16(const uint8_t* halves, int64_t n, float divisor, float* out) {
    const bool is_power = (bits_of(divisor) & 0x7FFFFF) == 0;  // the product has the same bits then, in less time
    const float factor = 1.0f / divisor;
    for (int64_t i = 0; i < n; ++i) {
        uint16_t half;
        std::memcpy(&half, halves + 2 * i, sizeof half);
        out[i] = value_of(half);
    }
    if (is_power)
        for (int64_t i = 0; i < n; ++i) out[i] *= factor;
    else
        for (int64_t i = 0; i < n; ++i) out[i] /= divisor;
}

constexpr HalvesKernels table{to_fp16, to_bf16, add_bf16, encode_bf16, add_encode_bf16, decode_bf16};

}  // namespace
}  // namespace dgc
