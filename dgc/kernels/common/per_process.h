// Per-process state that a forked child must not inherit: the parent's threads, and with them the owners of its
// locks, do not exist in the child.
#pragma once

#include <pthread.h>

#include <atomic>
#include <mutex>

namespace dgc {

// One T per process, created on first use and never destroyed, because threads may wait in it until the process ends.
template <class T>
struct PerProcess {
    static T& get() {
        if (T* found = state.load(std::memory_order_acquire)) return *found;
        std::call_once(once, [] {
            renew();
            pthread_atfork(nullptr, nullptr, renew);
        });
        return *state.load();
    }

  private:
    static void renew() { state.store(new T); }

    static inline std::atomic<T*> state{nullptr};
    static inline std::once_flag once;
};

}  // namespace dgc
