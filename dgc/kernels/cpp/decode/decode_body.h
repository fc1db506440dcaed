// The kernels of decode.h, shared by all instruction sets. The compiler splits groups of lanes into the vectors of
// each. Everything is in an anonymous namespace: no other file may link to a copy compiled for AVX-512.
#include "decode.h"

#include <algorithm>

#include "common/float_bits.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dgc {
namespace {

constexpr int64_t lanes = 16;
constexpr uint32_t infinity_bits = 0x7F800000;

using Floats = float __attribute__((vector_size(64), may_alias));
using Words = uint32_t __attribute__((vector_size(64), may_alias));

// Stores past the caches. A store through them reads each line from memory before it is overwritten.
inline void stream(float* to, const Floats& group) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, reinterpret_cast<const __m512&>(group));
#elif defined(__AVX__)
    const __m256* const parts = reinterpret_cast<const __m256*>(&group);
    for (int i = 0; i < 2; ++i) _mm256_stream_ps(to + 8 * i, parts[i]);
#elif defined(__x86_64__)
    const __m128* const parts = reinterpret_cast<const __m128*>(&group);
    for (int i = 0; i < 4; ++i) _mm_stream_ps(to + 4 * i, parts[i]);
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
    Words tops = {};
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        Floats& sum = *reinterpret_cast<Floats*>(sums + i);
        Floats mean;
        quotient(sum, mean);
        sum = Floats{};
        if (streaming) stream(means + i, mean);
        else __builtin_memcpy(means + i, &mean, sizeof mean);
        const Words magnitude = reinterpret_cast<const Words&>(mean) & 0x7FFFFFFFu;
        tops = magnitude > tops ? magnitude : tops;
    }
    if (streaming) end_of_stream();
    uint32_t top = 0;
    for (int64_t lane = 0; lane < lanes; ++lane) top = std::max(top, tops[lane]);
    for (; i < n; ++i) {
        means[i] = sums[i] * factor / size;
        sums[i] = 0.0f;
        top = std::max(top, bits_of(means[i]) & 0x7FFFFFFFu);
    }
    return top < infinity_bits;
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
        // most groups of a sparse sum are zero, and a division takes as long as ten products
        uint64_t words[sizeof sum / 8], any = 0;
        __builtin_memcpy(words, &sum, sizeof sum);
        for (uint64_t word : words) any |= word;
        mean = sum;
        if (any) mean = sum * factor / size;
    });
}

const DecodeKernels table = {divide};

}  // namespace
}  // namespace dgc
