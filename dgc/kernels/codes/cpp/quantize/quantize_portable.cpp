#include "quantize_body.h"

namespace dgc {

const QuantizeKernels quantize_portable = table;

}  // namespace dgc
