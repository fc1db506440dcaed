#include "decode_body.h"

namespace dgc {

const DecodeKernels decode_portable = table;

}  // namespace dgc
