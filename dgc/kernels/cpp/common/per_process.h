// State of a process that a child of fork must not inherit: the parent's threads and whoever held its locks are
// not there any more.
#pragma once

#include <pthread.h>

#include <atomic>
#include <mutex>

namespace dgc {

// One T per process, made when first asked for and never destroyed: threads may sleep in it until the process ends.
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
