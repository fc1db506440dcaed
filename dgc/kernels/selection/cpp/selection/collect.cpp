// The pass: threads take units of the buffer in turn, update them and collect their candidates.
#include <algorithm>

#include "choice.h"

namespace dgc {
namespace {

constexpr int64_t block = 8192;   // elements between two checks of the candidate limit
constexpr int after_sample = 12;  // wider first bins, because a sampled lower bound is less accurate

void keep_smallest(std::atomic<int64_t>& smallest, int64_t value) {
    for (int64_t seen = smallest.load(); value < seen && !smallest.compare_exchange_weak(seen, value);) {
    }
}

struct Units {
    int64_t batches;  // of consecutive units, which one thread takes: of `largest_unit` elements or more together
    int64_t room;     // the most candidates that one thread may hold
};

// Splits the active segments into units.
Units set_units(Job& job) {
    int64_t count = 0, room = 0, largest = 0;
    for (int64_t a = 0; a < job.active_count; ++a) {
        Segment& segment = job.segments[job.active[a]];
        segment.first_unit = count;
        segment.units = (segment.size + largest_unit - 1) / largest_unit;
        segment.candidates = 0;
        segment.units_left = segment.units;
        count += segment.units;
        if (segment.units > 1) room += segment.candidate_limit;
        else largest = std::max(largest, segment.candidate_limit);
    }
    job.units = job.scratch.units.room<Unit>(count);
    job.found = job.scratch.found.room<Candidates>(count);
    int64_t* const batches = job.scratch.batches.room<int64_t>(count + 1);
    int64_t batch = 0, elements = largest_unit;
    for (int64_t a = 0; a < job.active_count; ++a) {
        const Segment& segment = job.segments[job.active[a]];
        for (int64_t i = 0; i < segment.units; ++i) {
            const int64_t begin = segment.begin + i * largest_unit;
            const int64_t end = segment.begin + std::min((i + 1) * largest_unit, segment.size);
            job.units[segment.first_unit + i] = {job.active[a], begin, end};
            if (elements >= largest_unit) {
                batches[batch++] = segment.first_unit + i;
                elements = 0;
            }
            elements += end - begin;
        }
    }
    batches[batch] = count;
    return {batch, room + largest + block + 16};
}

}  // namespace

int64_t update(const Source& source, int64_t n, int threads) {
    const auto kernel = pass_kernels().update[source.update];
    std::atomic<int64_t> first{n};
    share_out((n + largest_unit - 1) / largest_unit, threads, [&](int64_t i, int) {
        const int64_t begin = i * largest_unit, end = std::min(begin + largest_unit, n);
        for_stretches(source, begin, end, largest_unit, [&](const Stretch& stretch) {
            if (int64_t bad = kernel(stretch); bad >= 0) keep_smallest(first, bad);
        });
    });
    return first.load();
}

void set_lower_bounds(Job& job) {
    bool sampling = false;
    for (int64_t a = 0; a < job.active_count; ++a) {
        Segment& segment = job.segments[job.active[a]];
        segment.ranked = !segment.expected && segment.size <= largest_unit && segment.k <= groups;
        sampling |= !segment.expected && !segment.ranked;
    }
    if (!sampling) return;
    share_out(job.active_count, job.threads, [&](int64_t i, int thread) {
        Segment& segment = job.segments[job.active[i]];
        if (segment.expected || segment.ranked) return;
        segment.lower_bound = sampled_lower_bound(job.source, segment, job.scratch.threads[thread].values);
        segment.shift = after_sample;
    });
}

int64_t collect(Job& job, int64_t n, const std::function<bool(Segment&)>& choose) {
    const Units units = set_units(job);
    const PassKernels& kernels = pass_kernels();
    const Update update = job.source.update;
    std::atomic<int64_t> first{n}, next{0};
    parallel_for(job.threads, [&](int thread) {
        Scratch::Thread& memory = job.scratch.threads[thread];
        Candidates collected{memory.indices.room<int32_t>(units.room), memory.values.room<float>(units.room), 0};
        Source source = job.source;
        const auto note = [&](int64_t bad) {
            if (bad >= 0) keep_smallest(first, bad);
        };
        // Returns the unit's candidates, behind those collected before.
        const auto candidates_of = [&](const Unit& unit, Segment& segment) {
            Candidates found{collected.indices + collected.count, collected.values + collected.count, 0};
            source.sent = from(source.sent, unit.begin);  // units ascend
            if (segment.ranked && segment.k) {
                alignas(64) uint32_t maxima[groups] = {};
                const float* const v = source.v + unit.begin;
                const int64_t size = unit.end - unit.begin;
                const float* following = v + size;
                for_stretches(source, unit.begin, unit.end, largest_unit, [&](const Stretch& stretch) {
                    note(kernels.update_and_rank[update](stretch, maxima));
                    if (update != none) following = stretch.g + stretch.n;
                });
                const uint32_t bound = kernels.bound_for(maxima, groups, segment.k, segment.k / 8);
                segment.lower_bound = std::max(bound, smallest_bits);
                kernels.collect_cached(v, size, unit.begin, following, segment.lower_bound, found);
                return found;
            }
            const int64_t before = segment.candidates.load(std::memory_order_relaxed);
            const bool wanted = segment.k && before <= segment.candidate_limit;
            uint32_t lower_bound = wanted ? segment.lower_bound : unreachable_bits;
            for_stretches(source, unit.begin, unit.end, block, [&](const Stretch& stretch) {
                note(kernels.update_and_collect[update](stretch, lower_bound, found));
                if (before + found.count > segment.candidate_limit) lower_bound = unreachable_bits;
            });
            return found;
        };
        for (int64_t batch; (batch = next.fetch_add(1, std::memory_order_relaxed)) < units.batches;) {
            const int64_t* const begin = job.scratch.batches.data<int64_t>() + batch;
            for (int64_t i = begin[0]; i < begin[1]; ++i) {
                Segment& segment = job.segments[job.units[i].segment];
                const Candidates found = job.found[i] = candidates_of(job.units[i], segment);
                const int64_t before = segment.candidates.fetch_add(found.count, std::memory_order_relaxed);
                // Candidates are dropped if the choice is made at once, or if they are too many for the memory.
                if (segment.units > 1 && before + found.count <= segment.candidate_limit)
                    collected.count += found.count;
                if (segment.units_left.fetch_sub(1, std::memory_order_acq_rel) == 1) segment.chosen = choose(segment);
            }
        }
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
                           float* v, int64_t n, float factor, const int32_t* sent_indices,
                           const float* sent_values, const int32_t* sent_count, int masks, int threads,
                           int64_t* first) {
    const dgc::Sent sent{sent_indices, sent_values, sent_count ? *sent_count : 0, masks != 0};
    *first = dgc::update({static_cast<dgc::Update>(update), pieces, begins, piece_count, u, v, factor, sent}, n,
                         threads);
}
