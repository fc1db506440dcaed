// Selects the largest elements of one segment by counting the magnitudes by their upper 15 bits, then, among those in
// the bin of the k-th largest, by their lower 16 bits. The counts of each thread also give the start of its output.
#include <algorithm>
#include <cstring>

#include "choice.h"
#include "common/pool.h"

namespace dgc {
namespace {

constexpr int64_t bins = 65536;

// The number of elements in the bins above a bin, and in the bin.
struct Standing {
    int64_t above, equal;
};

Standing standing(const uint32_t* counts, int64_t bin) {
    int64_t above = 0;
    for (int64_t b = bin + 1; b < bins; ++b) above += counts[b];
    return {above, counts[bin]};
}

// Returns the bin with rank k, counted from the top over all threads. k becomes the rank within that bin.
int64_t bin_of(uint32_t** counts, int threads, int64_t& k) {
    for (int64_t bin = bins - 1; bin > 0; --bin) {
        int64_t members = 0;
        for (int t = 0; t < threads; ++t) members += counts[t][bin];
        if (k <= members) return bin;
        k -= members;
    }
    return 0;
}

}  // namespace

void choose_by_counting(const float* v, Segment& segment, int threads, Scratch& scratch, int32_t* indices,
                        float* values) {
    std::vector<uint32_t*> upper(threads), lower(threads);
    std::vector<int64_t> nonzero(threads, 0);
    for (int t = 0; t < threads; ++t) {
        upper[t] = scratch.threads[t].counts.room<uint32_t>(bins);
        lower[t] = scratch.threads[t].more_counts.room<uint32_t>(bins);
    }
    const float* first = v + segment.begin;
    auto edge = [&](int t) { return part_begin(segment.size, threads, t, 16); };
    parallel_for(threads, [&](int t) {
        std::memset(upper[t], 0, bins * sizeof(uint32_t));
        int64_t zeros = 0;
        for (int64_t i = edge(t); i < edge(t + 1); ++i) {
            uint32_t bits = magnitude(first[i]);
            ++upper[t][bits >> 16];
            zeros += bits == 0;
        }
        upper[t][0] -= static_cast<uint32_t>(zeros);
        nonzero[t] = edge(t + 1) - edge(t) - zeros;
    });
    int64_t all = 0;
    for (int64_t count : nonzero) all += count;
    segment.found = std::min(segment.k, all);
    if (segment.found == 0) return;
    int64_t rank = segment.found;
    const int64_t high = bin_of(upper.data(), threads, rank);
    parallel_for(threads, [&](int t) {
        std::memset(lower[t], 0, bins * sizeof(uint32_t));
        for (int64_t i = edge(t); i < edge(t + 1); ++i) {
            uint32_t bits = magnitude(first[i]);
            if (bits >> 16 == static_cast<uint32_t>(high) && bits) ++lower[t][bits & 0xffff];
        }
    });
    const int64_t low = bin_of(lower.data(), threads, rank);
    const uint32_t threshold = static_cast<uint32_t>(high << 16 | low);
    std::vector<int64_t> begin(threads + 1, segment.output), ties(threads);
    for (int t = 0; t < threads; ++t) {
        Standing fine = standing(lower[t], low);
        ties[t] = std::min(rank, fine.equal);
        rank -= ties[t];
        begin[t + 1] = begin[t] + standing(upper[t], high).above + fine.above + ties[t];
    }
    parallel_for(threads, [&](int t) {
        int64_t at = begin[t];
        for (int64_t i = edge(t); at < begin[t + 1]; ++i) {
            uint32_t bits = magnitude(first[i]);
            if (bits < threshold || (bits == threshold && ties[t]-- <= 0)) continue;
            indices[at] = static_cast<int32_t>(segment.begin + i);
            values[at++] = first[i];
        }
    });
    if (segment.found == segment.requested) segment.threshold = float_of(threshold);
}

}  // namespace dgc
