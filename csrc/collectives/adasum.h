// Adasum: a sum that does not overshoot where gradients point the same way (Maleki et al., "Scaling
// Distributed Training with Adaptive Summation", 2020). Of two vectors a and b
//
//   (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b
//
// which is a + b if they are orthogonal and their mean if they are equal; of 2^k ranks, applied to
// neighbours at distance 1, 2, 4, ... One tensor is one vector.
#pragma once

#include "collectives/backend.h"

namespace kolovod {

// Over any backend that has an alltoall: at each level the partners swap their vectors and both compute the
// same bits. Takes twice the range's bytes of memory meanwhile; kInternal without it. `size` is a power
// of two, the dtype a floating one. 16-bit types are computed in float32 and rounded once per level.
Status Adasum(Backend& backend, const FusedRange& range, int rank, int size);

// One pair; out may be a or b. A vector whose |.|^2 vanishes counts in full.
void AdasumPair(DType dtype, const void* a, const void* b, void* out, size_t count);

}  // namespace kolovod
