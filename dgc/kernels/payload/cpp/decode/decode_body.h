// The kernels of decode.h, shared by all instruction sets. Everything is in an anonymous namespace: no other file may
// link to a copy compiled for AVX-512.
#include "decode.h"

#include "common/float_bits.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dgc {
namespace {

// One vector register. GCC takes wider vectors apart into single elements where a comparison is involved.
#if defined(__AVX512F__)
constexpr int64_t lanes = 16;
#elif defined(__AVX__)
constexpr int64_t lanes = 8;
#else
constexpr int64_t lanes = 4;
#endif
constexpr int32_t infinity_bits = 0x7F800000;

using Floats = float __attribute__((vector_size(lanes * sizeof(float)), may_alias));
using Words = int32_t __attribute__((vector_size(lanes * sizeof(float)), may_alias));

// Stores past the caches. A store through them reads each line from memory before it is overwritten.
inline void stream(float* to, const Floats& group) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, reinterpret_cast<const __m512&>(group));
#elif defined(__AVX__)
    _mm256_stream_ps(to, reinterpret_cast<const __m256&>(group));
#elif defined(__x86_64__)
    _mm_stream_ps(to, reinterpret_cast<const __m128&>(group));
#else
    __builtin_memcpy(to, &group, sizeof group);
#endif
}

// Waits until other threads can see what `stream` has stored.
inline void end_of_stream() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// Calls quotient(sum, mean) for each group.
template <class Quotient>
bool divide_by(float* sums, int64_t n, float factor, float size, bool streaming, float* means, Quotient quotient) {
    streaming &= reinterpret_cast<uintptr_t>(means) % sizeof(Floats) == 0;
    Words lost = {};
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        Floats& sum = *reinterpret_cast<Floats*>(sums + i);
        Floats mean;
        quotient(sum, mean);
        sum = Floats{};
        if (streaming) stream(means + i, mean);
        else __builtin_memcpy(means + i, &mean, sizeof mean);
        lost |= (reinterpret_cast<const Words&>(mean) & 0x7FFFFFFF) >= infinity_bits;
    }
    if (streaming) end_of_stream();
    bool finite = true;
    for (int64_t lane = 0; lane < lanes; ++lane) finite &= lost[lane] == 0;
    for (; i < n; ++i) {
        means[i] = sums[i] * factor / size;
        sums[i] = 0.0f;
        finite &= (bits_of(means[i]) & 0x7FFFFFFFu) < infinity_bits;
    }
    return finite;
}

bool divide(float* sums, int64_t n, float factor, float size, bool streaming, float* means) {
    const bool power_of_two = (bits_of(size) & 0x007FFFFFu) == 0;
    if (power_of_two) {
        // the inverse is exact, so the product has the bits of the quotient
        const float inverse = 1.0f / size;
        const auto product = [=](const Floats& sum, Floats& mean) { mean = sum * factor * inverse; };
        return divide_by(sums, n, factor, size, streaming, means, product);
    }
    return divide_by(sums, n, factor, size, streaming, means, [=](const Floats& sum, Floats& mean) {
        mean = sum * factor;
        // most groups of a sparse sum are zero, and a division takes as long as ten products
        uint64_t words[sizeof mean / 8], any = 0;
        __builtin_memcpy(words, &mean, sizeof mean);
        for (uint64_t word : words) any |= word;
        if (any) mean = mean / size;
    });
}

const DecodeKernels table = {divide};

}  // namespace
}  // namespace dgc
