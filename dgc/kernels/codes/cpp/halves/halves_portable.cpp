#include "halves_body.h"

namespace dgc {

const HalvesKernels halves_portable = table;

}  // namespace dgc
