// Choosing the largest elements of each segment of a buffer.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "accumulate/pass.h"
#include "common/pool.h"
#include "rank.h"
#include "common/scratch.h"

namespace dgc {

// Inputs of a pass: consecutive pieces of the gradient, the state, and the sent elements to remove from it.
struct Source {
    Update update;
    const float* const* pieces;
    const int64_t* begins;  // the start of each piece in the bucket, then n
    int piece_count;
    float* u;
    float* v;
    float factor;
    Sent sent;
};

struct Segment {
    int64_t begin, size;
    int64_t k;                        // min(requested, size)
    int64_t requested;                // the caller's k
    int64_t output;                   // offset of the selection in the output
    int64_t candidate_limit;          // more candidates mean that the lower bound was too low
    uint32_t lower_bound;             // elements with at least these magnitude bits are candidates
    int shift;                        // width of the first bins of cut_for, as a power of two
    bool expected;                    // the caller gave the lower bound
    bool ranked;                      // the pass finds the lower bound: see update_and_rank
    int64_t found;                    // number of selected elements
    bool chosen;                      // the selection is complete
    float threshold;
    int64_t first_unit, units;
    std::atomic<int64_t> candidates;  // collected so far
    std::atomic<int64_t> units_left;
};

// Some elements of one segment. A thread takes consecutive units.
struct Unit {
    int64_t segment, begin, end;  // elements of the bucket
};

constexpr int64_t largest_unit = 32768;  // elements

// Updates without collecting. Returns the first element of g that is NaN or too large, or n.
int64_t update(const Source& source, int64_t n, int threads);

// Estimates from a sample a lower bound slightly below the k-th largest magnitude of the segment after the update.
// The caller must check that enough elements reach it.
uint32_t sampled_lower_bound(Source source, const Segment& segment, Buffer& memory);

// The data of one call.
struct Job {
    Source source;
    Segment* segments;
    int64_t* active;  // the segments still to be chosen, ascending
    int64_t active_count;
    int threads;
    Scratch& scratch;
    Unit* units = nullptr;
    Candidates* found = nullptr;  // of each unit, in the memory of the thread that has collected them
};

// Chooses how each active segment without a lower bound from the caller gets one: from a sample now, or in the pass.
void set_lower_bounds(Job& job);

// Runs the pass over all active segments. The thread that finishes a segment calls `choose` for it at once, while the
// candidates are in the cache and the other threads continue. Segments for which `choose` returns true are no longer
// active. Returns the first element of g that is NaN or too large, or n.
int64_t collect(Job& job, int64_t n, const std::function<bool(Segment&)>& choose);

// Selects by counting all magnitudes of v in the segment. Always reads the segment three times.
void choose_by_counting(const float* v, Segment& segment, int threads, Scratch& scratch, int32_t* indices,
                        float* values);

// Calls visit(i, thread) for i = 0 .. n - 1. Each free thread takes the next i.
template <class Visit>
static void share_out(int64_t n, int threads, Visit&& visit) {
    std::atomic<int64_t> next{0};
    parallel_for(threads, [&](int thread) {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) visit(i, thread);
    });
}

// The entries of `sent` at or after `begin`, by exponential search: fast if `begin` is near.
static inline Sent from(Sent sent, int64_t begin) {
    int64_t step = 1;
    for (; step <= sent.count && sent.indices[step - 1] < begin; step *= 2) skip(sent, step);
    while (step > 1) {
        step /= 2;
        if (step <= sent.count && sent.indices[step - 1] < begin) skip(sent, step);
    }
    return sent;
}

// Calls visit(stretch) for the elements begin .. end - 1, at most `block` at a time and within one piece.
template <class Visit>
static void for_stretches(const Source& source, int64_t begin, int64_t end, int64_t block, Visit&& visit) {
    Sent sent = from(source.sent, begin);
    int piece = 0;
    if (source.update != none && begin < end) {
        int low = 0, high = source.piece_count;
        while (high - low > 1) {
            int middle = (low + high) / 2;
            (source.begins[middle] <= begin ? low : high) = middle;
        }
        piece = low;
    }
    while (begin < end) {
        int64_t stop = begin + block < end ? begin + block : end;
        const float* g = nullptr;
        if (source.update != none) {
            while (source.begins[piece + 1] <= begin) ++piece;
            if (source.begins[piece + 1] < stop) stop = source.begins[piece + 1];
            g = source.pieces[piece] + (begin - source.begins[piece]);
        }
        float* u = source.u ? source.u + begin : nullptr;
        visit(Stretch{g, u, source.v + begin, stop - begin, begin, source.factor, &sent});
        begin = stop;
    }
}

}  // namespace dgc
