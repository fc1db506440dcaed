#if defined(__x86_64__)

#include "decode_body.h"

namespace dgc {

const DecodeKernels decode_avx512 = table;

}  // namespace dgc

#endif
