// The pass: threads take units of the buffer in turn, update them and collect their candidates.
#include <algorithm>
#include <utility>

#include "choice.h"

namespace dgc {
namespace {

constexpr int64_t unit = 32768;   // elements that a thread takes at a time
constexpr int64_t block = 8192;   // elements between two checks of the candidate limit
constexpr int after_sample = 12;  // wider first bins, because a sampled lower bound is less accurate

void keep_smallest(std::atomic<int64_t>& smallest, int64_t value) {
    for (int64_t seen = smallest.load(); value < seen && !smallest.compare_exchange_weak(seen, value);) {
    }
}

// Splits the active segments into units. Returns their number and the most candidates that one thread may hold.
std::pair<int64_t, int64_t> set_units(Job& job) {
    int64_t count = 0, room = 0;
    for (int64_t a = 0; a < job.active_count; ++a) {
        Segment& segment = job.segments[job.active[a]];
        segment.first_unit = count;
        segment.units = (segment.size + unit - 1) / unit;
        segment.candidates = 0;
        segment.units_left = segment.units;
        count += segment.units;
        room += segment.candidate_limit;
    }
    job.units = job.scratch.units.room<Unit>(count);
    for (int64_t a = 0; a < job.active_count; ++a) {
        const Segment& segment = job.segments[job.active[a]];
        for (int64_t i = 0; i < segment.units; ++i) {
            const int64_t begin = segment.begin + i * unit;
            const int64_t end = segment.begin + std::min((i + 1) * unit, segment.size);
            job.units[segment.first_unit + i] = {job.active[a], begin, end, 0, 0, 0};
        }
    }
    return {count, room + block + 16};
}

}  // namespace

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

void set_lower_bounds(Job& job) {
    if (std::all_of(job.active, job.active + job.active_count, [&](int64_t s) { return job.segments[s].expected; }))
        return;
    share_out(job.active_count, job.threads, [&](int64_t i, int thread) {
        Segment& segment = job.segments[job.active[i]];
        if (segment.expected) return;
        segment.lower_bound = sampled_lower_bound(job.source, segment, job.scratch.threads[thread].values);
        segment.shift = after_sample;
    });
}

int64_t collect(Job& job, int64_t n, const std::function<bool(Segment&)>& choose) {
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
        Segment& segment = job.segments[mine.segment];
        Candidates found = collected[thread];
        mine.thread = thread;
        mine.first = found.count;
        const int64_t before = segment.candidates.load(std::memory_order_relaxed);
        uint32_t lower_bound =
            segment.k && before <= segment.candidate_limit ? segment.lower_bound : unreachable_bits;
        for_stretches(job.source, mine.begin, mine.end, block, [&](const Stretch& stretch) {
            if (int64_t bad = kernel(stretch, lower_bound, found); bad >= 0) keep_smallest(first, bad);
            if (before + found.count - mine.first > segment.candidate_limit) lower_bound = unreachable_bits;
        });
        mine.count = found.count - mine.first;
        // If the segment has too many candidates, those of this unit are dropped, so that the memory suffices.
        if (segment.candidates.fetch_add(mine.count, std::memory_order_relaxed) + mine.count <=
            segment.candidate_limit)
            collected[thread].count = found.count;
        if (segment.units_left.fetch_sub(1, std::memory_order_acq_rel) == 1) segment.chosen = choose(segment);
    });
    const auto is_chosen = [&](int64_t s) { return job.segments[s].chosen; };
    job.active_count = std::remove_if(job.active, job.active + job.active_count, is_chosen) - job.active;
    return first.load();
}

}  // namespace dgc

// update: dgc::Update. pieces, begins [piece_count + 1]: the gradient. u may be null for `residual` and `none`.
// sent_*, masks: see dgc::Sent; all null if nothing was sent, and ignored by `none`. *first becomes the first element
// of g that is NaN or too large, or n.
DGC_EXPORT void dgc_update(int update, const float* const* pieces, const int64_t* begins, int piece_count, float* u,
                           float* v, int64_t n, float momentum, const int32_t* sent_indices,
                           const float* sent_values, const int32_t* sent_count, int masks, int threads,
                           int64_t* first) {
    const dgc::Sent sent{sent_indices, sent_values, sent_count ? *sent_count : 0, masks != 0};
    *first = dgc::update({static_cast<dgc::Update>(update), pieces, begins, piece_count, u, v, momentum, sent}, n,
                         threads);
}
