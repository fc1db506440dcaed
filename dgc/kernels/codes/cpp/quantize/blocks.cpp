// Codes with a scale for each block: see blocks.py. Threads take units of a segment's blocks in turn.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "common/pool.h"
#include "quantize/units.h"

namespace dgc {
namespace {

constexpr int64_t tile = 4096;  // elements whose sum stays in the cache, whole blocks

// The blocks of a row: two bytes of scale each, then the codes of all.
struct Code {
    int64_t size, bytes, blocks;  // elements of a block, bytes of its codes, blocks of a row
    int bits;
    bool rotating;
};

// Calls visit(row, first block in it, first element, elements) for the parts of a run of n elements that lie in one row.
template <class Visit>
void by_row(const Code& code, int64_t first, int64_t begin, int64_t n, Visit&& visit) {
    for (const int64_t end = begin + n; begin < end;) {
        const int64_t row = first / code.blocks, inside = first % code.blocks;
        const int64_t m = std::min(end - begin, (code.blocks - inside) * code.size);
        visit(row, inside, begin, m);
        begin += m;
        first += (m + code.size - 1) / code.size;
    }
}

// Calls visit(segment, row, first block in it, first element, elements) as `by_row` does, for all segments.
template <class Visit>
void for_blocks(const Code& code, const Segments& segments, int threads, Visit&& visit) {
    for_units(segments, code.bits, threads, [&](int64_t s, int64_t begin, int64_t n, int64_t place) {
        by_row(code, place / code.bytes, begin, n, [&](int64_t row, int64_t inside, int64_t i, int64_t m) {
            visit(s, row, inside, i, m);
        });
    });
}

// What a bucket's elements are added from or written to: a piece for each segment, or one for all.
template <class T>
struct Pieces {
    T* const* begins;
    int count;
    const int64_t* bounds;

    T* at(int64_t segment, int64_t i) const {
        return count == 1 ? begins[0] + i : begins[segment] + (i - bounds[segment]);
    }
};

}  // namespace
}  // namespace dgc

using namespace dgc;

// A row has blocks * (2 + bytes) bytes, and begins `stride` after the one before. It is zero on entry.
DGC_EXPORT void dgc_blocks_encode(const float* v, const int64_t* bounds, const int64_t* starts, int64_t segments,
                                  int64_t size, int bits, int rotating, int64_t blocks, uint8_t* rows,
                                  int64_t stride, float* residual, int threads) {
    const auto kernel = quantize_kernels().blocks_encode;
    const Code code{size, size * bits / 8, blocks, bits, rotating != 0};
    const auto visit = [&](int64_t, int64_t row, int64_t inside, int64_t i, int64_t n) {
        uint8_t* to = rows + row * stride;
        kernel(v + i, n, size, bits, code.rotating, to + 2 * inside, to + 2 * blocks + inside * code.bytes,
               residual ? residual + i : nullptr);
    };
    for_blocks(code, {bounds, starts, segments}, threads, visit);
}

// The same after v += g. g: pieces as for `Pieces`. Returns the first element of g that is not usable, or their number.
DGC_EXPORT int64_t dgc_blocks_add_encode(const float* const* g, int pieces, float* v, const int64_t* bounds,
                                         const int64_t* starts, int64_t segments, int64_t size, int bits, int rotating,
                                         int64_t blocks, uint8_t* rows, int64_t stride, float* residual, int threads) {
    const auto kernel = quantize_kernels().blocks_add_encode;
    const Code code{size, size * bits / 8, blocks, bits, rotating != 0};
    const Pieces<const float> from{g, pieces, bounds};
    std::atomic<int64_t> first{bounds[segments]};
    const auto visit = [&](int64_t s, int64_t row, int64_t inside, int64_t i, int64_t n) {
        uint8_t* to = rows + row * stride;
        const int64_t found = kernel(from.at(s, i), v + i, n, size, bits, code.rotating, to + 2 * inside,
                                     to + 2 * blocks + inside * code.bytes, residual ? residual + i : nullptr);
        if (found == n) return;
        int64_t known = first.load(std::memory_order_relaxed);
        while (i + found < known && !first.compare_exchange_weak(known, i + found, std::memory_order_relaxed)) continue;
    };
    for_blocks(code, {bounds, starts, segments}, threads, visit);
    return first.load();
}

// total [blocks * size] += the values of the rows of all ranks, in their order.
DGC_EXPORT void dgc_blocks_add_sum(const uint8_t* const* rows, int ranks, int64_t size, int bits, int rotating,
                                   int64_t blocks, float* total, int threads) {
    const auto kernel = quantize_kernels().blocks_decode;
    const int64_t bytes = size * bits / 8;
    for_units(blocks * size, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i += tile) {
            const int64_t n = std::min(tile, end - i), first = i / size;
            for (int r = 0; r < ranks; ++r)
                kernel(rows[r] + 2 * first, rows[r] + 2 * blocks + first * bytes, n, size, bits, rotating != 0, 0.0f,
                       total + i);
        }
    });
}

// The second phase: encodes z = errors + the values of the rows of all ranks, in their order, times `real`, as one row
// of so many blocks of `second_bits`. errors is the residual of the second phase before, `residual` after it: z minus
// the encoded values. errors, real and residual may be null.
DGC_EXPORT void dgc_blocks_second_phase(const uint8_t* const* rows, int ranks, int64_t size, int bits, int rotating,
                                        int64_t blocks, const float* errors, const float* real, int second_bits,
                                        uint8_t* row, float* residual, int threads) {
    const auto decode = quantize_kernels().blocks_decode;
    const auto encode = quantize_kernels().blocks_encode;
    const int64_t bytes = size * bits / 8, second_bytes = size * second_bits / 8;
    for_units(blocks * size, threads, [&](int64_t begin, int64_t end) {
        alignas(64) float z[tile];
        for (int64_t i = begin; i < end; i += tile) {
            const int64_t n = std::min(tile, end - i), first = i / size;
            if (errors) std::memcpy(z, errors + i, n * sizeof(float));
            else std::memset(z, 0, n * sizeof(float));
            for (int r = 0; r < ranks; ++r)
                decode(rows[r] + 2 * first, rows[r] + 2 * blocks + first * bytes, n, size, bits, rotating != 0, 0.0f,
                       z);
            if (real)
                for (int64_t k = 0; k < n; ++k) z[k] *= real[i + k];
            encode(z, n, size, second_bits, rotating != 0, row + 2 * first, row + 2 * blocks + first * second_bytes,
                   residual ? residual + i : nullptr);
        }
    });
}

// Overwrites all segments with the values of consecutive rows, divided by `divisor`. out: pieces as for `Pieces`.
DGC_EXPORT void dgc_blocks_decode(const uint8_t* const* rows, const int64_t* bounds, const int64_t* starts,
                                  int64_t segments, int64_t size, int bits, int rotating, int64_t blocks,
                                  float divisor, float* const* out, int pieces, int threads) {
    const auto kernel = quantize_kernels().blocks_decode;
    const Code code{size, size * bits / 8, blocks, bits, rotating != 0};
    const Pieces<float> to{out, pieces, bounds};
    const auto visit = [&](int64_t s, int64_t row, int64_t inside, int64_t i, int64_t n) {
        const uint8_t* from = rows[row];
        kernel(from + 2 * inside, from + 2 * blocks + inside * code.bytes, n, size, bits, code.rotating, divisor,
               to.at(s, i));
    };
    for_blocks(code, {bounds, starts, segments}, threads, visit);
}
