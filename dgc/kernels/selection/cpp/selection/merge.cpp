// The mean of sorted sparse vectors. The index space is processed in blocks with sums that stay in the cache. The
// parts add their entries of the block in order, and a bitmap marks the elements that have entries.
#include "merge.h"

#include <algorithm>
#include <cstring>

#include "common/pool.h"
#include "common/scratch.h"

namespace dgc {
namespace {

constexpr int64_t block = 32768;
constexpr int64_t words = block / 64;
constexpr int step = 4;  // entries
constexpr int64_t worth_a_thread = 8192;

// Writes the entry of each bit. Returns their number. With spare room for `step` entries, the loop ends after whole
// steps, because the number of bits of a word cannot be predicted. What the last step writes beyond is overwritten.
int64_t emit(uint64_t bits, int64_t begin, const float* sums, float size, bool spare, int64_t* indices,
             float* values) {
    int64_t found = 0;
    const auto put = [&] {
        const int64_t at = __builtin_ctzll(bits | uint64_t{1} << 63);
        indices[found] = begin + at;
        values[found] = sums[at] / size;
        found += bits != 0;
        bits &= bits - 1;
    };
    while (spare && bits) {
        for (int i = 0; i < step; ++i) put();
    }
    while (bits) put();
    return found;
}

// Merges the entries in [begin, end) into the outputs. Returns their number. next: the first entry of each part.
// room: number of entries that the outputs have space for.
int64_t merge(const std::vector<Part>& parts, std::vector<int64_t> next, int64_t begin, int64_t end, float size,
              Scratch::Thread& memory, int64_t room, int64_t* indices, float* values) {
    float* sums = memory.values.room<float>(block);
    uint64_t* touched = memory.counts.room<uint64_t>(words);
    std::memset(touched, 0, words * sizeof(uint64_t));
    std::memset(sums, 0, block * sizeof(float));
    int64_t found = 0;
    while (begin < end) {
        int64_t first = end;
        for (size_t p = 0; p < parts.size(); ++p)
            if (next[p] < parts[p].count) first = std::min<int64_t>(first, parts[p].indices[next[p]]);
        begin = first / block * block;  // skips blocks without entries
        const int64_t stop = std::min(begin + block, end);
        if (first >= end) break;
        for (size_t p = 0; p < parts.size(); ++p) {
            const Part& part = parts[p];
            int64_t i = next[p];
            for (; i < part.count && part.indices[i] < stop; ++i) {
                const int64_t at = part.indices[i] - begin;
                const uint64_t bit = uint64_t{1} << (at % 64);
                sums[at] += part.values[i];
                touched[at / 64] |= bit;
            }
            next[p] = i;
        }
        for (int64_t w = 0; w < words; ++w) {
            if (!touched[w]) continue;
            float* const own = sums + w * 64;
            const bool spare = found + 64 + step <= room;
            found += emit(touched[w], begin + w * 64, own, size, spare, indices + found, values + found);
            touched[w] = 0;
            std::memset(own, 0, 64 * sizeof(float));
        }
        begin = stop;
    }
    return found;
}

}  // namespace

int64_t merge_mean(const std::vector<Part>& parts, float size, int64_t numel, int64_t* indices, float* values,
                   int threads) {
    int64_t entries = 0;
    for (const Part& part : parts) entries += part.count;
    threads = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, entries / worth_a_thread)));
    Lease scratch(threads);
    // Each thread writes at the offset that its output would have if no two parts shared an index.
    std::vector<int64_t> offset(threads), found(threads);
    parallel_for(threads, [&](int t) {
        const int64_t begin = part_begin(numel, threads, t, block);
        const int64_t end = part_begin(numel, threads, t + 1, block);
        std::vector<int64_t> next;
        int64_t room = 0;
        for (const Part& part : parts) {
            const auto first = std::lower_bound(part.indices, part.indices + part.count, begin);
            room += std::lower_bound(first, part.indices + part.count, end) - first;
            next.push_back(first - part.indices);
            offset[t] += next.back();
        }
        found[t] = merge(parts, std::move(next), begin, end, size, scratch->threads[t], room, indices + offset[t],
                         values + offset[t]);
    });
    int64_t at = found[0];
    for (int t = 1; t < threads; ++t) {
        std::memmove(indices + at, indices + offset[t], found[t] * sizeof(int64_t));
        std::memmove(values + at, values + offset[t], found[t] * sizeof(float));
        at += found[t];
    }
    return at;
}

}  // namespace dgc

// part_counts: one number for each part.
DGC_EXPORT int64_t dgc_merge_mean(const int32_t* const* part_indices, const float* const* part_values,
                                  const int32_t* const* part_counts, int part_count, float size, int64_t numel,
                                  int64_t* indices, float* values, int threads) {
    std::vector<dgc::Part> parts;
    for (int p = 0; p < part_count; ++p) parts.push_back({part_indices[p], part_values[p], *part_counts[p]});
    return dgc::merge_mean(parts, size, numel, indices, values, threads);
}
