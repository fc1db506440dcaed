// Threads of the native kernels: PyTorch's OpenMP team if available, else a pool of the process. OpenMP does not work
// in a forked child; if this library was loaded before the fork, the child uses a pool.
#pragma once

#include <cstdint>

#define DGC_EXPORT extern "C" __attribute__((visibility("default")))

namespace dgc {

// Calls work(context, thread) for thread = 0 .. threads - 1, each exactly once and in any order. One thread may run
// several of the calls. A call must not wait for another call of the same region, and must not start a new region.
void run_threads(int threads, void (*work)(void*, int), void* context);

// Calls work(thread) for thread = 0 .. threads - 1 and returns when all have returned.
// Helpers in these headers are static: other files must never link to a copy compiled for AVX-512.
template <class Work>
static void parallel_for(int threads, Work&& work) {
    if (threads <= 1) {
        work(0);
        return;
    }
    run_threads(threads, [](void* context, int thread) { (*static_cast<Work*>(context))(thread); }, &work);
}

// The start of part `part` when n is split into `parts` nearly equal parts: a multiple of `grain`, or n at the end.
static inline int64_t part_begin(int64_t n, int parts, int part, int64_t grain) {
    if (part >= parts) return n;
    int64_t begin = n / parts * part + n % parts * part / parts;
    return begin / grain * grain;
}

}  // namespace dgc
