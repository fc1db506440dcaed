// Weighted sums of rows of 64-bit numbers, modulo 2**64: the part of a digest that reads all bytes.
#pragma once

#include <cstdint>

namespace dgc {

constexpr int64_t digest_columns = 512;

// sums[r] = the sum of row[r][c] * weights[c] over all columns. Rows may begin at any address.
using RowSums = void (*)(const uint8_t* rows, int64_t count, const uint64_t* weights, uint64_t* sums);

#if defined(__x86_64__)
void row_sums_avx512(const uint8_t* rows, int64_t count, const uint64_t* weights, uint64_t* sums);
#endif

}  // namespace dgc
