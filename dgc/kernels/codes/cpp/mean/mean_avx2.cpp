#if defined(__x86_64__)

#include "mean_body.h"

namespace dgc {

const MeanKernels mean_avx2 = mean_table;

}  // namespace dgc

#endif
