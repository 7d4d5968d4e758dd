// Allreduce by collecting everybody's data everywhere: each member adds all of it in the order of members, so
// the bits are those of the owner's in pairwise.h. One way instead of two, for (N-1)/2 times the bytes or
// more.
#pragma once

#include "collectives/combine.h"
#include "collectives/group.h"

namespace kolovod {

// One message from everybody to everybody per block of `block_bytes`; blocks are pipelined.
Status DirectAllreduce(MeshGroup& group, PackedRange& range, const Combine& combine, size_t block_bytes,
                       Scratch& scratch);

// N binomial trees at once, each member the root of one: after step k a member has the data of the 2^k
// members before it, and passes all of that on. log2(N) messages per member instead of N-1.
Status TreeAllreduce(MeshGroup& group, PackedRange& range, const Combine& combine, Scratch& scratch);

}  // namespace kolovod
