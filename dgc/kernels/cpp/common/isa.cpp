#include "isa.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

#include "pool.h"

namespace dgc {
namespace {

const char* const names[] = {"portable", "avx2", "avx512"};
std::atomic<int> chosen{0};
std::atomic<int> limit{2};

Isa best_of_cpu() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool bits = __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    if (bits && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return Isa::avx512;
    if (bits && __builtin_cpu_supports("avx2")) return Isa::avx2;
#endif
    return Isa::portable;
}

}  // namespace

Isa isa() { return static_cast<Isa>(chosen.load(std::memory_order_relaxed)); }

}  // namespace dgc

// Identifies the sources, compiler and flags of this build.
DGC_EXPORT const char* dgc_stamp() { return DGC_STAMP; }

DGC_EXPORT const char* dgc_isa() { return dgc::names[dgc::chosen.load()]; }

// Limits detection to this dgc::Isa. For tests.
DGC_EXPORT void dgc_limit_isa(int most) { dgc::limit.store(most); }

// The best instruction set of the CPU, as a dgc::Isa.
DGC_EXPORT int dgc_best_isa() { return std::min(static_cast<int>(dgc::best_of_cpu()), dgc::limit.load()); }

// Selects the instruction set named `asked`, or the best one of the CPU if `asked` is empty. Returns null on success,
// else an error message.
DGC_EXPORT const char* dgc_choose_isa(const char* asked) {
    static char refusal[256];
    const int best = dgc_best_isa();
    if (!*asked) {
        dgc::chosen.store(best);
        return nullptr;
    }
    for (int i = 0; i < 3; ++i) {
        if (std::strcmp(asked, dgc::names[i])) continue;
        if (i > best) {
            std::snprintf(refusal, sizeof refusal, "DGC_KERNELS_ISA=%s: this CPU has only %s", asked,
                          dgc::names[best]);
            return refusal;
        }
        dgc::chosen.store(i);
        return nullptr;
    }
    std::snprintf(refusal, sizeof refusal, "DGC_KERNELS_ISA=%.64s: expected portable, avx2 or avx512", asked);
    return refusal;
}
