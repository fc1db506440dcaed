// Operations at the selected indices only: subtract the sent values and update the parameters. The elements are
// scattered and not in the cache, so they are prefetched.
#include <algorithm>

#include "accumulate/pass.h"
#include "common/pool.h"

namespace dgc {
namespace {

constexpr int64_t ahead = 24;
constexpr int64_t worth_a_thread = 2048;

int threads_for(int64_t count, int threads) {
    return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, count / worth_a_thread)));
}

void take(const int32_t* indices, const float* sent, int64_t begin, int64_t end, float* u, float* v) {
    for (int64_t i = begin; i < end; ++i) {
        if (i + ahead < end) {
            __builtin_prefetch(v + indices[i + ahead], 1);
            if (u) __builtin_prefetch(u + indices[i + ahead], 1);
        }
        int32_t at = indices[i];
        v[at] -= sent[i];
        if (u) u[at] = 0.0f;
    }
}

}  // namespace
}  // namespace dgc

// v[i] -= sent for every index i, and u[i] = 0 unless u is null.
DGC_EXPORT void dgc_take(const int32_t* indices, const float* sent, const int32_t* count, float* u, float* v,
                         int threads) {
    const int64_t n = *count;
    threads = dgc::threads_for(n, threads);
    dgc::parallel_for(threads, [&](int t) {
        dgc::take(indices, sent, dgc::part_begin(n, threads, t, 16), dgc::part_begin(n, threads, t + 1, 16), u, v);
    });
}

// targets[s][i - bounds[s]] -= factors[s] * value for the ascending indices i of each segment s.
DGC_EXPORT void dgc_subtract_at(float* const* targets, const int64_t* bounds, int64_t segments,
                                const int64_t* indices, const float* values, int64_t count, const float* factors,
                                int threads) {
    threads = dgc::threads_for(count, threads);
    dgc::parallel_for(threads, [&](int t) {
        int64_t i = dgc::part_begin(count, threads, t, 16);
        const int64_t end = dgc::part_begin(count, threads, t + 1, 16);
        if (i == end) return;
        int64_t s = std::upper_bound(bounds, bounds + segments + 1, indices[i]) - bounds - 1;
        for (; i < end; ++s) {
            float* target = targets[s];
            const float factor = factors[s];
            for (; i < end && indices[i] < bounds[s + 1]; ++i) {
                if (i + dgc::ahead < end && indices[i + dgc::ahead] < bounds[s + 1])
                    __builtin_prefetch(target + (indices[i + dgc::ahead] - bounds[s]), 1);
                target[indices[i] - bounds[s]] -= values[i] * factor;
            }
        }
    });
}

DGC_EXPORT void dgc_decay(float* p, float* buffer, int64_t n, float lr, float weight_decay, float momentum,
                          int nesterov, int threads) {
    const auto kernel = dgc::pass_kernels().decay;
    if (n < 65536) threads = 1;
    dgc::parallel_for(threads, [&](int t) {
        const int64_t begin = dgc::part_begin(n, threads, t, 16), end = dgc::part_begin(n, threads, t + 1, 16);
        kernel(p + begin, buffer + begin, end - begin, lr, weight_decay, momentum, nesterov);
    });
}
