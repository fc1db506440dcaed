// Scratch memory that the kernels keep between calls. Its size is the size of the largest call so far. Concurrent callers
// use separate instances.
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
    // Space for n elements of T, aligned to a cache line. Previous contents are lost.
    template <class T>
    T* room(int64_t n) {
        size_t needed = (static_cast<size_t>(n) * sizeof(T) + 63) / 64 * 64;
        if (needed > bytes) {
            std::free(memory);
            bytes = needed + needed / 8 / 64 * 64;
            memory = std::aligned_alloc(64, bytes);
            if (!memory) {
                bytes = 0;
                throw std::bad_alloc();
            }
        }
        return static_cast<T*>(memory);
    }

    // The space returned by the last call of room().
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
    Buffer segments, active, units, found, batches;
};

// Exclusive use of a Scratch for the lifetime of the lease, with space for `threads` threads.
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
