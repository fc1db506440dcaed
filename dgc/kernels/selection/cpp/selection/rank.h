// The k-th largest magnitude.
#pragma once

#include <cstdint>

#include "accumulate/pass.h"

namespace dgc {

// The cut for the k largest magnitudes, 1 <= k <= number of values. All magnitude bits must be at least `low`. The
// first bins of the search start there and are 2^shift wide.
Cut cut_for(const Candidates* blocks, int64_t count, int64_t k, uint32_t low, int shift);

}  // namespace dgc
