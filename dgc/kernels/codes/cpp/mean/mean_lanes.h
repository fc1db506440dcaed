// The vector operations of mean_body.h for the instruction set of the file that includes this one.
#pragma once

#include <cstring>

#include "mean.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace dgc {
namespace {

inline uint32_t word_at(const uint8_t* codes) {
    uint32_t word;
    std::memcpy(&word, codes, sizeof word);
    return word;
}

// `Values` holds a table in registers. `at` returns the values of the next `lanes` fields, which begin in the word at
// `codes`, at these shifts. A field selects by its lowest bits only.

#if defined(__AVX512F__)

constexpr int lanes = 16;
using Floats = __m512;

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats load_floats(const float* from) { return _mm512_load_ps(from); }
inline void store(float* to, Floats x) { _mm512_store_ps(to, x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }

template <int width>
struct Values {
    __m512 table;

    explicit Values(const Table& from) : table(_mm512_load_ps(from.values)) {}

    Floats at(const uint8_t* codes, const uint32_t* shifts) const {
        __m512i words = _mm512_set1_epi32(static_cast<int>(word_at(codes)));
        if (width == 4)  // a word holds eight fields
            words = _mm512_inserti32x8(words, _mm256_set1_epi32(static_cast<int>(word_at(codes + 4))), 1);
        return _mm512_permutexvar_ps(_mm512_srlv_epi32(words, _mm512_load_si512(shifts)), table);
    }
};

#elif defined(__AVX2__)

constexpr int lanes = 8;
using Floats = __m256;

inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats load_floats(const float* from) { return _mm256_load_ps(from); }
inline void store(float* to, Floats x) { _mm256_store_ps(to, x); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }

template <int width>
struct Values {
    __m256 low, high;

    explicit Values(const Table& from) : low(_mm256_load_ps(from.values)), high(_mm256_load_ps(from.values + 8)) {}

    Floats at(const uint8_t* codes, const uint32_t* shifts) const {
        const __m256i words = _mm256_set1_epi32(static_cast<int>(word_at(codes)));
        const __m256i fields =
            _mm256_srlv_epi32(words, _mm256_load_si256(reinterpret_cast<const __m256i*>(shifts)));
        if (width < 4) return _mm256_permutevar_ps(low, fields);  // the lowest two bits
        // the lowest three bits select within a half, the fourth selects the half
        const __m256 halves = _mm256_castsi256_ps(_mm256_slli_epi32(fields, 28));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, fields), _mm256_permutevar8x32_ps(high, fields), halves);
    }
};

#else

constexpr int lanes = 1;
using Floats = float;

inline Floats zeros() { return 0.0f; }
inline Floats load_floats(const float* from) { return *from; }
inline void store(float* to, Floats x) { *to = x; }
inline Floats add(Floats a, Floats b) { return a + b; }

template <int width>
struct Values {
    const float* table;

    explicit Values(const Table& from) : table(from.values) {}

    Floats at(const uint8_t* codes, const uint32_t* shifts) const {
        return table[word_at(codes) >> *shifts & (table_size - 1)];
    }
};

#endif

}  // namespace
}  // namespace dgc
