// Value codecs: fp32, 16-bit floats with one scale, signs or int8 with one scale per segment, and 2 bits with a table
// per segment.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "codec.h"
#include "common/float_bits.h"

namespace dgc {
namespace {

constexpr int LARGEST_EXPONENT = 15;  // scaled values are at most 2**15
constexpr float SMALLEST = 0x1p-149f;
constexpr int64_t worth_a_thread = 16384;  // values
constexpr float ROUNDER = 0x1.8p23f;  // adding and subtracting it rounds to the nearest integer, ties to even

constexpr uint32_t INFINITY_BITS = 0x7F800000, NOT_A_NUMBER = 0x7FC00000;

inline bool finite(float x) { return (bits_of(x) & INFINITY_BITS) != INFINITY_BITS; }

inline bool all_finite(const float* begin, const float* end) {
    return std::all_of(begin, end, [](float x) { return finite(x); });
}

struct Fp32 {
    using Word = uint32_t;
    static Word to(float x) { return bits_of(x); }
    static float from(Word word) { return float_of(word); }
};

struct Fp16 {
    using Word = uint16_t;

    // Rounds magnitudes up to 2**15 to nearest, ties to even. NaN stays NaN. All cases are computed and masked, which
    // avoids branches.
    static Word to(float x) {
        uint32_t sign = bits_of(x) >> 16 & 0x8000, bits = bits_of(x) & 0x7FFFFFFF;
        // Below 2**-14 the steps of fp16 are 2**-24, as the steps of fp32 from 0.5 to 1. Adding 0.5 therefore rounds.
        uint32_t small = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);
        uint32_t normal = (bits - (112u << 23) + 0xFFF + (bits >> 13 & 1)) >> 13;
        uint32_t is_small = 0u - static_cast<uint32_t>(bits < (113u << 23));
        uint32_t is_broken = 0u - static_cast<uint32_t>(bits >= INFINITY_BITS);
        return static_cast<Word>(sign | (is_small & small) | (~is_small & normal & 0x7FFF) | (is_broken & 0x7E00));
    }

    // Infinities and NaN become NaN.
    static float from(Word word) {
        uint32_t magnitude = word & 0x7FFFu, sign = static_cast<uint32_t>(word & 0x8000) << 16;
        uint32_t small = bits_of(float_of(magnitude + bits_of(0.5f)) - 0.5f);
        uint32_t normal = (magnitude << 13) + (112u << 23);
        uint32_t is_small = 0u - static_cast<uint32_t>(magnitude < 0x400);
        uint32_t is_broken = 0u - static_cast<uint32_t>(magnitude >= 0x7C00);
        return float_of(sign | (is_small & small) | (~is_small & normal) | (is_broken & 0x7FC00000));
    }
};

struct Bf16 {
    using Word = uint16_t;

    static Word to(float x) {
        uint32_t bits = bits_of(x);
        uint32_t is_nan = 0u - static_cast<uint32_t>((bits & 0x7FFFFFFF) > INFINITY_BITS);
        return static_cast<Word>((~is_nan & ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)) | (is_nan & 0x7FC0));
    }

    static float from(Word word) { return float_of(static_cast<uint32_t>(word) << 16); }
};

// Clamps x to [-limit, limit]. A non-finite x becomes NaN.
inline float cut(float x, float limit) {
    return finite(x) ? std::min(std::max(x, -limit), limit) : float_of(NOT_A_NUMBER);
}

struct Scale {
    float value, inverse;
};

// The power-of-two scale of 16-bit values, from the largest finite magnitude.
Scale scale_for(const float* values, int64_t count, float limit) {
    uint32_t largest = 0;
    for (int64_t j = 0; j < count; ++j) {
        const uint32_t bits = bits_of(values[j]) & 0x7FFFFFFF;
        largest = std::max(largest, bits < INFINITY_BITS ? bits : 0);
    }
    largest = std::min(largest, bits_of(limit));
    int exponent = static_cast<int>(largest >> 23) - 126 - LARGEST_EXPONENT;
    exponent = largest ? std::min(126, std::max(-126, exponent)) : 0;
    return {float_of(static_cast<uint32_t>(127 + exponent) << 23),
            float_of(static_cast<uint32_t>(127 - exponent) << 23)};
}

template <class Format>
void encode_words(const float* values, int64_t count, float limit, Scale scale, uint8_t* section, float* decoded) {
    using Word = typename Format::Word;
    for (int64_t j = 0; j < count; ++j) {
        const Word word = Format::to(cut(values[j], limit) * scale.inverse);
        store(section + j * static_cast<int64_t>(sizeof(Word)), word);
        decoded[j] = Format::from(word) * scale.value;
    }
}

template <class Format>
bool decode_words(const uint8_t* section, int64_t count, float scale, float* decoded) {
    using Word = typename Format::Word;
    uint32_t broken = 0;
    for (int64_t j = 0; j < count; ++j) {
        decoded[j] = Format::from(load<Word>(section + j * static_cast<int64_t>(sizeof(Word)))) * scale;
        broken |= static_cast<uint32_t>(!finite(decoded[j]));
    }
    return !broken;
}

// Calls visit(segment, begin, end) for the entries of each segment. Invalid indices are safe.
template <class Visit>
void for_ranges(const int32_t* indices, int64_t count, const int64_t* bounds, int64_t segments, Visit&& visit) {
    int64_t begin = 0;
    for (int64_t segment = 0; segment < segments; ++segment) {
        int64_t end = std::lower_bound(indices + begin, indices + count, bounds[segment + 1]) - indices;
        visit(segment, begin, end);
        begin = end;
    }
}

// The largest bits of magnitudes, which are ordered as the magnitudes.
uint32_t largest_in(const float* values, int64_t begin, int64_t end) {
    uint32_t largest = 0;
    for (int64_t j = begin; j < end; ++j) largest = std::max(largest, bits_of(values[j]) & 0x7FFFFFFF);
    return largest;
}

inline double power_of(int exponent) { return std::ldexp(1.0, exponent); }

// As the class of the same name in payload/__init__.py: members * 2**exponent is no less than any sum.
struct FixedPoint {
    double scale, unit;

    FixedPoint(int64_t members, int exponent) {
        const int shift = 62 - (64 - __builtin_clzll(static_cast<uint64_t>(members))) - exponent;
        scale = power_of(shift);
        unit = power_of(-shift);
    }
    int64_t of(double x) const { return static_cast<int64_t>(x * scale); }
    double value(int64_t sum) const { return static_cast<double>(sum) * unit; }
};

inline int exponent_of(uint32_t largest) { return std::max(1, static_cast<int>(largest >> 23)) - 126; }

}  // namespace
}  // namespace dgc

using namespace dgc;

DGC_EXPORT void dgc_cast_encode(const float* values, int64_t count, int dtype, float limit, uint8_t* section,
                                float* decoded, float* scale_of_all) {
    const bool halves = dtype == FP16 || dtype == BF16;
    const Scale scale = halves ? scale_for(values, count, limit) : Scale{1.0f, 1.0f};
    if (dtype == FP16) encode_words<Fp16>(values, count, limit, scale, section, decoded);
    if (dtype == BF16) encode_words<Bf16>(values, count, limit, scale, section, decoded);
    if (!halves) encode_words<Fp32>(values, count, limit, scale, section, decoded);
    *scale_of_all = scale.value;
}

// Returns 1 if all decoded values are finite, else 0.
DGC_EXPORT int dgc_cast_decode(const uint8_t* section, int64_t count, int dtype, float scale, float* decoded) {
    if (dtype == FP16) return decode_words<Fp16>(section, count, scale, decoded);
    if (dtype == BF16) return decode_words<Bf16>(section, count, scale, decoded);
    return decode_words<Fp32>(section, count, scale, decoded);
}

DGC_EXPORT void dgc_sign_encode(const int32_t* indices, const float* values, int64_t count, const int64_t* bounds,
                                int64_t segments, uint8_t* section, float* decoded) {
    uint8_t* bits = section + 4 * segments;
    for_ranges(indices, count, bounds, segments, [&](int64_t segment, int64_t begin, int64_t end) {
        const int64_t members = std::max<int64_t>(1, end - begin);
        const uint32_t largest = largest_in(values, begin, end);
        float mean = float_of(NOT_A_NUMBER);
        if (largest < INFINITY_BITS) {
            const FixedPoint fixed(members, exponent_of(largest));
            int64_t sum = 0;
            for (int64_t j = begin; j < end; ++j) sum += fixed.of(static_cast<double>(std::fabs(values[j])));
            mean = static_cast<float>(fixed.value(sum) / static_cast<double>(members));
        }
        store(section + 4 * segment, mean);
        for (int64_t j = begin; j < end; ++j) decoded[j] = values[j] < 0 ? -mean : mean;
    });
    for (int64_t j = 0; j < count; ++j) bits[j / 8] |= static_cast<uint8_t>((values[j] < 0) << j % 8);
}

// The decoders below return the same as dgc_cast_decode.
DGC_EXPORT int dgc_sign_decode(const int32_t* indices, int64_t count, const int64_t* bounds, int64_t segments,
                               const uint8_t* section, float* decoded) {
    const uint8_t* bits = section + 4 * segments;
    bool valid = true;
    for_ranges(indices, count, bounds, segments, [&](int64_t segment, int64_t begin, int64_t end) {
        float mean = load<float>(section + 4 * segment);
        valid &= begin == end || finite(mean);
        const uint32_t magnitude = bits_of(mean);  // the sign by a mask: a branch would be wrong half of the time
        const auto put = [&](int64_t j, uint32_t byte) { decoded[j] = float_of(magnitude ^ byte >> j % 8 << 31); };
        int64_t j = begin;
        for (; j < end && j % 8; ++j) put(j, bits[j / 8]);
        for (; j + 8 <= end; j += 8) {
            for (int i = 0; i < 8; ++i) decoded[j + i] = float_of(magnitude ^ uint32_t{bits[j / 8]} >> i << 31);
        }
        for (; j < end; ++j) put(j, bits[j / 8]);
    });
    return valid;
}

DGC_EXPORT void dgc_int8_encode(const int32_t* indices, const float* values, int64_t count, const int64_t* bounds,
                                int64_t segments, uint8_t* section, float* decoded) {
    uint8_t* steps = section + 4 * segments;
    for_ranges(indices, count, bounds, segments, [&](int64_t segment, int64_t begin, int64_t end) {
        float largest = 0;
        for (int64_t j = begin; j < end; ++j) largest = std::max(largest, std::fabs(values[j]));
        float scale = largest > 0 ? std::max(largest / 127.0f, SMALLEST) : 0.0f;
        float divisor = scale > 0 ? scale : 1.0f;
        store(section + 4 * segment, scale);
        for (int64_t j = begin; j < end; ++j) {
            float step = std::min(127.0f, std::max(-127.0f, values[j] / divisor));
            step = (step + ROUNDER) - ROUNDER;
            steps[j] = static_cast<uint8_t>(static_cast<int8_t>(step));
            decoded[j] = step * scale;
        }
    });
}

DGC_EXPORT int dgc_int8_decode(const int32_t* indices, int64_t count, const int64_t* bounds, int64_t segments,
                               const uint8_t* section, float* decoded) {
    const uint8_t* steps = section + 4 * segments;
    bool valid = true;
    for_ranges(indices, count, bounds, segments, [&](int64_t segment, int64_t begin, int64_t end) {
        float scale = load<float>(section + 4 * segment);
        for (int64_t j = begin; j < end; ++j) {
            decoded[j] = static_cast<float>(static_cast<int8_t>(steps[j])) * scale;
            valid &= finite(decoded[j]);
        }
    });
    return valid;
}

// Tensors are shared out to threads.
DGC_EXPORT void dgc_two_bit_encode(const int32_t* indices, const float* values, int64_t count, const int64_t* bounds,
                                   int64_t segments, uint8_t* section, float* decoded, double r, int threads) {
    uint8_t* const codes = section + 16 * segments;
    const auto encode = [&](int64_t segment, int64_t begin, int64_t end) {
        const int64_t members = std::max<int64_t>(1, end - begin);
        const uint32_t largest = largest_in(values, begin, end);
        if (largest >= INFINITY_BITS) {
            for (int code = 0; code < 4; ++code) store(section + 16 * segment + 4 * code, float_of(NOT_A_NUMBER));
            std::fill(decoded + begin, decoded + end, float_of(NOT_A_NUMBER));
            return;
        }
        // differences from the mean are at most twice the largest magnitude
        const int exponent = exponent_of(largest);
        const FixedPoint fixed(members, exponent), squared(members, 2 * exponent + 2);
        int64_t sum = 0, squares = 0;
        for (int64_t j = begin; j < end; ++j) sum += fixed.of(static_cast<double>(values[j]));
        const double mean = fixed.value(sum) / static_cast<double>(members);
        for (int64_t j = begin; j < end; ++j) {
            const double above = static_cast<double>(values[j]) - mean;
            squares += squared.of(above * above);
        }
        const double width = std::sqrt(squared.value(squares) / static_cast<double>(members)) * (r / 4);
        int64_t sums[4] = {0, 0, 0, 0}, counts[4] = {0, 0, 0, 0};
        const auto code_of = [&](int64_t j) {
            const double value = static_cast<double>(values[j]), above = value - mean;
            const int code = (above >= -width) + (above >= 0) + (above >= width);
            sums[code] += fixed.of(value);
            counts[code] += 1;
            return code << 2 * (j % 4);
        };
        // the first and the last byte have codes of other tensors
        const auto add = [&](int64_t j) { __atomic_fetch_or(codes + j / 4, code_of(j), __ATOMIC_RELAXED); };
        int64_t j = begin;
        for (; j < end && j % 4; ++j) add(j);
        for (; j + 4 <= end; j += 4) {
            int byte = 0;
            for (int64_t i = 0; i < 4; ++i) byte |= code_of(j + i);
            codes[j / 4] = static_cast<uint8_t>(byte);
        }
        for (; j < end; ++j) add(j);
        float table[4];
        for (int code = 0; code < 4; ++code) {
            const double own = static_cast<double>(std::max<int64_t>(1, counts[code]));
            table[code] = static_cast<float>(fixed.value(sums[code]) / own);
            store(section + 16 * segment + 4 * code, table[code]);
        }
        for (j = begin; j < end; ++j)
            decoded[j] = table[__atomic_load_n(codes + j / 4, __ATOMIC_RELAXED) >> 2 * (j % 4) & 3];
    };
    std::vector<int64_t> ends(segments + 1, 0);
    for_ranges(indices, count, bounds, segments, [&](int64_t s, int64_t, int64_t end) { ends[s + 1] = end; });
    std::atomic<int64_t> next{0};
    parallel_for(static_cast<int>(std::min<int64_t>(threads, 1 + count / worth_a_thread)), [&](int) {
        for (int64_t s; (s = next.fetch_add(1)) < segments;) encode(s, ends[s], ends[s + 1]);
    });
}

DGC_EXPORT int dgc_two_bit_decode(const int32_t* indices, int64_t count, const int64_t* bounds, int64_t segments,
                                  const uint8_t* section, float* decoded) {
    const uint8_t* codes = section + 16 * segments;
    bool valid = true;
    for_ranges(indices, count, bounds, segments, [&](int64_t segment, int64_t begin, int64_t end) {
        float table[4];
        std::memcpy(table, section + 16 * segment, sizeof table);
        const auto put = [&](int64_t j, uint32_t byte) { decoded[j] = table[byte >> 2 * (j % 4) & 3]; };
        int64_t j = begin;
        for (; j < end && j % 4; ++j) put(j, codes[j / 4]);
        for (; j + 4 <= end; j += 4) {
            for (int64_t i = 0; i < 4; ++i) put(j + i, codes[j / 4]);
        }
        for (; j < end; ++j) put(j, codes[j / 4]);
        // an entry that is not finite is valid if no code names it
        if (!all_finite(table, table + 4)) valid &= all_finite(decoded + begin, decoded + end);
    });
    return valid;
}
