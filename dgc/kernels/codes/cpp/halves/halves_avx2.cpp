#if defined(__x86_64__)

#include "halves_body.h"

namespace dgc {

const HalvesKernels halves_avx2 = table;

}  // namespace dgc

#endif
