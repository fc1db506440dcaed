#include "mean_body.h"

namespace dgc {

const MeanKernels mean_portable = mean_table;

}  // namespace dgc
