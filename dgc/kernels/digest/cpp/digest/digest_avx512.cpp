#if defined(__x86_64__)

#include <immintrin.h>

#include "digest.h"

namespace dgc {
namespace {

constexpr int lanes = 8, chains = 4;  // a multiplication takes several cycles
static_assert(digest_columns % (lanes * chains) == 0, "a row is whole groups of registers");

}  // namespace

void row_sums_avx512(const uint8_t* rows, int64_t count, const uint64_t* weights, uint64_t* sums) {
    for (int64_t r = 0; r < count; ++r) {
        __m512i sum[chains];
        for (auto& chain : sum) chain = _mm512_setzero_si512();
        for (int64_t i = 0; i < digest_columns; i += lanes * chains, rows += 64 * chains)
#pragma GCC unroll 4
            for (int c = 0; c < chains; ++c)
                sum[c] = _mm512_add_epi64(sum[c], _mm512_mullo_epi64(_mm512_loadu_si512(rows + 64 * c),
                                                                     _mm512_loadu_si512(weights + i + lanes * c)));
        const __m512i pairs = _mm512_add_epi64(_mm512_add_epi64(sum[0], sum[1]), _mm512_add_epi64(sum[2], sum[3]));
        sums[r] = static_cast<uint64_t>(_mm512_reduce_add_epi64(pairs));
    }
}

}  // namespace dgc

#endif
