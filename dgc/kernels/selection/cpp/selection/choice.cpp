// Exact selection of the k largest elements per segment. One pass updates u and v and collects the elements at or
// above a lower bound; the selection is made among these candidates. The lower bound is the caller's, or comes from
// a sample, or, for a segment that fits the cache, from the updated elements themselves. If the caller's was too high
// or too low, the segment is collected again from v with another. If that fails too, the selection counts the
// magnitudes. The result does not depend on lower bounds or threads.
#include "choice.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>

#include "common/pool.h"

namespace dgc {
namespace {

constexpr int after_lower_bound = 9;  // the first bins of cut_for reach an eighth above the lower bound

struct Output {
    int32_t* indices;
    float* values;
    int32_t* count;
    float* thresholds;
    int32_t* missed;
};

// Selects among a segment's candidates. Returns false if there are too few or too many candidates.
bool choose_among_candidates(const Job& job, Segment& segment, const Output& output) {
    const int64_t candidates = segment.candidates;
    if (segment.k == 0) return true;
    if (candidates > segment.candidate_limit) return false;
    if (candidates < segment.k && segment.lower_bound > smallest_bits) return false;
    segment.found = std::min(segment.k, candidates);
    if (segment.found == 0) return true;
    const Candidates* all = job.found + segment.first_unit;
    Cut cut{smallest_bits, candidates};
    if (candidates > segment.found || segment.found == segment.requested)
        cut = cut_for(all, segment.units, segment.found, segment.lower_bound, segment.shift);
    Candidates kept{output.indices + segment.output, output.values + segment.output, 0};
    for (int64_t left = segment.found; left; ++all) {
        kept.count = left;
        cut.ties = pass_kernels().keep(*all, cut.threshold, cut.ties, kept);
        kept.indices += kept.count;
        kept.values += kept.count;
        left -= kept.count;
    }
    if (segment.found == segment.requested) segment.threshold = float_of(cut.threshold);
    return true;
}

// Closes the gaps after segments with fewer elements than requested, and sets the rest of the output to zero.
void close_gaps(const Segment* segments, int64_t count, int64_t capacity, const Output& output) {
    int64_t at = 0;
    for (int64_t s = 0; s < count; ++s) {
        const Segment& segment = segments[s];
        output.thresholds[s] = segment.threshold;
        if (at != segment.output && segment.found) {
            std::memmove(output.indices + at, output.indices + segment.output, segment.found * sizeof(int32_t));
            std::memmove(output.values + at, output.values + segment.output, segment.found * sizeof(float));
        }
        at += segment.found;
    }
    std::fill(output.indices + at, output.indices + capacity, 0);
    std::fill(output.values + at, output.values + capacity, 0.0f);
    *output.count = static_cast<int32_t>(at);
}

int64_t choose(Source source, int64_t n, const int64_t* bounds, const int64_t* ks, int64_t segment_count,
               const float* lower_bounds, int threads, int64_t capacity, const Output& output) {
    Lease scratch(threads);
    Segment* segments = scratch->segments.room<Segment>(segment_count);
    int64_t* active = scratch->active.room<int64_t>(segment_count);
    Job job{source, segments, active, segment_count, threads, *scratch};
    std::iota(job.active, job.active + segment_count, int64_t{0});
    for (int64_t s = 0, at = 0; s < segment_count; at += ks[s++]) {
        Segment& segment = *new (job.segments + s) Segment{};
        segment.begin = bounds[s];
        segment.size = bounds[s + 1] - bounds[s];
        segment.requested = ks[s];
        segment.k = std::min(ks[s], segment.size);
        segment.chosen = segment.size == 0;
        segment.output = at;
        segment.candidate_limit = segment.size;
        if (segment.size > largest_unit)
            segment.candidate_limit = std::min(segment.size, 4 * segment.k + segment.size / 64 + 1024);
        segment.expected = lower_bounds && lower_bounds[s] > 0 && std::isfinite(lower_bounds[s]);
        segment.lower_bound = segment.expected ? bits_of(lower_bounds[s]) : smallest_bits;
        segment.shift = after_lower_bound;
    }
    const auto choose_one = [&](Segment& segment) { return choose_among_candidates(job, segment, output); };
    set_lower_bounds(job);
    const int64_t first = collect(job, n, choose_one);
    *output.missed = static_cast<int32_t>(std::count_if(
        job.active, job.active + job.active_count, [&](int64_t s) { return job.segments[s].expected; }));
    if (*output.missed) {
        for (int64_t a = 0; a < job.active_count; ++a) job.segments[job.active[a]].expected = false;
        job.source.update = none;
        job.source.sent.count = 0;
        set_lower_bounds(job);
        collect(job, n, choose_one);
    }
    for (int64_t a = 0; a < job.active_count; ++a)
        choose_by_counting(source.v, job.segments[job.active[a]], threads, *scratch, output.indices, output.values);
    close_gaps(job.segments, segment_count, capacity, output);
    return first;
}

}  // namespace
}  // namespace dgc

// The first fourteen arguments are the arguments of dgc_update. Shapes: bounds [segment_count + 1], ks [segment_count],
// lower_bounds [segment_count] or null, indices and values [capacity], the sum of ks, thresholds [segment_count].
// count and missed point to one number each.
DGC_EXPORT void dgc_update_and_choose(int update, const float* const* pieces, const int64_t* begins,
                                      int piece_count, float* u, float* v, int64_t n, float factor,
                                      const int32_t* sent_indices, const float* sent_values,
                                      const int32_t* sent_count, int masks, int threads, int64_t* first,
                                      const int64_t* bounds, const int64_t* ks, int64_t segment_count,
                                      const float* lower_bounds, int64_t capacity, int32_t* indices, float* values,
                                      int32_t* count, float* thresholds, int32_t* missed) {
    const dgc::Sent sent{sent_indices, sent_values, sent_count ? *sent_count : 0, masks != 0};
    *first = dgc::choose({static_cast<dgc::Update>(update), pieces, begins, piece_count, u, v, factor, sent}, n,
                         bounds, ks, segment_count, lower_bounds, threads, capacity,
                         {indices, values, count, thresholds, missed});
}

// Predicts lower_bounds [segment_count] from the thresholds [segment_count] of the last two steps. See Kernels in
// dgc/kernels/selection/__init__.py.
DGC_EXPORT void dgc_predicted_lower_bounds(const float* last, const float* before, int64_t segment_count,
                                           float margin, float* lower_bounds) {
    for (int64_t s = 0; s < segment_count; ++s) {
        const float growth = last[s] == before[s] ? 1.0f : last[s] / before[s];
        lower_bounds[s] = last[s] * std::min(std::max(growth, 0.97f), 1.2f) * margin;
    }
}
