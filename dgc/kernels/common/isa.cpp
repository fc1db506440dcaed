#include "isa.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "pool.h"

namespace dgc {
namespace {

const char* const names[] = {"portable", "avx2", "avx512"};
std::atomic<int> chosen{0};
std::atomic<int> limit{2};

#if defined(__x86_64__)

bool has(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }

// The instructions that build.py allows for each file. cpuid is asked directly: __builtin_cpu_supports is always false
// where the runtime of the compiler has no model of the CPU, as in Zig's Clang.
Isa best_of_cpu() {
    unsigned a, b, c, d, extended_c, structured_b;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return Isa::portable;
    const bool saves_registers = has(c, bit_OSXSAVE) && has(c, bit_AVX);  // else xgetbv itself is illegal
    const bool counts_and_halves = has(c, bit_POPCNT | bit_F16C);
    if (!saves_registers || !__get_cpuid_count(7, 0, &a, &structured_b, &c, &d)) return Isa::portable;
    if (!__get_cpuid(0x80000001, &a, &b, &extended_c, &d)) return Isa::portable;
    unsigned saved, high;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));  // which registers the system saves for a process
    const unsigned ymm = 0x06, zmm = 0xe6;
    const unsigned of_avx2 = bit_AVX2 | bit_BMI | bit_BMI2;
    const unsigned of_avx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    const unsigned lzcnt = 1u << 5;  // in the extended leaf; compilers name it differently
    if (!counts_and_halves || !has(extended_c, lzcnt) || !has(structured_b, of_avx2) || !has(saved, ymm))
        return Isa::portable;
    return has(structured_b, of_avx512) && has(saved, zmm) ? Isa::avx512 : Isa::avx2;
}

#else

Isa best_of_cpu() { return Isa::portable; }

#endif

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
