#define KV_ISA isa_base
#define KV_ISA_NAME "base"
#include "collectives/reduce_kernels.h"
