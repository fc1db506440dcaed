// Numbers of 16 bits per element: gradients rounded in one read, and the rows of halves.py.
#include "halves.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "common/isa.h"
#include "common/pool.h"
#include "quantize/units.h"

namespace dgc {

const HalvesKernels& halves_kernels() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return halves_avx512;
    if (isa() == Isa::avx2) return halves_avx2;
#endif
    return halves_portable;
}

namespace {

constexpr int64_t tile = 4096;  // elements whose sum stays in the cache

// Random numbers of the elements from `first` on.
Random random_from(int64_t first, int enabled, uint32_t key, uint32_t inner_key) {
    return {static_cast<uint32_t>(first), key, inner_key, enabled != 0};
}

// Calls visit(row, number in it, first element, elements) for the parts of units of n elements that lie in one row.
template <class Visit>
void for_rows(int64_t n, int64_t each, int threads, Visit&& visit) {
    for_units(n, threads, [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t row = begin / each, inside = begin % each, m = std::min(end - begin, each - inside);
            visit(row, inside, begin, m);
            begin += m;
        }
    });
}

// Calls visit(piece, place in it, first element, elements) for the pieces of the elements [begin, end).
template <class Visit>
void by_piece(const int64_t* begins, int count, int64_t begin, int64_t end, Visit&& visit) {
    int64_t piece = std::upper_bound(begins, begins + count, begin) - begins - 1;
    for (; begin < end; ++piece) {
        const int64_t stop = std::min(end, begins[piece + 1]);
        if (stop > begin) visit(piece, begin - begins[piece], begin, stop - begin);
        begin = stop;
    }
}

}  // namespace
}  // namespace dgc

// pieces, begins [count + 1]: the gradient, of n elements. bf16: the type of `to`, else fp16. Returns whether all
// elements are finite.
DGC_EXPORT int dgc_round(const float* const* pieces, const int64_t* begins, int count, int bf16, uint8_t* to, int64_t n,
                         int threads) {
    const dgc::HalvesKernels& kernels = dgc::halves_kernels();
    const auto kernel = bf16 ? kernels.to_bf16 : kernels.to_fp16;
    std::atomic<bool> finite{true};
    dgc::for_units(n, threads, [&](int64_t begin, int64_t end) {
        int64_t piece = std::upper_bound(begins, begins + count, begin) - begins - 1;
        for (int64_t i = begin; i < end; ++piece) {
            const int64_t stop = std::min(end, begins[piece + 1]);
            if (!kernel(pieces[piece] + (i - begins[piece]), stop - i, to + 2 * i)) finite = false;
            i = stop;
        }
    });
    return finite;
}

// Rows of `each` numbers, which begin `stride` bytes after one another.
DGC_EXPORT void dgc_halves_encode(const float* v, int64_t n, int64_t each, uint8_t* rows, int64_t stride, int random,
                                  uint32_t key, uint32_t inner_key, float* residual, int threads) {
    const auto kernel = dgc::halves_kernels().encode_bf16;
    dgc::for_rows(n, each, threads, [&](int64_t row, int64_t inside, int64_t i, int64_t m) {
        kernel(v + i, m, dgc::random_from(i, random, key, inner_key), rows + row * stride + 2 * inside,
               residual ? residual + i : nullptr);
    });
}

// The same after v += g, or of g alone if v is null. pieces, begins [count + 1]: g. Returns the first element of g that
// is not usable, or n.
DGC_EXPORT int64_t dgc_halves_add_encode(const float* const* pieces, const int64_t* begins, int count, float* v,
                                         int64_t n, int64_t each, uint8_t* rows, int64_t stride, int random,
                                         uint32_t key, uint32_t inner_key, float* residual, int threads) {
    const auto kernel = dgc::halves_kernels().add_encode_bf16;
    std::atomic<int64_t> first{n};
    dgc::for_rows(n, each, threads, [&](int64_t row, int64_t inside, int64_t i, int64_t m) {
        uint8_t* to = rows + row * stride + 2 * inside;
        dgc::by_piece(begins, count, i, i + m, [&](int64_t piece, int64_t place, int64_t k, int64_t length) {
            const int64_t found = kernel(pieces[piece] + place, v ? v + k : nullptr, length,
                                         dgc::random_from(k, random, key, inner_key), to + 2 * (k - i),
                                         residual ? residual + k : nullptr);
            if (found == length) return;
            int64_t known = first.load();
            while (k + found < known && !first.compare_exchange_weak(known, k + found)) continue;
        });
    });
    return first.load();
}

// total [n] += the rows of all ranks, in their order.
DGC_EXPORT void dgc_halves_add_sum(const uint8_t* const* rows, int ranks, int64_t n, float* total, int threads) {
    const auto add = dgc::halves_kernels().add_bf16;
    dgc::for_units(n, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i += dgc::tile)
            for (int r = 0; r < ranks; ++r) add(rows[r] + 2 * i, std::min(dgc::tile, end - i), total + i);
    });
}

// The second phase: encodes errors + the rows of all ranks, in their order. errors and residual may be null.
DGC_EXPORT void dgc_halves_second_phase(const uint8_t* const* rows, int ranks, int64_t n, const float* errors,
                                        uint8_t* row, int random, uint32_t key, uint32_t inner_key, float* residual,
                                        int threads) {
    const dgc::HalvesKernels& kernels = dgc::halves_kernels();
    dgc::for_units(n, threads, [&](int64_t begin, int64_t end) {
        alignas(64) float z[dgc::tile];
        for (int64_t i = begin; i < end; i += dgc::tile) {
            const int64_t m = std::min(dgc::tile, end - i);
            if (errors) std::memcpy(z, errors + i, m * sizeof(float));
            else std::memset(z, 0, m * sizeof(float));
            for (int r = 0; r < ranks; ++r) kernels.add_bf16(rows[r] + 2 * i, m, z);
            kernels.encode_bf16(z, m, dgc::random_from(i, random, key, inner_key), row + 2 * i,
                                residual ? residual + i : nullptr);
        }
    });
}

// Overwrites n elements with consecutive rows, divided by `divisor`. pieces, begins [count + 1]: where they are.
DGC_EXPORT void dgc_halves_decode(const uint8_t* const* rows, int64_t each, int64_t n, float divisor,
                                  float* const* pieces, const int64_t* begins, int count, int threads) {
    const auto kernel = dgc::halves_kernels().decode_bf16;
    dgc::for_rows(n, each, threads, [&](int64_t row, int64_t inside, int64_t i, int64_t m) {
        const uint8_t* halves = rows[row] + 2 * inside;
        dgc::by_piece(begins, count, i, i + m, [&](int64_t piece, int64_t place, int64_t k, int64_t length) {
            kernel(halves + 2 * (k - i), length, divisor, pieces[piece] + place);
        });
    });
}
