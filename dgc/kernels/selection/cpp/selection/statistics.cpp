// Sums over each segment of a buffer, in one read. The units of a segment depend only on the segment, and their sums
// are added in order. The result therefore does not depend on the number of threads or the segment's position.
#include <algorithm>
#include <limits>
#include <vector>

#include "choice.h"
#include "common/pool.h"
#include "quantize/units.h"

namespace dgc {
namespace {

void add(Sums& sum, const Sums& next) {
    sum.values += next.values;
    sum.magnitudes += next.magnitudes;
    sum.squares += next.squares;
    sum.largest = std::max(sum.largest, next.largest);
}

void add(Above& sum, const Above& next) {
    sum.count += next.count;
    sum.magnitudes += next.magnitudes;
}

// Sums of_unit(unit) over each segment.
template <class Part, class OfUnit>
std::vector<Part> sums_of(const int64_t* bounds, int64_t segments, int threads, OfUnit&& of_unit) {
    const auto units = units_of(bounds, segments);
    std::vector<Part> parts(units.size()), sums(segments);
    for_units(units, threads, [&](int64_t i) { parts[i] = of_unit(units[i]); });
    for (size_t i = 0; i < units.size(); ++i) add(sums[units[i].segment], parts[i]);
    return sums;
}

}  // namespace
}  // namespace dgc

// Shapes: bounds [segments + 1]; sums, magnitudes, squares, largest [segments].
DGC_EXPORT void dgc_moments(const float* v, const int64_t* bounds, int64_t segments, double* sums,
                            double* magnitudes, double* squares, float* largest, int threads) {
    const auto kernel = dgc::pass_kernels().moments;
    const auto found = dgc::sums_of<dgc::Sums>(
        bounds, segments, threads, [&](const dgc::Span& unit) { return kernel(v + unit.begin, unit.n); });
    for (int64_t s = 0; s < segments; ++s) {
        sums[s] = found[s].values;
        magnitudes[s] = found[s].magnitudes;
        squares[s] = found[s].squares;
        largest[s] = found[s].largest;
    }
}

// Shapes: bounds [segments + 1]; lower_bounds, counts, sums [segments]. Segments with a lower bound of inf or NaN are
// not read.
DGC_EXPORT void dgc_tail(const float* v, const int64_t* bounds, int64_t segments, const float* lower_bounds,
                         int64_t* counts, double* sums, int threads) {
    const auto kernel = dgc::pass_kernels().above;
    const auto found = dgc::sums_of<dgc::Above>(bounds, segments, threads, [&](const dgc::Span& unit) {
        const float lower_bound = lower_bounds[unit.segment];
        if (!(lower_bound < std::numeric_limits<float>::infinity())) return dgc::Above{};
        const uint32_t bits = lower_bound > 0 ? dgc::bits_of(lower_bound) : dgc::smallest_bits;
        return kernel(v + unit.begin, unit.n, bits);
    });
    for (int64_t s = 0; s < segments; ++s) {
        counts[s] = found[s].count;
        sums[s] = found[s].magnitudes;
    }
}
