// Threads of the native kernels. One pool per process; a child of fork gets a pool of its own.
#pragma once

#include <cstdint>

#define DGC_EXPORT extern "C" __attribute__((visibility("default")))

namespace dgc {

// work(context, thread) for thread = 0 .. threads - 1, the caller being thread 0. One region at a time:
// callers from several threads wait for each other, and a region must not start another.
void run_threads(int threads, void (*work)(void*, int), void* context);

// Calls work(thread) for thread = 0 .. threads - 1 at once and returns when all have returned.
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
