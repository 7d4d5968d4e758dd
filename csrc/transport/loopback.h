// N ranks in one process over the real segment code, with faults: for tests, and public as
// kolovod.testing.loopback.
#pragma once

#include <memory>

#include "base/config.h"
#include "base/status.h"
#include "transport/liveness.h"
#include "transport/segment.h"

namespace kolovod {

class LoopbackWorld {
 public:
  static Status Create(int size, const Config& config, std::shared_ptr<LoopbackWorld>* out) {
    auto world = std::make_shared<LoopbackWorld>();
    world->config = config;
    world->faults = std::make_shared<LoopbackFaults>(size);
    KV_RETURN_IF_ERROR(Segment::Map(-1, SegmentLayout(size, config), &world->segment));
    *out = std::move(world);
    return Status();
  }

  // The rank does nothing more, as a process that was killed, and its peers can see that it is dead.
  void Kill(int rank) {
    faults->killed[static_cast<size_t>(rank)].store(true);
    segment->RingDriver(rank);
    segment->RingIdle(rank);
  }

  Config config;
  std::shared_ptr<Segment> segment;
  std::shared_ptr<LoopbackFaults> faults;
};

}  // namespace kolovod
