#include "digest.h"

#include <cstring>

#include "common/isa.h"
#include "common/pool.h"

namespace dgc {
namespace {

inline uint64_t number_at(const uint8_t* bytes) {
    uint64_t number;
    std::memcpy(&number, bytes, sizeof number);
    return number;
}

// Four chains, because a multiplication takes several cycles. Compilers would take vectors of 32-bit multiplications,
// of which a product needs three: this is faster.
void row_sums_portable(const uint8_t* rows, int64_t count, const uint64_t* weights, uint64_t* sums) {
    for (int64_t r = 0; r < count; ++r) {
        uint64_t a = 0, b = 0, c = 0, d = 0;
        for (int64_t i = 0; i < digest_columns; i += 4, rows += 32) {
            a += number_at(rows) * weights[i];
            b += number_at(rows + 8) * weights[i + 1];
            c += number_at(rows + 16) * weights[i + 2];
            d += number_at(rows + 24) * weights[i + 3];
#if defined(__GNUC__)
            __asm__("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d));  // no vectors
#endif
        }
        sums[r] = a + b + c + d;
    }
}

}  // namespace
}  // namespace dgc

using namespace dgc;

DGC_EXPORT void dgc_row_sums(const uint8_t* rows, int64_t count, const uint64_t* weights, uint64_t* sums) {
    RowSums chosen = row_sums_portable;
#if defined(__x86_64__)
    if (isa() == Isa::avx512) chosen = row_sums_avx512;
#endif
    chosen(rows, count, weights, sums);
}
