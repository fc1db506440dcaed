// Radix selection from the top, 11 bits at a time: count the members of each bin, keep the bin with rank k, and split
// it again. The first bins are narrow and start at a lower bound, because real accumulated gradients are densest
// there. The last of the first bins has no upper limit.
#include "rank.h"

#include <algorithm>

namespace dgc {
namespace {

constexpr int bins = 2048;
constexpr int few = 512;  // at most this many are selected directly

// Magnitudes low .. low + span - 1.
struct Window {
    uint32_t low;
    uint64_t span;

    bool holds(uint32_t bits) const { return bits - low < span; }
};

int shift_for(uint64_t span) {
    int shift = 0;
    while ((span - 1) >> shift >= bins) ++shift;
    return shift;
}

Cut bisect(const Candidates* blocks, int64_t count, int64_t k, Window window, bool all) {
    uint32_t members[few + rank_lanes];
    int64_t found = 0;
    const auto high = static_cast<uint32_t>(window.low + window.span);
    for (const Candidates* block = blocks; block != blocks + count; ++block) {
        if (all) std::transform(block->values, block->values + block->count, members + found, magnitude);
        const auto within = pass_kernels().magnitudes_within;
        found += all ? block->count : within(block->values, block->count, window.low, high, members + found);
    }
    std::fill(members + found, members + found + rank_lanes, 0);
    return pass_kernels().cut(members, (found + rank_lanes - 1) / rank_lanes * rank_lanes, k);
}

}  // namespace

Cut cut_for(const Candidates* blocks, int64_t count, int64_t k, uint32_t low, int shift) {
    Window window{low, (uint64_t{1} << 31) - low};
    int64_t members = 0;
    for (int64_t s = 0; s < count; ++s) members += blocks[s].count;
    bool all = true;
    while (members > few) {
        if (window.span == 1) return {window.low, k};
        uint32_t counts[bins] = {};
        for (int64_t s = 0; s < count; ++s) {
            const float* values = blocks[s].values;
            for (int64_t i = 0, n = blocks[s].count; i < n; ++i) {
                uint32_t bits = magnitude(values[i]);
                if (!all && !window.holds(bits)) continue;
                ++counts[std::min<uint32_t>((bits - window.low) >> shift, bins - 1)];
            }
        }
        int bin = bins - 1;
        for (; k > counts[bin]; --bin) k -= counts[bin];
        uint64_t from = static_cast<uint64_t>(bin) << shift;
        uint64_t width = bin == bins - 1 ? window.span - from : std::min(window.span - from, uint64_t{1} << shift);
        window = {window.low + static_cast<uint32_t>(from), width};
        members = counts[bin];
        shift = shift_for(width);
        all = false;
    }
    return bisect(blocks, count, k, window, all);
}

}  // namespace dgc
