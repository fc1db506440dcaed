// Threads of the native kernels: torch's own OpenMP team where there is one, else a pool of the process. In a child
// of fork OpenMP is unusable; if this library was loaded before the fork, the child gets a pool.
#pragma once

#include <cstdint>

#define DGC_EXPORT extern "C" __attribute__((visibility("default")))

namespace dgc {

// work(context, thread) for thread = 0 .. threads - 1, each exactly once, by any thread and in any order: one
// may do several in turn. A region must not wait for parts of itself, nor start another.
void run_threads(int threads, void (*work)(void*, int), void* context);

// Calls work(thread) for thread = 0 .. threads - 1 and returns when all have returned.
// Static, as every helper in a header here: a copy compiled for AVX-512 must never serve another file.
template <class Work>
static void parallel_for(int threads, Work&& work) {
    if (threads <= 1) {
        work(0);
        return;
    }
    run_threads(threads, [](void* context, int thread) { (*static_cast<Work*>(context))(thread); }, &work);
}

// Where part `part` of `parts` nearly equal parts of n begins, in multiples of `grain` (n itself at the end).
static inline int64_t part_begin(int64_t n, int parts, int part, int64_t grain) {
    if (part >= parts) return n;
    int64_t begin = n / parts * part + n % parts * part / parts;
    return begin / grain * grain;
}

}  // namespace dgc
