// The pass itself: units of the buffer, shared out among threads, are updated and their candidates collected.
#include <algorithm>
#include <utility>

#include "choice.h"

namespace dgc {
namespace {

constexpr int64_t unit = 32768;  // elements that a thread takes on at a time
constexpr int64_t block = 8192;  // elements between two looks at the room that is left
constexpr int after_sample = 12;  // a sample tells less of where the threshold lies: wider bins

void keep_smallest(std::atomic<int64_t>& smallest, int64_t value) {
    for (int64_t seen = smallest.load(); value < seen && !smallest.compare_exchange_weak(seen, value);) {
    }
}

// Cuts the active ranges into units. Returns their number and the candidates that one thread may be left with.
std::pair<int64_t, int64_t> set_units(Job& job) {
    int64_t count = 0, room = 0;
    for (int64_t a = 0; a < job.active_count; ++a) {
        Range& range = job.ranges[job.active[a]];
        range.first_unit = count;
        range.units = (range.size + unit - 1) / unit;
        range.candidates = 0;
        range.units_left = range.units;
        count += range.units;
        room += range.budget;
    }
    job.units = job.scratch.units.room<Unit>(count);
    for (int64_t a = 0; a < job.active_count; ++a) {
        const Range& range = job.ranges[job.active[a]];
        for (int64_t i = 0; i < range.units; ++i) {
            const int64_t begin = range.begin + i * unit, end = range.begin + std::min((i + 1) * unit, range.size);
            job.units[range.first_unit + i] = {job.active[a], begin, end, 0, 0, 0};
        }
    }
    return {count, room + block + 16};
}

// The update alone. Returns the first element of g that is NaN or too large, n where there is none.
int64_t update(const Source& source, int64_t n, int threads) {
    const auto kernel = pass_kernels().update[source.update];
    std::atomic<int64_t> first{n};
    share_out((n + unit - 1) / unit, threads, [&](int64_t i, int) {
        for_stretches(source, i * unit, std::min((i + 1) * unit, n), unit, [&](const Stretch& stretch) {
            if (int64_t bad = kernel(stretch); bad >= 0) keep_smallest(first, bad);
        });
    });
    return first.load();
}

}  // namespace

void set_floors(Job& job) {
    if (std::all_of(job.active, job.active + job.active_count, [&](int64_t s) { return job.ranges[s].expected; }))
        return;
    share_out(job.active_count, job.threads, [&](int64_t i, int thread) {
        Range& range = job.ranges[job.active[i]];
        if (range.expected) return;
        range.floor = sampled_floor(job.source, range, job.scratch.threads[thread].values);
        range.shift = after_sample;
    });
}

int64_t collect(Job& job, int64_t n, const std::function<bool(Range&)>& choose) {
    const auto [count, room] = set_units(job);
    const auto kernel = pass_kernels().update_and_collect[job.source.update];
    std::vector<Candidates> collected;
    for (int t = 0; t < job.threads; ++t) {
        Scratch::Thread& memory = job.scratch.threads[t];
        collected.push_back({memory.indices.room<int32_t>(room), memory.values.room<float>(room), 0});
    }
    std::atomic<int64_t> first{n};
    share_out(count, job.threads, [&](int64_t i, int thread) {
        Unit& mine = job.units[i];
        Range& range = job.ranges[mine.range];
        Candidates found = collected[thread];
        mine.thread = thread;
        mine.first = found.count;
        const int64_t before = range.candidates.load(std::memory_order_relaxed);
        uint32_t floor = range.k && before <= range.budget ? range.floor : unreachable_bits;
        for_stretches(job.source, mine.begin, mine.end, block, [&](const Stretch& stretch) {
            if (int64_t bad = kernel(stretch, floor, found); bad >= 0) keep_smallest(first, bad);
            if (before + found.count - mine.first > range.budget) floor = unreachable_bits;
        });
        mine.count = found.count - mine.first;
        // Once a range has too many, what came last is let go, so that the room suffices.
        if (range.candidates.fetch_add(mine.count, std::memory_order_relaxed) + mine.count <= range.budget)
            collected[thread].count = found.count;
        if (range.units_left.fetch_sub(1, std::memory_order_acq_rel) == 1) range.chosen = choose(range);
    });
    const auto is_chosen = [&](int64_t s) { return job.ranges[s].chosen; };
    job.active_count = std::remove_if(job.active, job.active + job.active_count, is_chosen) - job.active;
    return first.load();
}

}  // namespace dgc

// update: dgc::Update. pieces, begins [piece_count + 1]: the gradient. u may be null for `residual` and `none`.
// sent_*, masks: dgc::Sent; all null where nothing was sent, and without a part in `none`. first: one number, the
// first element of g that is NaN or too large, n where there is none.
DGC_EXPORT void dgc_update(int update, const float* const* pieces, const int64_t* begins, int piece_count, float* u,
                           float* v, int64_t n, float momentum, const int32_t* sent_indices,
                           const float* sent_values, const int32_t* sent_count, int masks, int threads,
                           int64_t* first) {
    const dgc::Sent sent{sent_indices, sent_values, sent_count ? *sent_count : 0, masks != 0};
    *first = dgc::update({static_cast<dgc::Update>(update), pieces, begins, piece_count, u, v, momentum, sent}, n,
                         threads);
}
