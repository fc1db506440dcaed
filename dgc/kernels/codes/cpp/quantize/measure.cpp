// The beginning of a step with a code for every element: the gradient is added or copied, and the number that the codes
// of each segment need is found while its elements are in the cache.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "common/float_bits.h"
#include "quantize/units.h"

namespace dgc {
namespace {

enum What : int { nothing = 0, largest_magnitude = 1, magnitudes = 2, squares = 3 };

void keep_smallest(std::atomic<int64_t>& smallest, int64_t value) {
    int64_t known = smallest.load(std::memory_order_relaxed);
    while (value < known && !smallest.compare_exchange_weak(known, value, std::memory_order_relaxed)) continue;
}

// v[begin .. end - 1] = g, with zeros for elements that are not usable.
void assign(const Source& source, int64_t begin, int64_t end, std::atomic<int64_t>& first) {
    for_stretches(source, begin, end, end - begin, [](const Stretch& s) {
        if (s.g != s.v) std::memcpy(s.v, s.g, static_cast<size_t>(s.n) * sizeof(float));
    });
    if (static_cast<uint32_t>(quantize_kernels().largest(source.v + begin, end - begin)) < too_large_bits) return;
    for (int64_t i = end; i-- > begin;) {
        if ((bits_of(source.v[i]) & 0x7FFFFFFF) < too_large_bits) continue;
        source.v[i] = 0.0f;
        keep_smallest(first, i);
    }
}

}  // namespace
}  // namespace dgc

using namespace dgc;

// v = v + g if `adds`, else v = g, with zeros for elements of g that are not usable. pieces, begins: as for Source.
// found: of each segment the largest |v|, or the sum of |v| or v^2 with the bits of dgc_moments, as `what` says. Returns
// the first element that is not usable, or bounds[segments].
DGC_EXPORT int64_t dgc_measure(const float* const* pieces, const int64_t* begins, int count, float* v, int adds,
                               const int64_t* bounds, int64_t segments, int what, double* found, int threads) {
    const Source source{residual, pieces, begins, count, nullptr, v, 1.0f, {}};
    const PassKernels& pass = pass_kernels();
    const auto largest = quantize_kernels().largest;
    const auto number_of = [&](const float* from, int64_t n) -> double {
        if (what == magnitudes) return pass.sum_of_magnitudes(from, n);
        if (what == squares) return pass.sum_of_squares(from, n);
        return what == nothing ? 0.0 : static_cast<double>(float_of(static_cast<uint32_t>(largest(from, n))));
    };
    const auto units = units_of(bounds, segments);
    std::vector<double> numbers(units.size());
    std::atomic<int64_t> first{bounds[segments]};
    for_shares(units, threads, [&](int64_t some, int64_t last) {
        const int64_t begin = units[some].begin, end = units[last - 1].begin + units[last - 1].n;
        if (adds) {
            for_stretches(source, begin, end, end - begin, [&](const Stretch& stretch) {
                if (const int64_t bad = pass.update[residual](stretch); bad >= 0) keep_smallest(first, bad);
            });
        } else {
            assign(source, begin, end, first);
        }
        for (int64_t i = some; i < last; ++i) numbers[i] = number_of(v + units[i].begin, units[i].n);
    });
    std::fill_n(found, segments, 0.0);
    for (size_t i = 0; i < units.size(); ++i) {
        double& of_segment = found[units[i].segment];
        of_segment = what == largest_magnitude ? std::max(of_segment, numbers[i]) : of_segment + numbers[i];
    }
    return first.load();
}
