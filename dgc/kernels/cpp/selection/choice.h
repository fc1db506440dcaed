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

// What a pass reads: pieces of the gradient that follow one another, the state, and what is to be taken out of it.
struct Source {
    Update update;
    const float* const* pieces;
    const int64_t* begins;  // where each piece begins in the bucket, and n
    int piece_count;
    float* u;
    float* v;
    float momentum;
    Sent sent;
};

struct Segment {
    int64_t begin, size;
    int64_t k;                        // at most size
    int64_t requested;                    // as asked for
    int64_t output;                   // where its choice goes
    int64_t candidate_limit;                   // more candidates mean that the lower bound was too low
    uint32_t lower_bound;                   // bits of the magnitude from which on elements are candidates
    int shift;                        // of the bins that cut_for looks at first
    bool expected;                    // the lower bound is the caller's
    int64_t found;                    // how many were chosen
    bool chosen;                      // that many, for good
    float threshold;
    int64_t first_unit, units;
    std::atomic<int64_t> candidates;  // collected so far
    std::atomic<int64_t> units_left;
};

// Some elements of one segment, and where what was collected of them lies in the memory of the thread that did it.
struct Unit {
    int64_t segment, begin, end;  // elements of the bucket
    int thread;
    int64_t first, count;  // candidates
};

// Segments no larger are collected whole where no lower bound is known.
constexpr int64_t small_range = 4096;

// A lower bound a little below the k-th largest of the segment as it will be after the update, judged by a sample.
// Only a
// guess: whoever uses it checks.
uint32_t sampled_lower_bound(Source source, const Segment& segment, Buffer& memory);

// All that one call works on.
struct Job {
    Source source;
    Segment* segments;
    int64_t* active;  // the segments still to be chosen, ascending
    int64_t active_count;
    int threads;
    Scratch& scratch;
    Unit* units = nullptr;
};

// Gives every active segment that has no lower bound of the caller's a sampled one.
void set_lower_bounds(Job& job);

// Does the pass over all active segments. A segment that is through is handed to `choose` at once, by the thread that
// was
// last in it: its candidates are still at hand, and the other threads go on. Those for which it returns true are
// active no more. Returns the first element of g that is NaN or too large, n where there is none.
int64_t collect(Job& job, int64_t n, const std::function<bool(Segment&)>& choose);

// The choice by counting all magnitudes of v in the segment: three reads of it, whatever the numbers are.
void choose_by_counting(const float* v, Segment& segment, int threads, Scratch& scratch, int32_t* indices,
                        float* values);

// Calls visit(i, thread) for i = 0 .. n - 1, each time on whichever thread is free.
template <class Visit>
static void share_out(int64_t n, int threads, Visit&& visit) {
    std::atomic<int64_t> next{0};
    parallel_for(threads, [&](int thread) {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) visit(i, thread);
    });
}

// What of it lies at or behind `begin`; quickly found where that is near.
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
        visit(Stretch{g, u, source.v + begin, stop - begin, begin, source.momentum, &sent});
        begin = stop;
    }
}

}  // namespace dgc
