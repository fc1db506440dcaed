// The kernel of mean.h, shared by all instruction sets. Everything is in an anonymous namespace: no other file may link
// to a copy compiled for another instruction set.
#include "common/float_bits.h"
#include "mean.h"
#include "mean_lanes.h"

namespace dgc {
namespace {

// For each element of a group, the place of its field in the 32-bit word that holds it.
template <int width, bool highest_first>
struct Places {
    alignas(64) uint32_t shifts[mean_group];

    constexpr Places() : shifts() {
        for (int i = 0; i < mean_group; ++i) {
            const int in_word = i % (32 / width), in_byte = in_word % (8 / width) * width;
            shifts[i] = in_word * width / 8 * 8 + (highest_first ? 8 - width - in_byte : in_byte);
        }
    }
};

template <int width, bool highest_first, int ranks>
void look_up_as(const uint8_t* const* codes, const Table* tables, int64_t groups, bool first, float* sums) {
    static constexpr Places<width, highest_first> places;
    constexpr int64_t nbytes = mean_group * width / 8;
    const Values<width> values[together] = {Values<width>(tables[0]), Values<width>(tables[ranks > 1 ? 1 : 0]),
                                            Values<width>(tables[ranks > 2 ? 2 : 0]),
                                            Values<width>(tables[ranks > 3 ? 3 : 0])};
    for (int64_t g = 0; g < groups; ++g, sums += mean_group) {
#pragma GCC unroll 32
        for (int i = 0; i < mean_group; i += lanes) {
            Floats sum = first ? zeros() : load_floats(sums + i);
#pragma GCC unroll 4
            for (int r = 0; r < ranks; ++r)
                sum = add(sum, values[r].at(codes[r] + g * nbytes + i * width / 32 * 4, places.shifts + i));
            store(sums + i, sum);
        }
    }
}

template <int width, bool highest_first>
void look_up_in(const uint8_t* const* codes, const Table* tables, int ranks, int64_t groups, bool first,
                float* sums) {
    switch (ranks) {
        case 1: return look_up_as<width, highest_first, 1>(codes, tables, groups, first, sums);
        case 2: return look_up_as<width, highest_first, 2>(codes, tables, groups, first, sums);
        case 3: return look_up_as<width, highest_first, 3>(codes, tables, groups, first, sums);
        default: return look_up_as<width, highest_first, 4>(codes, tables, groups, first, sums);
    }
}

void look_up(Fields fields, const uint8_t* const* codes, const Table* tables, int ranks, int64_t groups, bool first,
             float* sums) {
    switch (fields) {
        case Fields::one: return look_up_in<1, true>(codes, tables, ranks, groups, first, sums);
        case Fields::two: return look_up_in<2, true>(codes, tables, ranks, groups, first, sums);
        case Fields::two_reversed: return look_up_in<2, false>(codes, tables, ranks, groups, first, sums);
        case Fields::four: return look_up_in<4, false>(codes, tables, ranks, groups, first, sums);
    }
}

template <int ranks, bool first>
void add_levels_as(const uint8_t* const* codes, const float* steps, int64_t n, float* __restrict sums) {
    const uint8_t* const rows[together] = {codes[0], codes[ranks > 1 ? 1 : 0], codes[ranks > 2 ? 2 : 0],
                                           codes[ranks > 3 ? 3 : 0]};
    const float by[together] = {steps[0], steps[ranks > 1 ? 1 : 0], steps[ranks > 2 ? 2 : 0],
                                steps[ranks > 3 ? 3 : 0]};
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
        float sum = first ? 0.0f : sums[i];
#pragma GCC unroll 4
        for (int r = 0; r < ranks; ++r) {
            const int32_t field = rows[r][i];
            const float magnitude = by[r] * static_cast<float>(field & 127);
            sum += float_of(bits_of(magnitude) | static_cast<uint32_t>(field & 128) << 24);
        }
        sums[i] = sum;
    }
}

template <bool first>
void add_levels_in(const uint8_t* const* codes, const float* steps, int ranks, int64_t n, float* sums) {
    switch (ranks) {
        case 1: return add_levels_as<1, first>(codes, steps, n, sums);
        case 2: return add_levels_as<2, first>(codes, steps, n, sums);
        case 3: return add_levels_as<3, first>(codes, steps, n, sums);
        default: return add_levels_as<4, first>(codes, steps, n, sums);
    }
}

void add_levels(const uint8_t* const* codes, const float* steps, int ranks, int64_t n, bool first, float* sums) {
    if (first) return add_levels_in<true>(codes, steps, ranks, n, sums);
    add_levels_in<false>(codes, steps, ranks, n, sums);
}

void signs(float* sums, int64_t n) {
    for (int64_t i = 0; i < n; ++i) sums[i] = static_cast<float>((sums[i] > 0.0f) - (sums[i] < 0.0f));
}

void widen(const uint8_t* levels, int64_t n, float step, float offset, float* sums) {
    for (int64_t i = 0; i < n; ++i) sums[i] = step * static_cast<float>(levels[i]) - offset;
}

void narrow(const float* sums, int64_t n, float step, float offset, uint8_t* levels) {
    const float inverse = 1.0f / step;
    for (int64_t i = 0; i < n; ++i)
        levels[i] = static_cast<uint8_t>(static_cast<int32_t>((sums[i] + offset) * inverse));
}

constexpr MeanKernels mean_table{look_up, add_levels, signs, widen, narrow};

}  // namespace
}  // namespace dgc
