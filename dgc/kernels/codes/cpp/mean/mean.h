// Sums over all ranks of fields of 1, 2 or 4 bits, by a table of the values that they stand for, and integers that are
// sent as levels of a byte.
#pragma once

#include <cstdint>

namespace dgc {

// Bits per field. The first field of a byte is in its highest bits (one, two) or its lowest (two_reversed, four).
enum class Fields : int { one, two, two_reversed, four };

// The value of each field, repeated to fill the table, so that higher bits of an index do not matter.
constexpr int table_size = 16;
struct alignas(64) Table {
    float values[table_size];
};

constexpr int64_t mean_group = 32;  // elements; their fields fill whole words of every code
constexpr int together = 4;  // ranks whose fields are added between a load and a store of the sums

struct MeanKernels {
    // Adds to each sum the values of its fields in `ranks` codes, in their order, for groups * mean_group elements.
    // 1 <= ranks <= together. first: the sums count as zero. They begin at a multiple of 64 bytes.
    void (*look_up)(Fields fields, const uint8_t* const* codes, const Table* tables, int ranks, int64_t groups,
                    bool first, float* sums);
    // The same for levels of 7 bits below a sign, which stand for step * level, and any number n of elements.
    void (*add_levels)(const uint8_t* const* codes, const float* steps, int ranks, int64_t n, bool first, float* sums);
    // Each sum becomes its sign: -1, 0 or 1.
    void (*signs)(float* sums, int64_t n);
    // sums = step * level - offset
    void (*widen)(const uint8_t* levels, int64_t n, float step, float offset, float* sums);
    // levels = (sum + offset) / step. step: 1 or 2
    void (*narrow)(const float* sums, int64_t n, float step, float offset, uint8_t* levels);
};

extern const MeanKernels mean_portable;
#if defined(__x86_64__)
extern const MeanKernels mean_avx2;
extern const MeanKernels mean_avx512;
#endif

const MeanKernels& mean_kernels();

}  // namespace dgc
