#if defined(__x86_64__)

#include "quantize_body.h"

namespace dgc {

const QuantizeKernels quantize_avx2 = table;

}  // namespace dgc

#endif
