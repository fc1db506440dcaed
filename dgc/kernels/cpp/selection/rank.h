// The k-th largest of many magnitudes.
#pragma once

#include <cstdint>

namespace dgc {

// The k largest are those above `threshold` and, in the order of their indices, the first `ties` equal to it.
struct Cut {
    uint32_t threshold;
    int64_t ties;
};

// Values that lie together in memory.
struct Block {
    const float* values;
    int64_t count;
};

// The cut for the k largest magnitudes, 1 <= k <= number of values. All magnitudes are at least `low`; the search
// looks first at bins of 2^shift bits from there upwards.
Cut cut_for(const Block* blocks, int count, int64_t k, uint32_t low, int shift);

}  // namespace dgc
