// The Rice code of ascending indices. The low parts of all gaps come first, then the high parts in unary.
#include "codec.h"

namespace dgc {
namespace {

constexpr int64_t BLOCK = 512;

uint32_t high_parts(const uint32_t* gaps, int64_t count, int b) {
    uint32_t sum = 0;  // cannot overflow: the gaps of a segment sum to less than 2**31
    for (int64_t j = 0; j < count; ++j) sum += gaps[j] >> b;
    return sum;
}

// Returns the smallest b that gives the shortest code, and adds the length of that code to `bits`. The length is
// convex in b, and the best b is at most the bit length of the mean gap.
int best_parameter(const uint32_t* gaps, int64_t count, int32_t span, int64_t* bits) {
    int b = bit_length(static_cast<uint32_t>(span / count));
    int64_t high = high_parts(gaps, count, b);
    while (b > 0) {
        int64_t more = high_parts(gaps, count, b - 1);
        if (more - high > count) break;
        high = more;
        --b;
    }
    *bits += count * (b + 1) + high;
    return b;
}

class Unary {
   public:
    Unary(const Section& section, int64_t bit) : section_(section), word_(bit >> 6), at_(bit & 63) {}

    void put(const uint32_t* gaps, int64_t count, int b) {
        uint64_t bits = bits_, at = at_;
        for (int64_t j = 0; j < count; ++j) {
            at += gaps[j] >> b;
            if (at >= 64) {
                section_.or_word(word_, bits);
                bits = 0;
                word_ += static_cast<int64_t>(at >> 6);
                at &= 63;
            }
            bits |= uint64_t{1} << at++;
        }
        bits_ = bits;
        at_ = at;
    }

    void finish() {
        if (bits_) section_.or_word(word_, bits_);
    }

   private:
    const Section& section_;
    int64_t word_;
    uint64_t at_, bits_ = 0;
};

}  // namespace
}  // namespace dgc

using namespace dgc;

// The section must be all zeros. If all `count` elements fit, writes them and returns `count`. Otherwise leaves the
// section all zeros and returns the number of elements that can be sent.
DGC_EXPORT int64_t dgc_rice_encode(const int32_t* indices, int64_t count, int64_t capacity, int parameter,
                                   uint8_t* bytes, int64_t nbytes) {
    const Section section{bytes, nbytes};
    const int64_t prefix = 8 * block_count(capacity, BLOCK);
    uint32_t gaps[BLOCK];
    int64_t total = prefix, low = prefix, fixed = prefix + count * (parameter + 1);
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        int64_t in_block = count - begin < BLOCK ? count - begin : BLOCK;
        int32_t before = begin ? indices[begin - 1] : -1;
        gaps_of(indices + begin, in_block, before, gaps);
        int32_t span = indices[begin + in_block - 1] - before - static_cast<int32_t>(in_block);
        int b = best_parameter(gaps, in_block, span, &total);
        bytes[begin / BLOCK] = static_cast<uint8_t>(b);
        low += in_block * b;
        fixed += high_parts(gaps, in_block, parameter);
    }
    if (total > 8 * nbytes) {
        std::memset(bytes, 0, static_cast<size_t>(prefix / 8));
        int64_t each = parameter > 1 ? parameter : 1;
        return count - (fixed - 8 * nbytes + each - 1) / each;
    }
    Unary unary(section, low);
    int64_t bit = prefix;
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        int64_t in_block = count - begin < BLOCK ? count - begin : BLOCK;
        gaps_of(indices + begin, in_block, begin ? indices[begin - 1] : -1, gaps);
        int b = bytes[begin / BLOCK];
        pack(gaps, in_block, b, section, bit);
        bit += in_block * b;
        unary.put(gaps, in_block, b);
    }
    unary.finish();
    return count;
}

// Decodes `count` indices. Returns 1 if the section holds `count` ascending indices below numel, else 0.
DGC_EXPORT int dgc_rice_decode(uint8_t* bytes, int64_t nbytes, int64_t count, int64_t capacity, int64_t numel,
                               int32_t* indices) {
    const Section section{bytes, nbytes};
    const int64_t blocks = block_count(capacity, BLOCK);
    if (count < 0 || count > capacity || blocks > nbytes) return 0;
    int64_t bit = 8 * blocks, unary = bit;
    for (int64_t block = 0; block < blocks; ++block) {
        if (bytes[block] > LARGEST_PARAMETER) return 0;
        int64_t in_block = count - block * BLOCK;
        if (in_block > 0) unary += (in_block < BLOCK ? in_block : BLOCK) * bytes[block];
    }
    const int64_t words = (nbytes + 7) / 8;
    int64_t word = unary >> 6, last = unary - 1, index = -1;
    if (count && word >= words) return 0;
    uint64_t bits = count ? section.word(word) & ~uint64_t{0} << (unary & 63) : 0;
    uint32_t low[BLOCK];
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        int64_t in_block = count - begin < BLOCK ? count - begin : BLOCK;
        int b = bytes[begin / BLOCK];
        if (!unpack(section, bit, b, in_block, low)) return 0;
        bit += in_block * b;
        // The j-th one follows all high parts up to its own and j ones, so its place is their sum. Only the sum of
        // the low parts is carried from one index to the next. It may wrap around: the last index is checked below.
        const uint32_t unit = uint32_t{1} << b;
        uint32_t carried = static_cast<uint32_t>(index) + unit;
        int64_t at = last;
        for (int64_t j = 0; j < in_block; ++j) {
            while (!bits) {
                if (++word >= words) return 0;
                bits = section.word(word);
            }
            at = 64 * word + __builtin_ctzll(bits);
            bits &= bits - 1;
            carried += low[j] + 1 - unit;
            indices[begin + j] = static_cast<int32_t>(carried + static_cast<uint32_t>(at - last - 1) * unit);
        }
        const int64_t high = at - last - in_block;
        if (high > numel >> b) return 0;
        index += (high << b) + in_block;
        for (int64_t j = 0; j < in_block; ++j) index += low[j];
        if (index >= numel) return 0;
        last = at;
    }
    return 1;
}
