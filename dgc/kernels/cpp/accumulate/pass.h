// The pass over a gradient: take out of u and v what the step before sent, update them, look for gradients that are
// NaN or too large, and collect what may be chosen.
#pragma once

#include <cstdint>

#include "common/float_bits.h"

namespace dgc {

// plain: u = m u + g, v += u.  nesterov: u = m (u + g), v = (v + u) + g.  residual: v += g.  none: v as it is.
enum Update : int { plain = 0, nesterov = 1, residual = 2, none = 3, updates = 4 };

// What a step sent and u and v still hold, in the order of the indices: v[i] is to lose the value, and where it
// `masks`, u[i] is to become zero.
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

// n elements that follow one another; `first` is the index of the first one in the bucket. `sent` begins at or behind
// `first`; the pass takes out what lies in the stretch and skips it.
struct Stretch {
    const float* g;
    float* u;
    float* v;
    int64_t n;
    int64_t first;
    float momentum;
    Sent* sent;
};

// Elements of v, in the order of their indices. Room for a vector beyond `count` is always there.
struct Candidates {
    int32_t* indices;
    float* values;
    int64_t count;
};

// Magnitudes are compared as the bits of |v|: the order is the same and denormals need no care.
constexpr uint32_t magnitude_bits = 0x7fffffffu;
constexpr uint32_t smallest_bits = 1;            // of what is not zero
constexpr uint32_t unreachable_bits = ~0u;       // above every magnitude

static inline uint32_t magnitude(float x) { return bits_of(x) & magnitude_bits; }

// Sums in fp64 over some elements: of v, of |v| and of its square, which has room in it for that of any float.
struct Sums {
    double values, magnitudes, squares;
    float largest;  // |v|
};

// Of the elements at or above a lower bound.
struct Above {
    int64_t count;
    double magnitudes;
};

struct PassKernels {
    // Both return the index of the first element of g that is NaN or too large, -1 where there is none.
    int64_t (*update[updates])(const Stretch&);
    // Also appends the elements of the new v whose magnitude has at least the bits `lower_bound` >= 1.
    int64_t (*update_and_collect[updates])(const Stretch&, uint32_t lower_bound, Candidates&);
    // Writes the elements above `threshold` and the first `ties` equal to it to `kept`, whose count is its room
    // before and what was written after. The room must be filled in the end. Returns the ties that are left.
    int64_t (*keep)(const Candidates& all, uint32_t threshold, int64_t ties, Candidates& kept);
    // Appends the bits of the magnitudes low <= bits < high. Returns how many these are.
    int64_t (*magnitudes_within)(const float* values, int64_t n, uint32_t low, uint32_t high, uint32_t* found);
    // b = m b + wd p, p -= lr (b, or wd p + m b if nesterov)
    void (*decay)(float* p, float* b, int64_t n, float lr, float weight_decay, float momentum, int nesterov);
    // Both give the same bits with all instructions and at any address. v has no NaN or inf, n is below 2**31.
    Sums (*moments)(const float* v, int64_t n);
    // Of the elements whose magnitude has at least the bits `lower_bound` >= 1.
    Above (*above)(const float* v, int64_t n, uint32_t lower_bound);
};

extern const PassKernels pass_portable;
#if defined(__x86_64__)
extern const PassKernels pass_avx2;
extern const PassKernels pass_avx512;
#endif

const PassKernels& pass_kernels();

}  // namespace dgc
