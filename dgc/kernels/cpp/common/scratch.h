// Memory that the kernels use while they run and keep for the next call. It is as large as the largest call so far
// needed; callers that run at the same time have one each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>
#include <vector>

#include "per_process.h"

namespace dgc {

class Buffer {
  public:
    // Room for n of T, aligned to a cache line; what it held before is lost.
    template <class T>
    T* room(int64_t n) {
        size_t wanted = (static_cast<size_t>(n) * sizeof(T) + 63) / 64 * 64;
        if (wanted > bytes) {
            std::free(memory);
            bytes = wanted + wanted / 8 / 64 * 64;
            memory = std::aligned_alloc(64, bytes);
            if (!memory) {
                bytes = 0;
                throw std::bad_alloc();
            }
        }
        return static_cast<T*>(memory);
    }

    // The room that was last asked for.
    template <class T>
    T* data() const {
        return static_cast<T*>(memory);
    }

  private:
    void* memory = nullptr;
    size_t bytes = 0;
};

struct Scratch {
    struct Thread {
        Buffer indices, values, counts, more_counts;
    };
    std::deque<Thread> threads;
    Buffer segments, active, units;
};

// A Scratch of one's own for as long as the lease lives, with room for `threads` threads.
class Lease {
  public:
    explicit Lease(int threads) {
        Shelf& shelf = PerProcess<Shelf>::get();
        std::lock_guard<std::mutex> lock(shelf.mutex);
        if (shelf.idle.empty()) shelf.idle.push_back(new Scratch);
        held = shelf.idle.back();
        shelf.idle.pop_back();
        while (static_cast<int>(held->threads.size()) < threads) held->threads.emplace_back();
    }
    ~Lease() {
        Shelf& shelf = PerProcess<Shelf>::get();
        std::lock_guard<std::mutex> lock(shelf.mutex);
        shelf.idle.push_back(held);
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    Scratch* operator->() const { return held; }
    Scratch& operator*() const { return *held; }

  private:
    struct Shelf {
        std::mutex mutex;
        std::vector<Scratch*> idle;
    };
    Scratch* held;
};

}  // namespace dgc
