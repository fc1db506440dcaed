// Gradients rounded to 16 bits per element, in one read.
#include "halves.h"

#include <algorithm>
#include <atomic>

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
