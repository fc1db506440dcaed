// One pass over g, u and v that updates them and collects, of each range, the elements at or above a floor, and the
// exact choice among those. A range whose floor did not fit is collected again with a floor of our own, from v alone,
// and if that does not fit either it is chosen by counting. Neither floors nor threads change what is chosen.
#include "choice.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>

#include "common/pool.h"

namespace dgc {
namespace {

constexpr int after_floor = 9;  // the first bins that cut_for looks at reach an eighth above the floor

struct Output {
    int32_t* indices;
    float* values;
    int32_t* count;
    float* thresholds;
    int32_t* missed;
};

// Chooses among a range's candidates. Returns false where they cannot hold the whole choice.
bool choose_among_candidates(const Job& job, Range& range, const Output& output) {
    const int64_t candidates = range.candidates;
    if (range.k == 0) return true;
    if (candidates > range.budget || (candidates < range.k && range.floor > smallest_bits)) return false;
    range.found = std::min(range.k, candidates);
    if (range.found == 0) return true;
    std::vector<Segment> segments;
    const Unit* end = job.units + range.first_unit + range.units;
    for (const Unit* u = job.units + range.first_unit; u != end; ++u)
        if (u->count) segments.push_back({job.scratch.threads[u->thread].values.data<float>() + u->first, u->count});
    Cut cut{smallest_bits, candidates};
    if (candidates > range.found || range.found == range.quota)
        cut = cut_for(segments.data(), static_cast<int>(segments.size()), range.found, range.floor, range.shift);
    Candidates kept{output.indices + range.output, output.values + range.output, 0};
    int64_t left = range.found;
    for (const Unit* u = job.units + range.first_unit; left; ++u) {
        const Scratch::Thread& memory = job.scratch.threads[u->thread];
        const Candidates all{memory.indices.data<int32_t>() + u->first, memory.values.data<float>() + u->first,
                             u->count};
        kept.count = left;
        cut.ties = pass_kernels().keep(all, cut.threshold, cut.ties, kept);
        kept.indices += kept.count;
        kept.values += kept.count;
        left -= kept.count;
    }
    if (range.found == range.quota) range.threshold = float_of(cut.threshold);
    return true;
}

// Closes the gaps that ranges with fewer elements than their quota left, and sets the rest to zero.
void close_gaps(const Range* ranges, int64_t count, int64_t capacity, const Output& output) {
    int64_t at = 0;
    for (int64_t s = 0; s < count; ++s) {
        const Range& range = ranges[s];
        output.thresholds[s] = range.threshold;
        if (at != range.output && range.found) {
            std::memmove(output.indices + at, output.indices + range.output, range.found * sizeof(int32_t));
            std::memmove(output.values + at, output.values + range.output, range.found * sizeof(float));
        }
        at += range.found;
    }
    std::fill(output.indices + at, output.indices + capacity, 0);
    std::fill(output.values + at, output.values + capacity, 0.0f);
    *output.count = static_cast<int32_t>(at);
}

int64_t choose(Source source, int64_t n, const int64_t* bounds, const int64_t* ks, int64_t range_count,
               const float* floors, int threads, int64_t capacity, const Output& output) {
    Lease scratch(threads);
    Job job{source, scratch->ranges.room<Range>(range_count), scratch->active.room<int64_t>(range_count), range_count,
            threads, *scratch};
    std::iota(job.active, job.active + range_count, int64_t{0});
    for (int64_t s = 0, at = 0; s < range_count; at += ks[s++]) {
        Range& range = *new (job.ranges + s) Range{};
        range.begin = bounds[s];
        range.size = bounds[s + 1] - bounds[s];
        range.quota = ks[s];
        range.k = std::min(ks[s], range.size);
        range.chosen = range.size == 0;
        range.output = at;
        range.budget =
            range.size <= small_range ? range.size : std::min(range.size, 4 * range.k + range.size / 64 + 1024);
        range.expected = floors && floors[s] > 0 && std::isfinite(floors[s]);
        range.floor = range.expected ? bits_of(floors[s]) : smallest_bits;
        range.shift = after_floor;
    }
    const auto choose_one = [&](Range& range) { return choose_among_candidates(job, range, output); };
    set_floors(job);
    const int64_t first = collect(job, n, choose_one);
    *output.missed = static_cast<int32_t>(std::count_if(
        job.active, job.active + job.active_count, [&](int64_t s) { return job.ranges[s].expected; }));
    if (*output.missed) {
        for (int64_t a = 0; a < job.active_count; ++a) job.ranges[job.active[a]].expected = false;
        job.source.update = none;
        job.source.sent.count = 0;
        set_floors(job);
        collect(job, n, choose_one);
    }
    for (int64_t a = 0; a < job.active_count; ++a)
        choose_by_counting(source.v, job.ranges[job.active[a]], threads, *scratch, output.indices, output.values);
    close_gaps(job.ranges, range_count, capacity, output);
    return first;
}

}  // namespace
}  // namespace dgc

// The first fourteen arguments are those of dgc_update. bounds [range_count + 1], ks [range_count], floors
// [range_count] or null; indices, values [capacity], the sum of ks; thresholds [range_count]; count, missed: one
// number each.
DGC_EXPORT void dgc_update_and_choose(int update, const float* const* pieces, const int64_t* begins,
                                      int piece_count, float* u, float* v, int64_t n, float momentum,
                                      const int32_t* sent_indices, const float* sent_values,
                                      const int32_t* sent_count, int masks, int threads, int64_t* first,
                                      const int64_t* bounds, const int64_t* ks, int64_t range_count,
                                      const float* floors, int64_t capacity, int32_t* indices, float* values,
                                      int32_t* count, float* thresholds, int32_t* missed) {
    const dgc::Sent sent{sent_indices, sent_values, sent_count ? *sent_count : 0, masks != 0};
    *first = dgc::choose({static_cast<dgc::Update>(update), pieces, begins, piece_count, u, v, momentum, sent}, n,
                         bounds, ks, range_count, floors, threads, capacity,
                         {indices, values, count, thresholds, missed});
}

// floors [range_count], from thresholds [range_count] of the last step and of the one before: see Kernels.
DGC_EXPORT void dgc_predicted_floors(const float* last, const float* before, int64_t range_count, float margin,
                                     float* floors) {
    for (int64_t s = 0; s < range_count; ++s) {
        const float growth = last[s] == before[s] ? 1.0f : last[s] / before[s];
        floors[s] = last[s] * std::min(std::max(growth, 0.97f), 1.2f) * margin;
    }
}
