// Packing of fields of a few bits, eight at a time, and loops that encode or decode a block of elements through one
// byte per field. Each instruction set includes this file.
//
// Everything is in an anonymous namespace, so that the linker never uses this file's code for another instruction
// set.
#pragma once

#include <cstring>

#if defined(__BMI2__)
#include <immintrin.h>
#endif

#include "common/float_bits.h"
#include "quantize.h"

namespace dgc {
namespace {

constexpr int64_t block = 512;
constexpr uint32_t sign_bit = 0x80000000u;
static_assert(block % quantize_grain == 0, "a block begins at a byte");

inline uint64_t every(int distance, int bits) {  // `bits` ones in every `distance` bits
    return ~uint64_t{0} / ((uint64_t{1} << distance) - 1) * ((uint64_t{1} << bits) - 1);
}

// `squeeze` moves eight fields of `width` bits, one per byte, to the lowest bits; `stretch` is the inverse. Higher
// bits of each byte are dropped.
#if defined(__BMI2__)
inline uint64_t squeeze(uint64_t x, int width) { return _pext_u64(x, every(8, width)); }
inline uint64_t stretch(uint64_t x, int width) { return _pdep_u64(x, every(8, width)); }
#else
inline uint64_t squeeze(uint64_t x, int width) {
    const uint64_t one = every(16, width), two = every(32, 2 * width), four = (uint64_t{1} << 4 * width) - 1;
    x = (x & one) | (x >> (8 - width) & one << width);
    x = (x & two) | (x >> (16 - 2 * width) & two << 2 * width);
    return (x & four) | (x >> (32 - 4 * width) & four << 4 * width);
}

inline uint64_t stretch(uint64_t x, int width) {
    const uint64_t one = every(16, width), two = every(32, 2 * width), four = (uint64_t{1} << 4 * width) - 1;
    x = (x & four) | (x & four << 4 * width) << (32 - 4 * width);
    x = (x & two) | (x & two << 2 * width) << (16 - 2 * width);
    return (x & one) | (x & one << width) << (8 - width);
}
#endif

enum Order { lowest_first, highest_first };

// Reorders the fields for `highest_first`: reverses the fields that share a byte of the code.
template <int width, Order order>
inline uint64_t ordered(uint64_t x) {
    if (order == lowest_first) return x;
    x = __builtin_bswap64(x);
    return width == 1 ? x : x >> 32 | x << 32;
}

// Packs n fields, a multiple of 64, with no bits above their width. The compiler vectorizes the shifts of a byte's fields.
template <int width, Order order>
inline void pack_fields(const uint8_t* fields, int64_t n, uint8_t* codes) {
    static_assert(width == 2 || order == (width == 1 ? highest_first : lowest_first), "no other code has fields");
    if (width == 8) {
        std::memcpy(codes, fields, static_cast<size_t>(n));
    } else if (width == 4) {
#pragma GCC ivdep
        for (int64_t i = 0; i < n / 2; ++i) {
            uint16_t x;
            std::memcpy(&x, fields + 2 * i, sizeof x);
            codes[i] = static_cast<uint8_t>(x | x >> 4);
        }
    } else if (width == 2) {
#pragma GCC ivdep
        for (int64_t i = 0; i < n / 4; ++i) {
            uint32_t x;
            std::memcpy(&x, fields + 4 * i, sizeof x);
            if (order == lowest_first) codes[i] = static_cast<uint8_t>(x | x >> 6 | x >> 12 | x >> 18);
            else codes[i] = static_cast<uint8_t>(x << 6 | x >> 4 | x >> 14 | x >> 24);
        }
    } else {
#if defined(__AVX512BW__)
        const __m512i reversed = _mm512_set4_epi32(0x08090A0B, 0x0C0D0E0F, 0x00010203, 0x04050607);
        for (int64_t i = 0; i < n; i += 64, codes += 8) {
            const __m512i x = _mm512_shuffle_epi8(_mm512_loadu_si512(fields + i), reversed);
            const uint64_t bits = _mm512_test_epi8_mask(x, _mm512_set1_epi8(1));
            std::memcpy(codes, &bits, sizeof bits);
        }
#else
        for (int64_t i = 0; i < n; i += 8, codes += width) {
            uint64_t x;
            std::memcpy(&x, fields + i, sizeof x);
            x = squeeze(ordered<width, order>(x), width);
            std::memcpy(codes, &x, width);
        }
#endif
    }
}

// The inverse. Stores of a few bytes would delay the loads of whole vectors that follow.
template <int width, Order order>
inline void unpack_fields(const uint8_t* codes, int64_t n, uint8_t* fields) {
    if (width == 8) {
        std::memcpy(fields, codes, static_cast<size_t>(n));
    } else if (width == 4) {
#pragma GCC ivdep
        for (int64_t i = 0; i < n / 2; ++i) {
            const uint32_t x = codes[i];
            const uint16_t two = static_cast<uint16_t>((x | x << 4) & 0x0F0F);
            std::memcpy(fields + 2 * i, &two, sizeof two);
        }
    } else if (width == 2) {
#pragma GCC ivdep
        for (int64_t i = 0; i < n / 4; ++i) {
            const uint32_t x = codes[i];
            const uint32_t moved = order == lowest_first ? x | x << 6 | x << 12 | x << 18
                                                         : x >> 6 | x << 4 | x << 14 | x << 24;
            const uint32_t four = moved & 0x03030303u;
            std::memcpy(fields + 4 * i, &four, sizeof four);
        }
    } else {
        for (int64_t i = 0; i < n; i += 8, codes += width) {
            uint64_t x = 0;
            std::memcpy(&x, codes, width);
            x = ordered<width, order>(stretch(x, width));
            std::memcpy(fields + i, &x, sizeof x);
        }
    }
}

// Bytes of the codes of the last, partial block of n elements.
template <int width, Order order>
inline int64_t bytes_of(int64_t n) {
    constexpr int64_t unit = order == highest_first ? 4 : 1;
    return (n * width + 8 * unit - 1) / (8 * unit) * unit;
}

// Calls field(i) for every element. It returns the field and may write other outputs of the element.
template <int width, Order order, class Field>
inline void encode(int64_t n, uint8_t* codes, Field&& field) {
    uint8_t fields[block];
    int64_t i = 0;
    for (; i + block <= n; i += block, codes += block / 8 * width) {
#pragma GCC ivdep
        for (int64_t k = 0; k < block; ++k) fields[k] = field(i + k);
        pack_fields<width, order>(fields, block, codes);
    }
    if (i == n) return;
    uint8_t rest[block / 8 * width];
    std::memset(fields, 0, sizeof fields);
#pragma GCC ivdep
    for (int64_t k = 0; k < n - i; ++k) fields[k] = field(i + k);
    pack_fields<width, order>(fields, block, rest);
    std::memcpy(codes, rest, bytes_of<width, order>(n - i));
}

// Calls take(i, field) for every element.
template <int width, Order order, class Take>
inline void decode(const uint8_t* codes, int64_t n, Take&& take) {
    uint8_t fields[block];
    int64_t i = 0;
    for (; i + block <= n; i += block, codes += block / 8 * width) {
        unpack_fields<width, order>(codes, block, fields);
#pragma GCC ivdep
        for (int64_t k = 0; k < block; ++k) take(i + k, fields[k]);
    }
    if (i == n) return;
    uint8_t rest[block / 8 * width] = {};
    std::memcpy(rest, codes, bytes_of<width, order>(n - i));
    unpack_fields<width, order>(rest, block, fields);
#pragma GCC ivdep
    for (int64_t k = 0; k < n - i; ++k) take(i + k, fields[k]);
}

}  // namespace
}  // namespace dgc
