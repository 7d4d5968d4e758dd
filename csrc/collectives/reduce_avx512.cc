// Compiled with AVX-512 (CMakeLists.txt); entered only after the processor said it has it. Of other types and
// codecs the set has AVX2's kernels, which are as fast.
#define KV_ISA isa_avx512
#define KV_16_BIT_FLOATS
#include "collectives/reduce_kernels.h"
