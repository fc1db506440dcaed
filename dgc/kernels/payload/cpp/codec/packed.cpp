// Gaps between ascending indices, in blocks. Each block uses the bit width of its largest gap.
#include "codec.h"

namespace dgc {
namespace {

constexpr int64_t BLOCK = 128;
// Shares of the elements to try, in units of 1/128. The reference codec uses the same values.
constexpr int64_t SHARES[] = {127, 125, 122, 117, 109, 96};

int width_of(const uint32_t* gaps, int64_t count) {
    uint32_t any = 0;
    for (int64_t j = 0; j < count; ++j) any |= gaps[j];
    return bit_length(any);
}

// Bits of the code of `kept` evenly spaced elements, without the width bytes.
int64_t thinned_bits(const int32_t* indices, int64_t count, int64_t kept) {
    int64_t bits = 0, at = 0, rest = 0;
    int32_t before = -1;
    for (int64_t begin = 0; begin < kept; begin += BLOCK) {
        int64_t in_block = kept - begin < BLOCK ? kept - begin : BLOCK;
        uint32_t any = 0;
        for (int64_t j = 0; j < in_block; ++j) {  // at = j count / kept
            any |= static_cast<uint32_t>(indices[at] - before - 1);
            before = indices[at];
            at += count / kept;
            rest += count % kept;
            if (rest >= kept) {
                rest -= kept;
                ++at;
            }
        }
        bits += in_block * bit_length(any);
    }
    return bits;
}

}  // namespace
}  // namespace dgc

using namespace dgc;

// Same contract as dgc_rice_encode. sure: the number of elements that always fit.
DGC_EXPORT int64_t dgc_packed_encode(const int32_t* indices, int64_t count, int64_t capacity, int64_t sure,
                                     uint8_t* bytes, int64_t nbytes) {
    const Section section{bytes, nbytes};
    const int64_t prefix = 8 * block_count(capacity, BLOCK), room = 8 * nbytes - prefix;
    uint32_t gaps[BLOCK];
    int64_t bit = 0;
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        int64_t in_block = count - begin < BLOCK ? count - begin : BLOCK;
        gaps_of(indices + begin, in_block, begin ? indices[begin - 1] : -1, gaps);
        int width = width_of(gaps, in_block);
        if (bit + in_block * width > room) {
            std::memset(bytes, 0, static_cast<size_t>((prefix + bit) / 8));
            for (int64_t share : SHARES) {
                int64_t kept = count * share / 128;
                if (thinned_bits(indices, count, kept) <= room) return kept;
            }
            return sure < count ? sure : count;
        }
        bytes[begin / BLOCK] = static_cast<uint8_t>(width);
        pack(gaps, in_block, width, section, prefix + bit);
        bit += in_block * width;
    }
    return count;
}

// Same contract as dgc_rice_decode.
DGC_EXPORT int dgc_packed_decode(uint8_t* bytes, int64_t nbytes, int64_t count, int64_t capacity, int64_t numel,
                                 int32_t* indices) {
    const Section section{bytes, nbytes};
    const int64_t blocks = block_count(capacity, BLOCK);
    if (count < 0 || count > capacity || blocks > nbytes) return 0;
    for (int64_t block = 0; block < blocks; ++block) {
        if (bytes[block] > LARGEST_PARAMETER) return 0;
    }
    int64_t bit = 8 * blocks, index = -1;
    uint32_t gaps[BLOCK];
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        int64_t in_block = count - begin < BLOCK ? count - begin : BLOCK;
        int width = bytes[begin / BLOCK];
        if (!unpack(section, bit, width, in_block, gaps)) return 0;
        bit += in_block * width;
        for (int64_t j = 0; j < in_block; ++j) {
            index += static_cast<int64_t>(gaps[j]) + 1;
            indices[begin + j] = static_cast<int32_t>(index);
        }
        if (index >= numel) return 0;
    }
    return 1;
}
