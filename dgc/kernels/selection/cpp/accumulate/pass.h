// The pass over a gradient: remove from u and v what the previous step sent, update them, detect gradients that are
// NaN or too large, and collect the candidates for selection.
#pragma once

#include <cstdint>

#include "common/float_bits.h"

namespace dgc {

// With a factor m: plain: u = m u + g, v += u.  nesterov: u = m (u + g), v = (v + u) + g.  residual: v = m v + g.
// none: v is unchanged.
enum Update : int { plain = 0, nesterov = 1, residual = 2, none = 3, updates = 4 };

// Elements that the previous step sent and that u and v still contain, in ascending order of index. The pass
// subtracts `values` from v. If `masks` is true, it also sets u to zero at these indices.
struct Sent {
    const int32_t* indices;
    const float* values;
    int64_t count;
    bool masks;
};

static inline void skip(Sent& sent, int64_t entries) {
    sent.indices += entries;
    sent.values += entries;
    sent.count -= entries;
}

// n consecutive elements of the bucket, starting at index `first`. The entries of `sent` start at or after `first`;
// the pass removes those in the stretch from the state and advances `sent` past them.
struct Stretch {
    const float* g;
    float* u;
    float* v;
    int64_t n;
    int64_t first;
    float factor;
    Sent* sent;
};

// Elements of v in ascending order of index. The buffers always have space for one more vector after `count`.
struct Candidates {
    int32_t* indices;
    float* values;
    int64_t count;
};

// Magnitudes are compared as the bits of |v|. The order is the same, and denormals need no special case.
constexpr uint32_t magnitude_bits = 0x7fffffffu;
constexpr uint32_t smallest_bits = 1;       // the smallest nonzero magnitude
constexpr uint32_t unreachable_bits = ~0u;  // above every magnitude

constexpr int groups = 256;  // of update_and_rank
constexpr int rank_lanes = 16;

static inline uint32_t magnitude(float x) { return bits_of(x) & magnitude_bits; }

// fp64 sums of v, |v| and v^2 over some elements. fp64 holds the square of any float without overflow.
struct Sums {
    double values, magnitudes, squares;
    float largest;  // largest |v|
};

// Count and sum of the magnitudes at or above a lower bound.
struct Above {
    int64_t count;
    double magnitudes;
};

// The k largest are the elements above `threshold` and the first `ties` elements equal to it, in order of index.
struct Cut {
    uint32_t threshold;
    int64_t ties;
};

struct PassKernels {
    // Both return the index of the first element of g that is NaN or too large, or -1.
    int64_t (*update[updates])(const Stretch&);
    // Also appends the elements of the updated v with magnitude bits >= `lower_bound`, where `lower_bound` >= 1.
    int64_t (*update_and_collect[updates])(const Stretch&, uint32_t lower_bound, Candidates&);
    // Also divides the elements evenly into groups, and raises maxima [groups] to the largest magnitude bits of the
    // updated v in each. At least k elements reach what the maxima of k groups reach.
    int64_t (*update_and_rank[updates])(const Stretch&, uint32_t* maxima);
    // Copies to `kept` the elements above `threshold` and the first `ties` elements equal to it. On entry
    // `kept.count` is the capacity of `kept`, on return the number of elements written. Successive calls must fill
    // the capacity. Returns the number of ties that remain.
    int64_t (*keep)(const Candidates& all, uint32_t threshold, int64_t ties, Candidates& kept);
    // Appends the elements of v with magnitude bits >= `lower_bound`, where `lower_bound` >= 1. It is for v in the
    // cache, of which many elements reach it. The index of v[0] is `first`. Meanwhile the n elements behind v are
    // prefetched, and n from `next` on.
    void (*collect_cached)(const float* v, int64_t n, int64_t first, const float* next, uint32_t lower_bound,
                           Candidates&);
    // A number that at least k of `bits` reach: one that at most k + more reach, or else the largest. Here and in
    // `cut`, n is a multiple of `rank_lanes`; zeros may fill it up.
    uint32_t (*bound_for)(const uint32_t* bits, int64_t n, int64_t k, int64_t more);
    // The cut for the k largest of `bits`.
    Cut (*cut)(const uint32_t* bits, int64_t n, int64_t k);
    // Writes the magnitude bits with low <= bits < high to `found`. Returns their number.
    int64_t (*magnitudes_within)(const float* values, int64_t n, uint32_t low, uint32_t high, uint32_t* found);
    // b = m b + wd p, p -= lr (b, or wd p + m b if nesterov)
    void (*decay)(float* p, float* b, int64_t n, float lr, float weight_decay, float momentum, int nesterov);
    // These sums give the same bits with every instruction set and at any address. v must be finite and
    // n below 2**31.
    Sums (*moments)(const float* v, int64_t n);
    // Single sums of it.
    double (*sum_of_magnitudes)(const float* v, int64_t n);
    double (*sum_of_squares)(const float* v, int64_t n);
    // Covers the elements with magnitude bits >= `lower_bound`, where `lower_bound` >= 1.
    Above (*above)(const float* v, int64_t n, uint32_t lower_bound);
};

extern const PassKernels pass_portable;
#if defined(__x86_64__)
extern const PassKernels pass_avx2;
extern const PassKernels pass_avx512;
#endif

const PassKernels& pass_kernels();

}  // namespace dgc
