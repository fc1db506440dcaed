// Bit packing of fields of one width, 64 at a time. Every shift is a compile-time constant.
#include "codec.h"

namespace dgc {
namespace {

constexpr int GROUP = 64;

template <int width>
void pack_group(const uint32_t* numbers, uint8_t* to) {
    constexpr uint64_t mask = (uint64_t{1} << width) - 1;
    uint64_t word = 0;
#pragma GCC unroll 64
    for (int j = 0; j < GROUP; ++j) {
        const int bit = j * width, shift = bit % 64;
        const uint64_t field = numbers[j] & mask;
        word |= field << shift;
        if (shift + width >= 64) {
            store(to + bit / 64 * 8, word);
            word = shift + width > 64 ? field >> (64 - shift) : 0;
        }
    }
}

template <int width>
void unpack_group(const uint8_t* from, uint32_t* numbers) {
    constexpr uint64_t mask = (uint64_t{1} << width) - 1;
#pragma GCC unroll 64
    for (int j = 0; j < GROUP; ++j) {
        const int bit = j * width, shift = bit % 64;
        uint64_t field = load<uint64_t>(from + bit / 64 * 8) >> shift;
        if (shift + width > 64) field |= load<uint64_t>(from + bit / 64 * 8 + 8) << (64 - shift);
        numbers[j] = static_cast<uint32_t>(field & mask);
    }
}

template <>
void pack_group<0>(const uint32_t*, uint8_t*) {}

template <>
void unpack_group<0>(const uint8_t*, uint32_t* numbers) {
    std::memset(numbers, 0, GROUP * sizeof *numbers);
}

using Pack = void (*)(const uint32_t*, uint8_t*);
using Unpack = void (*)(const uint8_t*, uint32_t*);

template <int... widths>
struct Widths {
    static constexpr Pack pack[] = {pack_group<widths>...};
    static constexpr Unpack unpack[] = {unpack_group<widths>...};
};

using All = Widths<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26,
                   27, 28, 29, 30, 31>;

}  // namespace

void pack(const uint32_t* numbers, int64_t count, int width, const Section& section, int64_t bit) {
    int64_t j = 0;
    for (; j + GROUP <= count; j += GROUP, bit += GROUP * width) {
        All::pack[width](numbers + j, section.bytes + bit / 8);
    }
    const uint32_t mask = (uint32_t{1} << width) - 1;
    for (; j < count; ++j, bit += width) section.put(bit, numbers[j] & mask);
}

bool unpack(const Section& section, int64_t bit, int width, int64_t count, uint32_t* numbers) {
    if (bit + count * width > 8 * section.nbytes) return false;
    int64_t j = 0;
    for (; j + GROUP <= count; j += GROUP, bit += GROUP * width) {
        All::unpack[width](section.bytes + bit / 8, numbers + j);
    }
    for (; j < count; ++j, bit += width) numbers[j] = section.get(bit, width);
    return true;
}

}  // namespace dgc
