// The pass in plain C++. The compiler may vectorize it for the baseline instruction set.
#include "common/isa.h"
#include "pass.h"

namespace dgc {
namespace {

// One lane. Vectorizing loops without branches is left to the compiler.
struct Lanes {
    static constexpr int width = 1;
    using F = float;

    static F load(const float* p) { return *p; }
    static void store(float* p, F x) { *p = x; }
    static F fill(float x) { return x; }
    static F mul(F a, F b) { return a * b; }
    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F without(F, uint32_t) { return 0.0f; }
    static uint32_t at_least(F x, uint32_t lower_bound) { return magnitude(x) >= lower_bound; }
    static void collect(F x, uint32_t, int32_t first, Candidates& found) {
        found.indices[found.count] = first;
        found.values[found.count++] = x;
    }
    static void collect_from(const int32_t* indices, F x, uint32_t lanes, Candidates& found) {
        found.indices[found.count] = *indices;
        found.values[found.count] = x;
        found.count += lanes;
    }
    static void raise(uint32_t* maxima, F x) { *maxima = magnitude(x) > *maxima ? magnitude(x) : *maxima; }

    struct D {
        double x[8];
    };
    using Counts = int64_t;

    template <class Make>
    static D each(Make make) {
        D d;
        for (int lane = 0; lane < 8; ++lane) d.x[lane] = make(lane);
        return d;
    }
    static D zero() { return D{}; }
    static D add(const D& a, const D& b) { return each([&](int i) { return a.x[i] + b.x[i]; }); }
    static D mul(const D& a, const D& b) { return each([&](int i) { return a.x[i] * b.x[i]; }); }
    static D abs(const D& a) { return each([&](int i) { return __builtin_fabs(a.x[i]); }); }
    static D max(const D& a, const D& b) { return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; }); }
    static void spread(const D& a, double* lanes) { __builtin_memcpy(lanes, a.x, sizeof a.x); }
    static D widen(const float* p) { return each([&](int i) { return static_cast<double>(p[i]); }); }
    static Counts none() { return 0; }
    static int64_t count(Counts counts) { return counts; }
    static D widen_at_least(const float* p, uint32_t lower_bound, Counts& counts) {
        return each([&](int i) {
            const uint32_t bits = magnitude(p[i]), reached = bits >= lower_bound;
            counts += reached;
            return static_cast<double>(float_of(bits & (0 - reached)));
        });
    }
};

}  // namespace
}  // namespace dgc

#include "pass_body.h"

namespace dgc {

const PassKernels pass_portable = table;

const PassKernels& pass_kernels() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return pass_avx512;
    if (isa() == Isa::avx2) return pass_avx2;
#endif
    return pass_portable;
}

}  // namespace dgc
