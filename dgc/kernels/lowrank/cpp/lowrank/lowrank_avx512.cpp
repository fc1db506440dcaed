#if defined(__x86_64__)

constexpr int lanes = 16;

#include "lowrank_body.h"

namespace dgc {

const LowRankKernels lowrank_avx512 = table;

}  // namespace dgc

#endif
