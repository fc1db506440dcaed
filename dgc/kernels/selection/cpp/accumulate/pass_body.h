// The pass, shared by all instruction sets. The including file defines `Lanes` first:
//
//   width; F; load, store, fill, mul, add, sub
//   without(F, lanes)                             sets these lanes to zero
//   at_least(F, lower_bound)                      one bit per lane: magnitude bits >= lower_bound
//   collect(F, lanes, first, candidates)          appends the lanes; lane j is element first + j
//   collect_from(indices, F, lanes, candidates)   appends the lanes; lane j is element indices[j]
//   raise(maxima, F)                              maxima[j] = max(maxima[j], magnitude bits of lane j)
// The collecting ones may write up to one vector past the appended elements.
// Sums use eight lanes of fp64 with every vector width:
//
//   D; zero, add, mul, abs, max, spread(D, double[8])
//   widen(p)                                 p[0] .. p[7]
//   Counts; none, count(Counts)              counts per lane, summed by count()
//   widen_at_least(p, lower_bound, counts)   the magnitudes of p[0] .. p[7] with bits >= lower_bound, 0 elsewhere
//
// The anonymous namespace keeps the linker from using this code for another instruction set.
#include <algorithm>

#include "pass.h"

namespace dgc {
namespace {

template <int update>
inline float step_one(float g, float& u, float v, float factor) {
    if (update == plain) {
        u = factor * u + g;
        return v + u;
    }
    if (update == nesterov) {
        u = factor * (u + g);
        return (v + u) + g;
    }
    return update == residual ? factor * v + g : v;
}

template <int update>
inline Lanes::F step(Lanes::F g, Lanes::F& u, Lanes::F v, Lanes::F factor) {
    if (update == plain) {
        u = Lanes::add(Lanes::mul(factor, u), g);
        return Lanes::add(v, u);
    }
    if (update == nesterov) {
        u = Lanes::mul(factor, Lanes::add(u, g));
        return Lanes::add(Lanes::add(v, u), g);
    }
    return update == residual ? Lanes::add(Lanes::mul(factor, v), g) : v;
}

// Removes the sent entries of one block of elements, starting at `from`. Returns the end of the elements that need no
// further removal: the next sent element, but at least the end of the block. The block is short enough to be in L1
// already, because the pass prefetches that far ahead.
template <bool has_u>
inline int64_t take(const Stretch& s, int64_t from) {
    constexpr int64_t block = 256;
    Sent sent = *s.sent;
    const int64_t stop = from + block < s.n ? from + block : s.n;
    for (; sent.count && *sent.indices < s.first + stop; skip(sent, 1)) {
        const int64_t i = *sent.indices - s.first;
        s.v[i] -= *sent.values;
        if (has_u && sent.masks) s.u[i] = 0.0f;
    }
    *s.sent = sent;
    const int64_t next = sent.count ? *sent.indices - s.first : s.n;
    return next < stop ? stop : next < s.n ? next : s.n;
}

// What a pass does with the updated elements: `UpdateOnly`, `Collect` those at or above a lower bound, or `Rank` them
// by the maxima of groups. Adjacent vectors belong to different groups.
struct UpdateOnly {
    void one(float, int64_t) {}
    void lanes(Lanes::F, int64_t) {}
};

struct Collect {
    uint32_t lower_bound;
    Candidates found;

    void one(float v, int64_t index) {
        if (magnitude(v) < lower_bound) return;
        found.indices[found.count] = static_cast<int32_t>(index);
        found.values[found.count++] = v;
    }
    void lanes(Lanes::F v, int64_t index) {
        if (uint32_t reached = Lanes::at_least(v, lower_bound); __builtin_expect(reached != 0, 0))
            Lanes::collect(v, reached, static_cast<int32_t>(index), found);
    }
};

struct Rank {
    uint32_t* maxima;
    int next;

    void one(float v, int64_t) { maxima[0] = std::max(maxima[0], magnitude(v)); }
    void lanes(Lanes::F v, int64_t) {
        Lanes::raise(maxima + next, v);
        next = (next + Lanes::width) % groups;
    }
};

template <int update, class Also>
inline void pass_one(const Stretch& s, int64_t i, Also& also, int64_t& unusable) {
    constexpr bool has_u = update == plain || update == nesterov;
    float g = update == none ? 0.0f : s.g[i];
    if (magnitude(g) >= too_large_bits) {
        if (unusable < 0) unusable = s.first + i;
        g = 0.0f;
    }
    float u = has_u ? s.u[i] : 0.0f;
    float v = step_one<update>(g, u, s.v[i], s.factor);
    if (has_u) s.u[i] = u;
    if (update != none) s.v[i] = v;
    also.one(v, s.first + i);
}

template <int update, class Also>
inline int64_t pass(const Stretch& s, Also& result) {
    constexpr bool has_u = update == plain || update == nesterov;
    Also also = result;  // a local copy stays in registers
    int64_t unusable = -1, i = 0, taken = update == none ? s.n : take<has_u>(s, 0);
    constexpr uintptr_t line = Lanes::width * sizeof(float) - 1;
    for (; i < s.n && (reinterpret_cast<uintptr_t>(s.v + i) & line); ++i)
        pass_one<update>(s, i, also, unusable);
    const Lanes::F factor = Lanes::fill(s.factor);
    for (;;) {
        for (; i + Lanes::width <= taken; i += Lanes::width) {
            Lanes::F g = Lanes::fill(0.0f), u = g;
            if (update != none) __builtin_prefetch(s.g + i + 512);
            if (has_u) __builtin_prefetch(s.u + i + 512);
            __builtin_prefetch(s.v + i + 512);
            if (update != none) {
                g = Lanes::load(s.g + i);
                if (uint32_t bad = Lanes::at_least(g, too_large_bits); __builtin_expect(bad != 0, 0)) {
                    if (unusable < 0) unusable = s.first + i + __builtin_ctz(bad);
                    g = Lanes::without(g, bad);
                }
            }
            if (has_u) u = Lanes::load(s.u + i);
            const Lanes::F v = step<update>(g, u, Lanes::load(s.v + i), factor);
            if (has_u) Lanes::store(s.u + i, u);
            if (update != none) Lanes::store(s.v + i, v);
            also.lanes(v, s.first + i);
        }
        if (taken == s.n) break;
        taken = take<has_u>(s, taken);
    }
    for (; i < s.n; ++i) pass_one<update>(s, i, also, unusable);
    result = also;
    return unusable;
}

template <int update>
int64_t update_only(const Stretch& s) {
    UpdateOnly nothing;
    return pass<update>(s, nothing);
}

template <int update>
int64_t update_and_collect(const Stretch& s, uint32_t lower_bound, Candidates& found) {
    Collect collect{lower_bound, found};
    const int64_t unusable = pass<update>(s, collect);
    found.count = collect.found.count;
    return unusable;
}

template <int update>
int64_t update_and_rank(const Stretch& s, uint32_t* maxima) {
    Rank rank{maxima, 0};
    return pass<update>(s, rank);
}

int64_t keep(const Candidates& all, uint32_t threshold, int64_t ties, Candidates& kept) {
    const int64_t room = kept.count;
    int64_t i = 0;
    Candidates out{kept.indices, kept.values, 0};
    // A vector store may write past the kept elements, but stays within the capacity. Later elements overwrite it.
    for (; i + Lanes::width <= all.count && out.count + Lanes::width <= room; i += Lanes::width) {
        const Lanes::F x = Lanes::load(all.values + i);
        uint32_t lanes = Lanes::at_least(x, threshold + 1);
        uint32_t equal = Lanes::at_least(x, threshold) & ~lanes;
        for (; equal && ties > 0; equal &= equal - 1, --ties) lanes |= equal & -equal;
        Lanes::collect_from(all.indices + i, x, lanes, out);
    }
    for (; i < all.count && out.count < room; ++i) {
        uint32_t bits = magnitude(all.values[i]);
        bool equal = bits == threshold && ties > 0;
        out.indices[out.count] = all.indices[i];
        out.values[out.count] = all.values[i];
        out.count += bits > threshold || equal;
        ties -= equal;
    }
    kept.count = out.count;
    return ties;
}

void collect_cached(const float* v, int64_t n, int64_t first, const float* next, uint32_t lower_bound,
                    Candidates& output) {
    constexpr int most = 512;
    Candidates found = output;
    const auto append = [&](int64_t i) {
        found.indices[found.count] = static_cast<int32_t>(first + i);
        found.values[found.count++] = v[i];
    };
    int64_t i = 0;
    while (i + Lanes::width <= n) {
        // First the vectors with such an element, without a branch, which would often be mispredicted.
        uint32_t lanes[most];
        int64_t begins[most];
        int hits = 0;
        for (int tested = 0; tested < most && i + Lanes::width <= n; ++tested, i += Lanes::width) {
            __builtin_prefetch(v + n + i, 0, 2);
            __builtin_prefetch(next + i, 0, 2);
            lanes[hits] = Lanes::at_least(Lanes::load(v + i), lower_bound);
            begins[hits] = i;
            hits += lanes[hits] != 0;
        }
        for (int h = 0; h < hits; ++h)
            for (uint32_t left = lanes[h]; left; left &= left - 1) append(begins[h] + __builtin_ctz(left));
    }
    for (; i < n; ++i)
        if (magnitude(v[i]) >= lower_bound) append(i);
    output.count = found.count;
}

// The compiler vectorizes the loops of the following functions.
int64_t count_at_least(const uint32_t* bits, int64_t n, uint32_t bound) {
    if (n % rank_lanes) __builtin_unreachable();
    int32_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += bits[i] >= bound;
    return count;
}

uint32_t smallest_at_least(const uint32_t* bits, int64_t n, uint32_t bound) {
    if (n % rank_lanes) __builtin_unreachable();
    uint32_t above = unreachable_bits;  // numbers below the bound wrap around
    for (int64_t i = 0; i < n; ++i) above = std::min(above, bits[i] - bound);
    return bound + above;
}

uint32_t bound_for(const uint32_t* bits, int64_t n, int64_t k, int64_t more) {
    if (n % rank_lanes) __builtin_unreachable();
    uint32_t low = smallest_at_least(bits, n, smallest_bits), high = 0;
    for (int64_t i = 0; i < n; ++i) high = std::max(high, bits[i]);
    int64_t count = count_at_least(bits, n, low);
    if (count < k) return 0;
    for (++high; count > k + more && high - low > 1;) {
        const uint32_t middle = low + (high - low) / 2;
        const int64_t above = count_at_least(bits, n, middle);
        if (above >= k) count = above;
        (above >= k ? low : high) = middle;
    }
    return low;
}

Cut cut(const uint32_t* bits, int64_t n, int64_t k) {
    const uint32_t threshold = smallest_at_least(bits, n, bound_for(bits, n, k, 0));
    return {threshold, k - count_at_least(bits, n, threshold + 1)};
}

int64_t magnitudes_within(const float* values, int64_t n, uint32_t low, uint32_t high, uint32_t* found) {
    int64_t i = 0, count = 0;
    for (; i + Lanes::width <= n; i += Lanes::width) {
        const Lanes::F x = Lanes::load(values + i);
        uint32_t lanes = Lanes::at_least(x, low) & ~Lanes::at_least(x, high);
        for (; lanes; lanes &= lanes - 1) found[count++] = magnitude(values[i + __builtin_ctz(lanes)]);
    }
    for (; i < n; ++i)
        if (uint32_t bits = magnitude(values[i]); bits >= low && bits < high) found[count++] = bits;
    return count;
}

void decay(float* p, float* b, int64_t n, float lr, float weight_decay, float momentum, int nesterov) {
    const Lanes::F rate = Lanes::fill(lr), wd = Lanes::fill(weight_decay), m = Lanes::fill(momentum);
    int64_t i = 0;
    for (; i + Lanes::width <= n; i += Lanes::width) {
        Lanes::F x = Lanes::load(p + i), d = Lanes::mul(x, wd);
        Lanes::F buffer = Lanes::add(Lanes::mul(Lanes::load(b + i), m), d);
        Lanes::store(b + i, buffer);
        if (nesterov) buffer = Lanes::add(d, Lanes::mul(buffer, m));
        Lanes::store(p + i, Lanes::sub(x, Lanes::mul(buffer, rate)));
    }
    for (; i < n; ++i) {
        float d = p[i] * weight_decay;
        b[i] = b[i] * momentum + d;
        p[i] -= (nesterov ? d + b[i] * momentum : b[i]) * lr;
    }
}

// Element i of a sum is added in lane i % 8, and the lanes are added in a fixed order. Every instruction set
// therefore gives the same bits.
constexpr int sum_lanes = 8;

inline double sum_of(const double* lanes) {
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// Calls take(p) for eight elements at a time. The last group is padded with zeros.
template <class Take>
inline void for_eights(const float* v, int64_t n, Take&& take) {
    constexpr int step = Lanes::width > sum_lanes ? Lanes::width : sum_lanes;
    int64_t i = 0;
    for (; i + step <= n; i += step) {
        __builtin_prefetch(v + i + 512);
        for (int k = 0; k < step; k += sum_lanes) take(v + i + k);
    }
    if (step > sum_lanes && i + sum_lanes <= n) {
        take(v + i);
        i += sum_lanes;
    }
    if (i < n) {
        float rest[sum_lanes] = {};
        for (int lane = 0; i < n; ++i, ++lane) rest[lane] = v[i];
        take(rest);
    }
}

Sums moments(const float* v, int64_t n) {
    Lanes::D values = Lanes::zero(), magnitudes = values, squares = values, largest = values;
    auto take = [&](const float* p) {
        const Lanes::D x = Lanes::widen(p), size = Lanes::abs(x);
        values = Lanes::add(values, x);
        magnitudes = Lanes::add(magnitudes, size);
        squares = Lanes::add(squares, Lanes::mul(x, x));
        largest = Lanes::max(largest, size);
    };
    for_eights(v, n, take);
    double lanes[4][sum_lanes];
    Lanes::spread(values, lanes[0]);
    Lanes::spread(magnitudes, lanes[1]);
    Lanes::spread(squares, lanes[2]);
    Lanes::spread(largest, lanes[3]);
    double most = 0.0;
    for (double x : lanes[3]) most = x > most ? x : most;
    return {sum_of(lanes[0]), sum_of(lanes[1]), sum_of(lanes[2]), static_cast<float>(most)};
}

// The sum of term(eight elements in fp64).
template <class Term>
inline double single_sum(const float* v, int64_t n, Term&& term) {
    Lanes::D sum = Lanes::zero();
    for_eights(v, n, [&](const float* p) { sum = Lanes::add(sum, term(Lanes::widen(p))); });
    double lanes[sum_lanes];
    Lanes::spread(sum, lanes);
    return sum_of(lanes);
}

double sum_of_magnitudes(const float* v, int64_t n) {
    return single_sum(v, n, [](Lanes::D x) { return Lanes::abs(x); });
}

double sum_of_squares(const float* v, int64_t n) {
    return single_sum(v, n, [](Lanes::D x) { return Lanes::mul(x, x); });
}

Above above(const float* v, int64_t n, uint32_t lower_bound) {
    Lanes::D magnitudes = Lanes::zero();
    Lanes::Counts counts = Lanes::none();
    // No branch tests whether any lane is chosen: at a few per cent of chosen elements it would be mispredicted
    // often.
    for_eights(v, n, [&](const float* p) {
        magnitudes = Lanes::add(magnitudes, Lanes::widen_at_least(p, lower_bound, counts));
    });
    double lanes[sum_lanes];
    Lanes::spread(magnitudes, lanes);
    return {Lanes::count(counts), sum_of(lanes)};
}

constexpr PassKernels table{
    {update_only<plain>, update_only<nesterov>, update_only<residual>, update_only<none>},
    {update_and_collect<plain>, update_and_collect<nesterov>, update_and_collect<residual>,
     update_and_collect<none>},
    {update_and_rank<plain>, update_and_rank<nesterov>, update_and_rank<residual>, update_and_rank<none>},
    keep,
    collect_cached,
    bound_for,
    cut,
    magnitudes_within,
    decay,
    moments,
    sum_of_magnitudes,
    sum_of_squares,
    above,
};

}  // namespace
}  // namespace dgc
