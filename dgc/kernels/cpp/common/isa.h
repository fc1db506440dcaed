// Which instructions the kernels use. Chosen once, when the library is loaded.
#pragma once

namespace dgc {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2 };

// The instruction set in use: what the CPU has, unless the environment asks for less.
Isa isa();

}  // namespace dgc
