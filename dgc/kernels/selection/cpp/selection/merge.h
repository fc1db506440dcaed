// The mean of sorted sparse vectors.
#pragma once

#include <cstdint>
#include <vector>

namespace dgc {

struct Part {
    const int32_t* indices;
    const float* values;
    int64_t count;
};

// indices, values: space for all entries of all parts. Returns the number of entries written.
int64_t merge_mean(const std::vector<Part>& parts, float size, int64_t numel, int64_t* indices, float* values,
                   int threads);

}  // namespace dgc
