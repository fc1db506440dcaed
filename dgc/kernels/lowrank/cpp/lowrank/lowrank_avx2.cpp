#if defined(__x86_64__)

constexpr int lanes = 8;

#include "lowrank_body.h"

namespace dgc {

const LowRankKernels lowrank_avx2 = table;

}  // namespace dgc

#endif
