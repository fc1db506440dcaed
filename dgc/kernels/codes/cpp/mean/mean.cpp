// The mean of the codes of all ranks, in one pass: the sums of a block of elements stay in the nearest cache, and each
// element of the mean is written once. Each element is added in the order of ranks, beginning at zero.
#include "mean.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "common/float_bits.h"
#include "common/isa.h"
#include "decode/decode.h"
#include "halves/halves.h"
#include "quantize/units.h"

namespace dgc {

const MeanKernels& mean_kernels() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return mean_avx512;
    if (isa() == Isa::avx2) return mean_avx2;
#endif
    return mean_portable;
}

namespace {

constexpr int64_t tile = 2048;  // elements
constexpr int64_t most_bytes = mean_group / 2;  // of a group of elements
static_assert(tile % mean_group == 0 && unit % tile == 0, "a tile begins at a group");

// The codes of all ranks, and what their sums become: sum * factor / size. factors: by segment, or null for 1.
struct Mean {
    const uint8_t* const* codes;
    int ranks;
    const float* factors;
    float size;
    float* mean;
    bool streaming;
    bool majority = false;  // the signs of the sums in place of their mean
    mutable std::atomic<bool> finite{true};  // all of the mean

    Mean(const uint8_t* const* codes, int ranks, const float* factors, float size, float* mean, bool streaming)
        : codes(codes), ranks(ranks), factors(factors), size(size), mean(mean), streaming(streaming) {}

    float factor(int64_t segment) const { return factors ? factors[segment] : 1.0f; }
};

// Writes the mean of n elements from `begin` on. sum(i, m, sums): writes the sums of m elements from the i-th on.
template <class Sum>
void mean_of_unit(const Mean& of, int64_t segment, int64_t begin, int64_t n, Sum&& sum) {
    const auto divide = decode_kernels().divide;
    const bool streaming = of.streaming && n >= tile;  // the end of a stream waits for memory, too long for few elements
    alignas(64) float sums[tile];
    for (int64_t i = 0; i < n; i += tile) {
        const int64_t m = std::min(tile, n - i);
        sum(i, m, sums);
        if (of.majority) mean_kernels().signs(sums, m);
        if (!divide(sums, m, of.factor(segment), of.majority ? 1.0f : of.size, streaming, of.mean + begin + i))
            of.finite = false;
    }
}

struct Codes {
    Fields fields;
    int width;
    int64_t word;  // bytes: a segment's codes are a multiple of it
};

// The sums of m elements, whose codes begin at `place` of each rank's.
void add_up(const Codes& code, const Mean& of, const Table* tables, int64_t place, int64_t m, float* sums) {
    const auto look_up = mean_kernels().look_up;
    const int64_t groups = m / mean_group, rest = m % mean_group, end = place + groups * mean_group * code.width / 8;
    const int64_t nbytes = (rest * code.width + 8 * code.word - 1) / (8 * code.word) * code.word;
    for (int r = 0; r < of.ranks; r += together) {
        const int count = std::min(together, of.ranks - r);
        const uint8_t* starts[together];
        uint8_t last[together][most_bytes] = {};  // reads of a whole group would pass the end of the codes
        for (int k = 0; k < count; ++k) starts[k] = of.codes[r + k] + place;
        if (groups) look_up(code.fields, starts, tables + r, count, groups, r == 0, sums);
        if (!rest) continue;
        for (int k = 0; k < count; ++k) {
            std::memcpy(last[k], of.codes[r + k] + end, nbytes);
            starts[k] = last[k];
        }
        look_up(code.fields, starts, tables + r, count, 1, r == 0, sums + groups * mean_group);
    }
}

// The table of each rank. value(rank, field): what a field stands for. The next call in this thread overwrites them: new
// memory for each of many short segments would take longer than their sums.
template <class Value>
const Table* tables_of(int width, int ranks, Value&& value) {
    static thread_local std::vector<Table> tables;
    tables.resize(ranks);
    const int fields = 1 << width;
    for (int r = 0; r < ranks; ++r) {
        for (int f = 0; f < fields; ++f) tables[r].values[f] = value(r, static_cast<uint32_t>(f));
        for (int f = fields; f < table_size; ++f) tables[r].values[f] = tables[r].values[f - fields];
    }
    return tables.data();
}

// Writes the mean of fields of 1, 2 or 4 bits. value(rank, segment, field): what a field stands for.
template <class Value>
void mean_of_fields(const Codes& code, const Mean& of, const Segments& segments, int threads, Value&& value) {
    for_units(segments, code.width, threads, [&](int64_t s, int64_t begin, int64_t n, int64_t place) {
        const auto tables = tables_of(code.width, of.ranks, [&](int r, uint32_t field) { return value(r, s, field); });
        mean_of_unit(of, s, begin, n, [&](int64_t i, int64_t m, float* sums) {
            add_up(code, of, tables, place + i * code.width / 8, m, sums);
        });
    });
}

// The sums of fields of the values -1, 0 and 1 (two bits), or -1 and 1 (one bit), as levels of a byte.
float step_of(int width) { return width == 1 ? 2.0f : 1.0f; }

float unit_value(int width, uint32_t field) {
    if (width == 1) return field ? 1.0f : -1.0f;
    return field < 2 ? 0.0f : field == 3 ? 1.0f : -1.0f;
}

}  // namespace
}  // namespace dgc

using namespace dgc;

// In all functions: codes has one address per rank; bounds, starts and factors as in quantize.cpp and Mean; all other
// per-segment arrays have one address per rank. mean: sum * factor / size of every element. All but the
// last return whether it is finite. majority: the sign of the sum in place of the mean.
DGC_EXPORT int dgc_mean_signs(const uint8_t* const* codes, int ranks, const int64_t* bounds, const int64_t* starts,
                              int64_t segments, const float* const* scales, const float* factors, float size,
                              int majority, float* mean, int threads) {
    Mean of{codes, ranks, factors, size, mean, bounds[segments] >= large};
    of.majority = majority != 0;
    mean_of_fields({Fields::one, 1, 4}, of, {bounds, starts, segments}, threads,
                   [=](int r, int64_t s, uint32_t field) { return field ? scales[r][s] : -scales[r][s]; });
    return of.finite;
}

// A threshold that sends nothing is zero.
DGC_EXPORT int dgc_mean_ternary(const uint8_t* const* codes, int ranks, const int64_t* bounds,
                                const int64_t* starts, int64_t segments, const float* const* thresholds,
                                const float* factors, float size, float* mean, int threads) {
    const Mean of{codes, ranks, factors, size, mean, bounds[segments] >= large};
    mean_of_fields({Fields::two, 2, 4}, of, {bounds, starts, segments}, threads,
                   [=](int r, int64_t s, uint32_t field) {
                       if (field < 2) return 0.0f;
                       return field == 3 ? thresholds[r][s] : -thresholds[r][s];
                   });
    return of.finite;
}

// `levels` of 2, 4 or 8 bits with the sign
DGC_EXPORT int dgc_mean_levels(const uint8_t* const* codes, int ranks, const int64_t* bounds, const int64_t* starts,
                               int64_t segments, const float* const* steps, int bits, float size, float* mean,
                               int threads) {
    const Mean of{codes, ranks, nullptr, size, mean, bounds[segments] >= large};
    if (bits == 8) {
        const auto add_levels = mean_kernels().add_levels;
        for_units({bounds, starts, segments}, bits, threads, [&](int64_t s, int64_t begin, int64_t n, int64_t place) {
            mean_of_unit(of, s, begin, n, [&](int64_t i, int64_t m, float* sums) {
                for (int r = 0; r < ranks; r += together) {
                    const int some = std::min(together, ranks - r);
                    const uint8_t* starts_of[together];
                    float steps_of[together];
                    for (int k = 0; k < some; ++k) starts_of[k] = codes[r + k] + place + i, steps_of[k] = steps[r + k][s];
                    add_levels(starts_of, steps_of, some, m, r == 0, sums);
                }
            });
        });
        return of.finite;
    }
    const Fields fields = bits == 2 ? Fields::two_reversed : Fields::four;
    mean_of_fields({fields, bits, 1}, of, {bounds, starts, segments}, threads,
                   [=](int r, int64_t s, uint32_t field) {
                       const uint32_t level = field & ((1u << (bits - 1)) - 1), negative = field >> (bits - 1);
                       return float_of(bits_of(steps[r][s] * static_cast<float>(level)) | negative << 31);
                   });
    return of.finite;
}

// codes: 2 n bytes of each rank
DGC_EXPORT void dgc_mean_bf16(const uint8_t* const* codes, int ranks, int64_t n, float size, float* mean, int threads) {
    const auto kernel = halves_kernels().add_bf16;
    const Mean of{codes, ranks, nullptr, size, mean, n >= large};
    for_units(n, threads, [&](int64_t begin, int64_t end) {
        mean_of_unit(of, 0, begin, end - begin, [&](int64_t i, int64_t m, float* sums) {
            if (i == 0) std::fill_n(sums, m, 0.0f);
            for (int r = 0; r < ranks; ++r) kernel(codes[r] + 2 * (begin + i), m, sums);
        });
    });
}

// The sums of `fields` sign (width 1) or ternary (width 2) fields of all ranks, a multiple of 16. Their levels, of `bits`
// bits each, become one stream.
DGC_EXPORT void dgc_pack_sums(const uint8_t* const* codes, int ranks, int64_t fields, int width, int bits,
                              uint8_t* packed, int threads) {
    const auto pack = quantize_kernels().pack;
    const auto narrow = mean_kernels().narrow;
    const Mean of{codes, ranks, nullptr, 1.0f, nullptr, false};
    const Codes code{width == 1 ? Fields::one : Fields::two, width, 4};
    const auto tables = tables_of(width, ranks, [=](int, uint32_t field) { return unit_value(width, field); });
    for_units(fields, threads, [&](int64_t begin, int64_t end) {
        alignas(64) float sums[tile];
        uint8_t levels[tile];
        for (int64_t i = begin; i < end; i += tile) {
            const int64_t m = std::min(tile, end - i);
            add_up(code, of, tables, i * width / 8, m, sums);
            narrow(sums, m, step_of(width), static_cast<float>(ranks), levels);
            pack(levels, m, bits, packed + i / 8 * bits);
        }
    });
}

// packed: for each of `ranks` equal shares of all fields, what dgc_pack_sums made of them. fields: of a share.
DGC_EXPORT void dgc_mean_sums(const uint8_t* const* packed, int ranks, int64_t fields, int bits,
                              const int64_t* bounds, const int64_t* starts, int64_t segments, int width,
                              const float* factors, float* mean, int threads) {
    const auto unpack = quantize_kernels().unpack;
    const auto widen = mean_kernels().widen;
    const float size = static_cast<float>(ranks);
    const Mean of{packed, ranks, factors, size, mean, bounds[segments] >= large};
    for_units({bounds, starts, segments}, width, threads, [&](int64_t s, int64_t begin, int64_t n, int64_t place) {
        const int64_t first = place * 8 / width;
        mean_of_unit(of, s, begin, n, [&](int64_t i, int64_t m, float* sums) {
            uint8_t levels[tile];
            for (int64_t done = 0, part; done < m; done += part) {
                const int64_t share = (first + i + done) / fields, at = (first + i + done) % fields;
                part = std::min(m - done, fields - at);
                unpack(packed[share] + at / 8 * bits, part, bits, levels + done);
            }
            widen(levels, m, step_of(width), size, sums);
        });
    });
}
