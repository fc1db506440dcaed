// PyTorch's OpenMP threads spin for milliseconds after every operation, so a second set of threads would compete with
// them for the cores. The kernels therefore use PyTorch's threads if its OpenMP runtime is libgomp or has its
// interface. They use a separate pool otherwise, and in a forked child, where libgomp does not work.
#include "pool.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "per_process.h"

namespace dgc {
namespace {

// About 50 microseconds. The regions of one call follow each other faster than a sleeping thread wakes up.
constexpr int spins = 1000;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

struct Pool {
    std::mutex region;
    std::mutex mutex;
    std::condition_variable start, end;
    int workers = 0;
    int sleeping = 0;
    bool caller_sleeps = false;
    int threads = 0;
    void (*work)(void*, int) = nullptr;
    void* context = nullptr;
    std::atomic<uint64_t> generation{0};
    std::atomic<int> remaining{0};

    void worker(int thread, uint64_t seen) {
        for (;;) {
            for (int i = 0; i < spins && generation.load(std::memory_order_acquire) == seen; ++i) relax();
            void (*job)(void*, int);
            void* with;
            bool mine;
            {
                std::unique_lock<std::mutex> lock(mutex);
                ++sleeping;
                start.wait(lock, [&] { return generation.load(std::memory_order_relaxed) != seen; });
                --sleeping;
                seen = generation.load(std::memory_order_relaxed);
                job = work;
                with = context;
                mine = thread < threads;
            }
            if (!mine) continue;
            job(with, thread);
            if (remaining.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                std::lock_guard<std::mutex> lock(mutex);
                if (caller_sleeps) end.notify_one();
            }
        }
    }

    void run(int requested, void (*job)(void*, int), void* with) {
        std::lock_guard<std::mutex> one_region(region);
        {
            std::lock_guard<std::mutex> lock(mutex);
            for (; workers < requested - 1; ++workers)
                std::thread(&Pool::worker, this, workers + 1, generation.load()).detach();
            work = job;
            context = with;
            threads = requested;
            remaining.store(requested - 1, std::memory_order_relaxed);
            generation.fetch_add(1, std::memory_order_release);
            if (sleeping) start.notify_all();
        }
        job(with, 0);
        for (int i = 0; i < spins && remaining.load(std::memory_order_acquire); ++i) relax();
        if (!remaining.load(std::memory_order_acquire)) return;
        std::unique_lock<std::mutex> lock(mutex);
        caller_sleeps = true;
        end.wait(lock, [&] { return remaining.load(std::memory_order_acquire) == 0; });
        caller_sleeps = false;
    }
};

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

const GompParallel gomp_parallel = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
const pid_t loaded_by = getpid();

// OpenMP may start fewer threads than requested, so each member takes the next index until none is left.
struct Team {
    void (*work)(void*, int);
    void* context;
    int threads;
    std::atomic<int> next{0};

    static void member(void* team) {
        Team& self = *static_cast<Team*>(team);
        for (int thread; (thread = self.next.fetch_add(1)) < self.threads;) self.work(self.context, thread);
    }
};

}  // namespace

void run_threads(int threads, void (*work)(void*, int), void* context) {
    if (!gomp_parallel || getpid() != loaded_by) {
        PerProcess<Pool>::get().run(threads, work, context);
        return;
    }
    Team team{work, context, threads};
    gomp_parallel(Team::member, &team, static_cast<unsigned>(threads), 0);
}

}  // namespace dgc
