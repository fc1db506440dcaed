// The kernels of quantize.h, shared by all instruction sets. The compiler vectorizes the loops for each instruction
// set. Everything is in an anonymous namespace, for the reason given in quantize_fields.h.
#include "quantize_fields.h"

namespace dgc {
namespace {

// The residual, or nothing in its place.
template <bool kept>
struct Residual {
    float* to;

    void store(int64_t i, float x) const {
        if (kept) to[i] = x;
    }
};

// Calls encode(Residual). A test for each element would not be vectorized.
template <class Encode>
inline void with(float* residual, Encode&& encode) {
    if (residual) return encode(Residual<true>{residual});
    encode(Residual<false>{nullptr});
}

void sign_encode(const float* v, int64_t n, float cut, float low, float high, uint8_t* codes, float* residual) {
    with(residual, [=](auto kept) {
        encode<1, highest_first>(n, codes, [=](int64_t i) {
            const bool up = v[i] > cut;
            kept.store(i, v[i] - (up ? high : low));
            return static_cast<uint8_t>(up);
        });
    });
}

void sign_add(const uint8_t* codes, int64_t n, float low, float high, float* total) {
    decode<1, highest_first>(codes, n, [=](int64_t i, uint8_t up) { total[i] += up ? high : low; });
}

// All ones if x, else all zeros. The compiler vectorizes this mask, but not a branch.
inline uint32_t mask_of(bool x) { return 0u - static_cast<uint32_t>(x); }

void tern_encode(const float* v, int64_t n, float threshold, uint8_t* codes, float* residual) {
    with(residual, [=](auto kept) {
        encode<2, highest_first>(n, codes, [=](int64_t i) {
            const uint32_t up = mask_of(v[i] >= threshold), down = mask_of(v[i] <= -threshold);
            kept.store(i, v[i] - float_of((bits_of(threshold) & (up | down)) | (down & sign_bit)));
            return static_cast<uint8_t>((up & 3) | (down & 2));
        });
    });
}

inline uint32_t random_bits(uint32_t i, const Random& random) {
    uint32_t x = random.first + i + random.key;
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15 ^ random.inner_key) * 0x846CA68Bu;
    return x ^ x >> 16;
}

template <int bits, bool randomly, class Kept>
inline void uniform_encode_as(const float* v, int64_t n, float inverse, float step, float levels, Random random,
                              uint8_t* codes, Kept kept) {
    encode<bits, lowest_first>(n, codes, [=](int64_t i) {
        const uint32_t drawn = randomly ? random_bits(static_cast<uint32_t>(i), random) >> 8 : 0;
        const float r = randomly ? static_cast<float>(static_cast<int32_t>(drawn)) * 0x1p-24f : 0.5f;
        const float x = float_of(bits_of(v[i]) & 0x7FFFFFFF) * inverse + r;
        const int32_t level = static_cast<int32_t>(x < levels ? x : levels);
        const uint32_t negative = level > 0 ? bits_of(v[i]) >> 31 : 0;
        kept.store(i, v[i] - float_of(bits_of(step * static_cast<float>(level)) | negative << 31));
        return static_cast<uint8_t>(static_cast<uint32_t>(level) | negative << (bits - 1));
    });
}

template <int bits>
inline void uniform_encode_in(const float* v, int64_t n, float inverse, float step, float levels,
                              const Random& random, uint8_t* codes, float* residual) {
    with(residual, [&](auto kept) {
        if (random.enabled) return uniform_encode_as<bits, true>(v, n, inverse, step, levels, random, codes, kept);
        uniform_encode_as<bits, false>(v, n, inverse, step, levels, random, codes, kept);
    });
}

void uniform_encode(const float* v, int64_t n, float inverse, float step, float levels, int bits,
                    const Random& random, uint8_t* codes, float* residual) {
    if (bits == 2) return uniform_encode_in<2>(v, n, inverse, step, levels, random, codes, residual);
    if (bits == 4) return uniform_encode_in<4>(v, n, inverse, step, levels, random, codes, residual);
    uniform_encode_in<8>(v, n, inverse, step, levels, random, codes, residual);
}

template <int bits>
inline void uniform_add_in(const uint8_t* codes, int64_t n, float step, float* total) {
    decode<bits, lowest_first>(codes, n, [=](int64_t i, uint8_t field) {
        const int32_t level = field & ((1 << (bits - 1)) - 1);
        const uint32_t negative = static_cast<uint32_t>(field) >> (bits - 1);
        total[i] += float_of(bits_of(step * static_cast<float>(level)) | negative << 31);
    });
}

void uniform_add(const uint8_t* codes, int64_t n, float step, int bits, float* total) {
    if (bits == 2) return uniform_add_in<2>(codes, n, step, total);
    if (bits == 4) return uniform_add_in<4>(codes, n, step, total);
    uniform_add_in<8>(codes, n, step, total);
}

int32_t largest(const float* v, int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t magnitude = static_cast<int32_t>(bits_of(v[i]) & 0x7FFFFFFF);
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

int64_t positives(const float* v, int64_t n) {
    int64_t count = 0;
    for (int64_t i = 0; i < n;) {
        const int64_t end = i + block < n ? i + block : n;
        int32_t few = 0;  // half as wide, so that twice as many elements fit into a vector
        for (; i < end; ++i) few += v[i] > 0.0f;
        count += few;
    }
    return count;
}

template <bool randomly, class Kept>
inline void natural_encode_as(const float* v, int64_t n, int32_t top, Random random, uint8_t* codes, Kept kept) {
    encode<8, lowest_first>(n, codes, [=](int64_t i) {
        const uint32_t drawn = randomly ? random_bits(static_cast<uint32_t>(i), random) >> 9 : 1u << 22;
        const uint32_t bits = bits_of(v[i]);
        // a carry out of the mantissa rounds the exponent up
        int32_t exponent = static_cast<int32_t>(((bits & ~sign_bit) + drawn) >> 23);
        exponent = exponent < 254 ? exponent : 254;
        const uint32_t sent = mask_of(exponent > top);
        const uint32_t code = static_cast<uint32_t>(exponent - top) | (bits >> 31) << 7;
        const uint32_t value = static_cast<uint32_t>(exponent) << 23 | (bits & sign_bit);
        kept.store(i, v[i] - float_of(value & sent));
        return static_cast<uint8_t>(code & sent);
    });
}

void natural_encode(const float* v, int64_t n, int32_t top, const Random& random, uint8_t* codes,
                    float* residual) {
    with(residual, [&](auto kept) {
        if (random.enabled) return natural_encode_as<true>(v, n, top, random, codes, kept);
        natural_encode_as<false>(v, n, top, random, codes, kept);
    });
}

void natural_add(const uint8_t* codes, int64_t n, int32_t top, float* total) {
    const float unit = float_of(static_cast<uint32_t>(top + 127) << 23);
    decode<8, lowest_first>(codes, n, [=](int64_t i, uint8_t code) {
        // the product of two powers is exact, and zero for c = 0
        const uint32_t c = code & 127u, negative = static_cast<uint32_t>(code >> 7);
        total[i] += float_of(c << 23 | negative << 31) * unit;
    });
}

// While the codes have eight more bytes, `pack` and `unpack` move as many, because a copy of a variable number is a call.
// What the store writes beyond its fields is overwritten.
void pack(const uint8_t* levels, int64_t n, int bits, uint8_t* codes) {
    for (; n * bits >= 64; n -= 8, levels += 8, codes += bits) {
        uint64_t x;
        std::memcpy(&x, levels, sizeof x);
        x = squeeze(x, bits);
        std::memcpy(codes, &x, sizeof x);
    }
    for (; n > 0; n -= 8, levels += 8, codes += bits) {
        uint64_t x = 0;
        std::memcpy(&x, levels, static_cast<size_t>(n < 8 ? n : 8));
        x = squeeze(x, bits);
        const int64_t nbytes = n < 8 ? (n * bits + 7) / 8 : bits;
        std::memcpy(codes, &x, static_cast<size_t>(nbytes));
    }
}

void unpack(const uint8_t* codes, int64_t n, int bits, uint8_t* levels) {
    for (; n * bits >= 64; n -= 8, levels += 8, codes += bits) {
        uint64_t x;
        std::memcpy(&x, codes, sizeof x);
        x = stretch(x, bits);
        std::memcpy(levels, &x, sizeof x);
    }
    for (; n > 0; n -= 8, levels += 8, codes += bits) {
        uint64_t x = 0;
        const int64_t nbytes = n < 8 ? (n * bits + 7) / 8 : bits;
        std::memcpy(&x, codes, static_cast<size_t>(nbytes));
        x = stretch(x, bits);
        std::memcpy(levels, &x, static_cast<size_t>(n < 8 ? n : 8));
    }
}

constexpr QuantizeKernels table{
    sign_encode, sign_add,  tern_encode,    uniform_encode, uniform_add, largest,
    positives,   natural_encode, natural_add, pack,           unpack,
};

}  // namespace
}  // namespace dgc
