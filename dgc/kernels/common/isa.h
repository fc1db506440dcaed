// The instruction set of the kernels, chosen once when the library is loaded.
#pragma once

namespace dgc {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2 };

// The instruction set in use: the best of the CPU, unless the environment selects a lower one.
Isa isa();

}  // namespace dgc
