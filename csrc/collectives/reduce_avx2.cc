// Compiled with AVX2 and F16C (CMakeLists.txt); entered only after the processor said it has them.
#define KV_ISA isa_avx2
#define KV_ISA_NAME "avx2"
#include "collectives/reduce_kernels.h"
