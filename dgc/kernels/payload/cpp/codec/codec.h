// Helpers shared by the payload codecs. Payloads and the machine are little-endian. Words may be unaligned.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/pool.h"

namespace dgc {

constexpr int64_t HEADER_BYTES = 24;
constexpr int LARGEST_PARAMETER = 31;

enum Dtype : int { FP32 = 0, FP16 = 1, BF16 = 2 };

static inline int64_t size_of(int dtype) { return dtype == FP32 ? 4 : 2; }

template <class Word>
static inline Word load(const uint8_t* from) {
    Word word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

template <class Word>
static inline void store(uint8_t* to, Word word) {
    std::memcpy(to, &word, sizeof word);
}

static inline int bit_length(uint32_t x) { return x ? 32 - __builtin_clz(x) : 0; }

static inline int64_t block_count(int64_t count, int64_t block) { return (count + block - 1) / block; }

// The gaps between `count` ascending indices. `before` is the index that precedes them, or -1.
static inline void gaps_of(const int32_t* indices, int64_t count, int32_t before, uint32_t* gaps) {
    if (count) gaps[0] = static_cast<uint32_t>(indices[0] - before - 1);
    for (int64_t j = 1; j < count; ++j) gaps[j] = static_cast<uint32_t>(indices[j] - indices[j - 1] - 1);
}

// A section of a payload: `nbytes` bytes, a multiple of 4, accessed in words of at most 64 bits.
struct Section {
    uint8_t* bytes;
    int64_t nbytes;

    uint64_t word(int64_t i) const {
        int64_t at = 8 * i;
        return at + 8 <= nbytes ? load<uint64_t>(bytes + at) : load<uint32_t>(bytes + at);
    }

    // Word i must exist. Bits past the end of the section are dropped.
    void or_word(int64_t i, uint64_t bits) const {
        int64_t at = 8 * i;
        if (at + 8 <= nbytes) {
            store<uint64_t>(bytes + at, load<uint64_t>(bytes + at) | bits);
        } else {
            store<uint32_t>(bytes + at, load<uint32_t>(bytes + at) | static_cast<uint32_t>(bits));
        }
    }

    // Writes a field of at most 31 bits.
    void put(int64_t bit, uint32_t field) const {
        if (!field) return;
        int shift = static_cast<int>(bit & 63);
        or_word(bit >> 6, static_cast<uint64_t>(field) << shift);
        if (shift > 32 && field >> (64 - shift)) or_word((bit >> 6) + 1, field >> (64 - shift));
    }

    // Reads a field of at most 31 bits. Bits past the end of the section read as zero.
    uint32_t get(int64_t bit, int width) const {
        uint64_t low = 8 * (bit >> 6) < nbytes ? word(bit >> 6) : 0;
        uint64_t high = 8 * ((bit >> 6) + 1) < nbytes ? word((bit >> 6) + 1) : 0;
        int shift = static_cast<int>(bit & 63);
        uint64_t both = low >> shift | (shift ? high << (64 - shift) : 0);
        return static_cast<uint32_t>(both & ((uint64_t{1} << width) - 1));
    }
};

// Writes the lowest `width` bits of each of `count` numbers from bit `bit` on. The target bits must be zero, and each
// full group of 64 numbers must start at a byte.
void pack(const uint32_t* numbers, int64_t count, int width, const Section& section, int64_t bit);
// Reads them back. Returns false if they do not fit in the section.
bool unpack(const Section& section, int64_t bit, int width, int64_t count, uint32_t* numbers);

}  // namespace dgc

// Clamps magnitudes to `limit` first. scale points to one float.
DGC_EXPORT void dgc_cast_encode(const float* values, int64_t count, int dtype, float limit, uint8_t* section,
                                float* decoded, float* scale);

// The decoders of sections. All return 1 if the section is valid, and never access memory outside their arguments.
DGC_EXPORT int dgc_sealed(const uint8_t* payload, int64_t nbytes);
DGC_EXPORT int dgc_plain_decode(const uint8_t* section, int64_t nbytes, int64_t count, int64_t capacity,
                                int64_t numel, int32_t* indices);
DGC_EXPORT int dgc_packed_decode(uint8_t* bytes, int64_t nbytes, int64_t count, int64_t capacity, int64_t numel,
                                 int32_t* indices);
DGC_EXPORT int dgc_rice_decode(uint8_t* bytes, int64_t nbytes, int64_t count, int64_t capacity, int64_t numel,
                               int32_t* indices);
DGC_EXPORT int dgc_chunks_decode(uint8_t* bytes, int64_t nbytes, int64_t count, int64_t capacity, int64_t numel,
                                 int32_t* indices);
DGC_EXPORT int dgc_cast_decode(const uint8_t* section, int64_t count, int dtype, float scale, float* decoded);
DGC_EXPORT int dgc_sign_decode(const int32_t* indices, int64_t count, const int64_t* bounds, int64_t segments,
                               const uint8_t* section, float* decoded);
DGC_EXPORT int dgc_int8_decode(const int32_t* indices, int64_t count, const int64_t* bounds, int64_t segments,
                               const uint8_t* section, float* decoded);
DGC_EXPORT int dgc_two_bit_decode(const int32_t* indices, int64_t count, const int64_t* bounds, int64_t segments,
                                  const uint8_t* section, float* decoded);
