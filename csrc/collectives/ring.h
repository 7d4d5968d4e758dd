// The classic ring: every member sends to its right neighbour only and receives from its left one only,
// 2(N-1)/N times the range in all. For links on which many flows at once do badly. A slice is added up on its
// way around, beginning behind its owner, and 16-bit types are rounded at every hop: the bits differ from
// those of the other algorithms, though not between ranks or runs.
#pragma once

#include <vector>

#include "collectives/combine.h"
#include "collectives/group.h"

namespace kolovod {

// Not for what needs one place (NeedsOnePlace).
Status RingAllreduce(MeshGroup& group, PackedRange& range, const Combine& combine, size_t portion_bytes,
                     Scratch& scratch);

// Member m has slices[m] of the outputs; afterwards everybody has all.
Status RingAllgather(MeshGroup& group, PackedRange& range, const std::vector<Slice>& slices,
                     size_t portion_bytes);

}  // namespace kolovod
