constexpr int lanes = 4;

#include "lowrank_body.h"

namespace dgc {

const LowRankKernels lowrank_portable = table;

}  // namespace dgc
