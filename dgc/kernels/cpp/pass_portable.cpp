// The pass in plain C++, which any compiler turns into whatever vectors it may assume.
#include "isa.h"
#include "pass.h"

namespace dgc {
namespace {

// One lane: loops of floats without branches are left to the compiler.
struct Lanes {
    static constexpr int width = 1;
    using F = float;

    static F load(const float* p) { return *p; }
    static void store(float* p, F x) { *p = x; }
    static F fill(float x) { return x; }
    static F mul(F a, F b) { return a * b; }
    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static uint32_t nonfinite(F x) { return magnitude(x) >= infinity_bits; }
    static F without(F, uint32_t) { return 0.0f; }
    static uint32_t at_least(F x, uint32_t floor) { return magnitude(x) >= floor; }
    static void collect(F x, uint32_t, int32_t first, Candidates& found) {
        found.indices[found.count] = first;
        found.values[found.count++] = x;
    }
    static void collect_from(const int32_t* indices, F x, uint32_t lanes, Candidates& found) {
        found.indices[found.count] = *indices;
        found.values[found.count] = x;
        found.count += lanes;
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
