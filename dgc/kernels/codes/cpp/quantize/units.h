// The units of work of sums over segments and of codes of a few bits per element: consecutive elements of one segment.
// Threads take them in turn.
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

struct Span {  // a unit
    int64_t segment, begin, n;
};

// The units of all segments.
static inline std::vector<Span> units_of(const int64_t* bounds, int64_t segments) {
    std::vector<Span> units;
    for (int64_t s = 0; s < segments; ++s)
        for (int64_t i = bounds[s]; i < bounds[s + 1]; i += unit)
            units.push_back({s, i, std::min(unit, bounds[s + 1] - i)});
    return units;
}

// Calls visit(begin, end) for shares of the units, consecutive ones of about as many elements as a long unit has.
template <class Visit>
static void for_shares(const std::vector<Span>& units, int threads, Visit&& visit) {
    const int64_t count = static_cast<int64_t>(units.size());
    std::vector<int64_t> shares;  // the first unit of each
    for (int64_t i = 0, taken = unit; i < count; ++i) {
        if (taken + units[i].n > unit) {
            shares.push_back(i);
            taken = 0;
        }
        taken += units[i].n;
    }
    const int64_t parts = static_cast<int64_t>(shares.size());
    shares.push_back(count);
    share_out(parts, static_cast<int>(std::min<int64_t>(threads, parts)),
              [&](int64_t part, int) { visit(shares[part], shares[part + 1]); });
}

// Calls visit(i) for each of the units. A thread takes many short ones at a time.
template <class Visit>
static void for_units(const std::vector<Span>& units, int threads, Visit&& visit) {
    for_shares(units, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) visit(i);
    });
}

// Calls visit(segment, begin, n) for each unit of all segments.
template <class Visit>
static void for_units(const int64_t* bounds, int64_t segments, int threads, Visit&& visit) {
    const auto units = units_of(bounds, segments);
    for_units(units, threads, [&](int64_t i) { visit(units[i].segment, units[i].begin, units[i].n); });
}

// Calls visit(segment, begin, n, byte offset of the codes) for each unit of all segments, with codes of `width` bits.
template <class Visit>
static void for_units(const Segments& segments, int width, int threads, Visit&& visit) {
    for_units(segments.bounds, segments.count, threads, [&](int64_t s, int64_t begin, int64_t n) {
        visit(s, begin, n, segments.starts[s] + (begin - segments.bounds[s]) * width / 8);
    });
}

}  // namespace dgc
