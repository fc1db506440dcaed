// The kernels of quantize.h, shared by all instruction sets. The compiler vectorizes the loops for each instruction
// set. Everything is in an anonymous namespace, for the reason given in quantize_fields.h.
#include "quantize/random_bits.h"
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

void sign_encode(const float* v, int64_t n, float cut, float scale, uint8_t* codes, float* residual) {
    with(residual, [=](auto kept) {
        encode<1, highest_first>(n, codes, [=](int64_t i) {
            const bool up = v[i] > cut;
            kept.store(i, v[i] - (up ? scale : -scale));
            return static_cast<uint8_t>(up);
        });
    });
}

void sign_add(const uint8_t* codes, int64_t n, float scale, float* total) {
    decode<1, highest_first>(codes, n, [=](int64_t i, uint8_t up) { total[i] += up ? scale : -scale; });
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

// The field of x with levels of `step`, a sign above them; `value` is what it stands for. r: what is added before the
// level is rounded down. Floats that are not negative have the order of their bits, and the compiler vectorizes a
// minimum of integers, but branches for one of floats.
template <int bits>
inline uint8_t field_of(float x, float inverse, float r, float step, float levels, float& value) {
    const uint32_t scaled = bits_of(float_of(bits_of(x) & 0x7FFFFFFF) * inverse + r), most = bits_of(levels);
    const int32_t level = static_cast<int32_t>(float_of(scaled < most ? scaled : most));
    const uint32_t negative = bits_of(x) >> 31 & mask_of(level > 0);
    value = float_of(bits_of(step * static_cast<float>(level)) | negative << 31);
    return static_cast<uint8_t>(static_cast<uint32_t>(level) | negative << (bits - 1));
}

template <int bits>
inline float value_of(uint8_t field, float step) {
    const int32_t level = field & ((1 << (bits - 1)) - 1);
    const uint32_t negative = static_cast<uint32_t>(field) >> (bits - 1);
    return float_of(bits_of(step * static_cast<float>(level)) | negative << 31);
}

template <int bits, bool randomly, class Kept>
inline void uniform_encode_as(const float* v, int64_t n, float inverse, float step, float levels, Random random,
                              uint8_t* codes, Kept kept) {
    encode<bits, lowest_first>(n, codes, [=](int64_t i) {
        const uint32_t drawn = randomly ? random_bits(static_cast<uint32_t>(i), random) >> 8 : 0;
        const float r = randomly ? static_cast<float>(static_cast<int32_t>(drawn)) * 0x1p-24f : 0.5f;
        float value;
        const uint8_t field = field_of<bits>(v[i], inverse, r, step, levels, value);
        kept.store(i, v[i] - value);
        return field;
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
        total[i] += value_of<bits>(field, step);
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

// A stage of the transform adds pairs whose places differ in the last bit, and makes it the first. All stages are then
// the same loop over half a group, which the compiler vectorizes.
inline void add_pairs(const float* __restrict from, float* __restrict to) {
    for (int64_t k = 0; k < group / 2; ++k) {
        to[k] = from[2 * k] + from[2 * k + 1];
        to[k + group / 2] = from[2 * k] - from[2 * k + 1];
    }
}

// The transform of each `group` of n elements.
void rotate(float* x, int64_t n) {
    alignas(64) float half_done[group];
    for (float* end = x + n; x < end; x += group) {
        for (int64_t h = 1; h < group; h *= 4) {
            add_pairs(x, half_done);
            add_pairs(half_done, x);
        }
        for (int64_t i = 0; i < group; ++i) x[i] *= 0.125f;
    }
}

// L / scale and scale / L, or zeros for a block that sends nothing.
struct Factors {
    float inverse, step;

    Factors(uint32_t top, float levels) {
        const float scale = float_of(top << 16);
        inverse = levels / scale;
        step = scale / levels;
        if (top == 0 || top >= 0x7F80 || (bits_of(inverse) & 0x7F800000) == 0x7F800000) inverse = step = 0.0f;
    }
};

// The elements of blocks, as they are. `read` returns the bits of the largest magnitude of n elements from `begin` on.
struct Given {
    const float* v;

    int32_t read(int64_t begin, int64_t n) const { return largest(v + begin, n); }
};

// The same after v += g, with zeros for elements of g that are not usable. first: the first of these, if it is smaller.
struct Sums {
    float* v;
    const float* g;
    int64_t* first;

    int32_t read(int64_t begin, int64_t n) const {
        float* __restrict to = v + begin;
        const float* __restrict from = g + begin;
        int32_t most = 0, worst = 0;
        for (int64_t k = 0; k < n; ++k) {
            const int32_t size = static_cast<int32_t>(bits_of(from[k]) & 0x7FFFFFFF);
            const uint32_t usable = mask_of(size < static_cast<int32_t>(too_large_bits));
            const float x = to[k] + float_of(bits_of(from[k]) & usable);
            to[k] = x;
            const int32_t magnitude = static_cast<int32_t>(bits_of(x) & 0x7FFFFFFF);
            most = magnitude > most ? magnitude : most;
            worst = size > worst ? size : worst;
        }
        if (worst >= static_cast<int32_t>(too_large_bits) && begin < *first) {
            int64_t k = 0;
            while ((bits_of(from[k]) & 0x7FFFFFFF) < too_large_bits) ++k;
            *first = begin + k;
        }
        return most;
    }
};

// The blocks of a few hundred elements are packed together, because the loops of pack_fields are for many fields.
template <int bits, bool rotating, class Source, class Kept>
inline void blocks_encode_as(Source source, int64_t n, int64_t size, uint8_t* scales, uint8_t* codes, Kept kept) {
    constexpr float levels = (1 << (bits - 1)) - 1;
    alignas(64) uint8_t fields[block];
    alignas(64) float turned[block], values[block];
    for (int64_t begin = 0; begin < n; begin += block, codes += block / 8 * bits) {
        const int64_t end = begin + block < n ? begin + block : n;
        int64_t filled = 0;
        for (int64_t i = begin; i < end; i += size, scales += 2, filled += size) {
            const int64_t m = i + size < end ? size : end - i, all = rotating ? size : m;
            int32_t most = source.read(i, m);
            const float* x = source.v + i;
            if (rotating) {
                std::memcpy(turned, x, m * sizeof(float));
                std::memset(turned + m, 0, (size - m) * sizeof(float));
                rotate(turned, size);
                x = turned;
                most = largest(x, size);
            }
            const uint32_t top = (static_cast<uint32_t>(most) + 0xFFFF) >> 16;
            const uint16_t scale = static_cast<uint16_t>(top);
            std::memcpy(scales, &scale, sizeof scale);
            const Factors by(top, levels);
#pragma GCC ivdep
            for (int64_t k = 0; k < all; ++k) {
                float value;
                fields[filled + k] = field_of<bits>(x[k], by.inverse, 0.5f, by.step, levels, value);
                if (rotating) values[k] = value;
                else kept.store(i + k, x[k] - value);
            }
            std::memset(fields + filled + all, 0, static_cast<size_t>(size - all));
            if (!rotating) continue;
            rotate(values, size);
            for (int64_t k = 0; k < m; ++k) kept.store(i + k, source.v[i + k] - values[k]);
        }
        pack_fields<bits, lowest_first>(fields, filled, codes);
    }
}

template <class Source>
inline void blocks_encode_from(Source source, int64_t n, int64_t size, int bits, bool rotating, uint8_t* scales,
                               uint8_t* codes, float* residual) {
    with(residual, [=](auto kept) {
        if (rotating && bits == 4) return blocks_encode_as<4, true>(source, n, size, scales, codes, kept);
        if (rotating) return blocks_encode_as<8, true>(source, n, size, scales, codes, kept);
        if (bits == 4) return blocks_encode_as<4, false>(source, n, size, scales, codes, kept);
        blocks_encode_as<8, false>(source, n, size, scales, codes, kept);
    });
}

void blocks_encode(const float* v, int64_t n, int64_t size, int bits, bool rotating, uint8_t* scales, uint8_t* codes,
                   float* residual) {
    blocks_encode_from(Given{v}, n, size, bits, rotating, scales, codes, residual);
}

int64_t blocks_add_encode(const float* g, float* v, int64_t n, int64_t size, int bits, bool rotating, uint8_t* scales,
                          uint8_t* codes, float* residual) {
    int64_t first = n;
    blocks_encode_from(Sums{v, g, &first}, n, size, bits, rotating, scales, codes, residual);
    return first;
}

template <int bits>
inline void blocks_decode_as(const uint8_t* scales, const uint8_t* codes, int64_t n, int64_t size, bool rotating,
                             float divisor, float* out) {
    constexpr float levels = (1 << (bits - 1)) - 1;
    alignas(64) uint8_t fields[block];
    alignas(64) float values[block];
    for (int64_t begin = 0; begin < n; begin += block, codes += block / 8 * bits) {
        const int64_t end = begin + block < n ? begin + block : n, whole = (end - begin + size - 1) / size * size;
        unpack_fields<bits, lowest_first>(codes, whole, fields);
        for (int64_t i = 0; i < whole; i += size, scales += 2) {
            uint16_t scale;
            std::memcpy(&scale, scales, sizeof scale);
            const Factors by(scale, levels);
#pragma GCC ivdep
            for (int64_t k = 0; k < size; ++k) values[i + k] = value_of<bits>(fields[i + k], by.step);
        }
        if (rotating) rotate(values, whole);
        float* to = out + begin;
        if (divisor == 0.0f) {
            for (int64_t k = 0; k < end - begin; ++k) to[k] += values[k];
        } else if ((bits_of(divisor) & 0x7FFFFF) == 0) {  // a power of two: the product has the same bits, in less time
            const float factor = 1.0f / divisor;
            for (int64_t k = 0; k < end - begin; ++k) to[k] = values[k] * factor;
        } else {
            for (int64_t k = 0; k < end - begin; ++k) to[k] = values[k] / divisor;
        }
    }
}

void blocks_decode(const uint8_t* scales, const uint8_t* codes, int64_t n, int64_t size, int bits, bool rotating,
                   float divisor, float* out) {
    if (bits == 4) return blocks_decode_as<4>(scales, codes, n, size, rotating, divisor, out);
    blocks_decode_as<8>(scales, codes, n, size, rotating, divisor, out);
}

constexpr QuantizeKernels table{
    sign_encode, sign_add, tern_encode,   uniform_encode,    uniform_add,   largest,
    pack,        unpack,   blocks_encode, blocks_add_encode, blocks_decode,
};

}  // namespace
}  // namespace dgc
