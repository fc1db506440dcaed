// The k-th largest magnitude.
#pragma once

#include <cstdint>

namespace dgc {

// The k largest are the elements above `threshold` and the first `ties` elements equal to it, in order of index.
struct Cut {
    uint32_t threshold;
    int64_t ties;
};

// Consecutive values in memory.
struct Block {
    const float* values;
    int64_t count;
};

// The cut for the k largest magnitudes, 1 <= k <= number of values. All magnitude bits must be at least `low`. The
// first bins of the search start there and are 2^shift wide.
Cut cut_for(const Block* blocks, int count, int64_t k, uint32_t low, int shift);

}  // namespace dgc
