// Sums over each segment of a buffer, in one read. The units of a segment depend only on the segment, and their sums
// are added in order. The result therefore does not depend on the number of threads or the segment's position.
#include <algorithm>
#include <limits>
#include <vector>

#include "choice.h"
#include "common/pool.h"

namespace dgc {
namespace {

constexpr int64_t unit = 32768;  // elements that a thread takes at a time

struct Span {
    int64_t segment, begin, end;  // elements of the buffer
};

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

// Sums of_span(span) over each segment. The result is an empty Part if `wanted(segment)` is false.
template <class Part, class Wanted, class OfSpan>
std::vector<Part> sums_of(const int64_t* bounds, int64_t segments, int threads, Wanted&& wanted, OfSpan&& of_span) {
    std::vector<Span> spans;
    for (int64_t s = 0; s < segments; ++s)
        for (int64_t i = bounds[s]; i < bounds[s + 1] && wanted(s); i += unit)
            spans.push_back({s, i, std::min(i + unit, bounds[s + 1])});
    const int64_t count = static_cast<int64_t>(spans.size());
    std::vector<Part> parts(count), sums(segments);
    share_out(count, static_cast<int>(std::min<int64_t>(threads, count)),
              [&](int64_t i, int) { parts[i] = of_span(spans[i]); });
    for (int64_t i = 0; i < count; ++i) add(sums[spans[i].segment], parts[i]);
    return sums;
}

}  // namespace
}  // namespace dgc

// Shapes: bounds [segments + 1]; sums, magnitudes, squares, largest [segments].
DGC_EXPORT void dgc_moments(const float* v, const int64_t* bounds, int64_t segments, double* sums,
                            double* magnitudes, double* squares, float* largest, int threads) {
    const auto kernel = dgc::pass_kernels().moments;
    const auto found = dgc::sums_of<dgc::Sums>(
        bounds, segments, threads, [](int64_t) { return true; },
        [&](const dgc::Span& span) { return kernel(v + span.begin, span.end - span.begin); });
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
    const auto found = dgc::sums_of<dgc::Above>(
        bounds, segments, threads,
        [&](int64_t s) { return lower_bounds[s] < std::numeric_limits<float>::infinity(); },
        [&](const dgc::Span& span) {
            const float lower_bound = lower_bounds[span.segment];
            const uint32_t bits = lower_bound > 0 ? dgc::bits_of(lower_bound) : dgc::smallest_bits;
            return kernel(v + span.begin, span.end - span.begin, bits);
        });
    for (int64_t s = 0; s < segments; ++s) {
        counts[s] = found[s].count;
        sums[s] = found[s].magnitudes;
    }
}
