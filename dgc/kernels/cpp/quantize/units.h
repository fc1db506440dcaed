// The units of work of codes of a few bits per element: consecutive elements of one segment. Threads take them in
// turn.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "quantize/quantize.h"
#include "selection/choice.h"

namespace dgc {

constexpr int64_t unit = 32768;  // elements
static_assert(unit % quantize_grain == 0, "the codes of a unit begin at a byte");

// Calls visit(begin, end) for each unit of n elements.
template <class Visit>
static void for_units(int64_t n, int threads, Visit&& visit) {
    const int64_t count = (n + unit - 1) / unit;
    share_out(count, static_cast<int>(std::min<int64_t>(threads, count)),
              [&](int64_t i, int) { visit(i * unit, std::min(n, (i + 1) * unit)); });
}

// The segments of a buffer, and the byte offset of the codes of each segment.
struct Segments {
    const int64_t* bounds;
    const int64_t* starts;
    int64_t count;
};

// Calls visit(segment, begin, n) for each unit of all segments. A thread takes many short segments at a time.
template <class Visit>
static void for_units(const int64_t* bounds, int64_t segments, int threads, Visit&& visit) {
    struct Unit {
        int64_t segment, begin, n;
    };
    std::vector<Unit> units;
    std::vector<int64_t> shares;  // the first unit of each share of the work
    int64_t taken = unit;
    for (int64_t s = 0; s < segments; ++s)
        for (int64_t i = bounds[s]; i < bounds[s + 1]; i += unit) {
            const int64_t n = std::min(unit, bounds[s + 1] - i);
            if (taken + n > unit) {
                shares.push_back(static_cast<int64_t>(units.size()));
                taken = 0;
            }
            taken += n;
            units.push_back({s, i, n});
        }
    const int64_t count = static_cast<int64_t>(shares.size());
    shares.push_back(static_cast<int64_t>(units.size()));
    share_out(count, static_cast<int>(std::min<int64_t>(threads, count)), [&](int64_t share, int) {
        for (int64_t u = shares[share]; u < shares[share + 1]; ++u) visit(units[u].segment, units[u].begin, units[u].n);
    });
}

// Calls visit(segment, begin, n, byte offset of the codes) for each unit of all segments, with codes of `width` bits.
template <class Visit>
static void for_units(const Segments& segments, int width, int threads, Visit&& visit) {
    for_units(segments.bounds, segments.count, threads, [&](int64_t s, int64_t begin, int64_t n) {
        visit(s, begin, n, segments.starts[s] + (begin - segments.bounds[s]) * width / 8);
    });
}

// The exponent E, stored in the first word of a natural code.
static inline int32_t top_in(const uint8_t* codes) {
    int32_t top;
    std::memcpy(&top, codes, sizeof top);
    return std::min(127, std::max(0, top));
}

}  // namespace dgc
