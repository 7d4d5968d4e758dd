// What the links between hosts cost, measured when a world forms.
#pragma once

#include "collectives/group.h"
#include "collectives/select.h"

namespace kolovod {

// By all members. The first sends the second small messages, which come back, and then ever larger ones until
// one takes 4 ms: in all about 10 ms, and where one of 64 KiB takes longer than that, three times as long as
// it does. On the first `latency_us` and `bytes_per_us` are replaced; the second helps; others have nothing
// to do. The other costs are those of the processors, and stay.
Status MeasureLink(MeshGroup& group, LinkCost* cost);

}  // namespace kolovod
