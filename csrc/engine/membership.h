// Who takes part in a world, and where this rank is among them: constant once the ranks have met.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/topology.h"
#include "transport/faults.h"
#include "transport/liveness.h"
#include "transport/segment.h"

namespace kolovod {

struct Membership {
  int rank = 0;
  int size = 1;
  Topology topology{0, {0}};
  std::vector<int> numbers;  // what messages call each rank: its number in the world
  uint32_t epoch = 0;
  Config config;
  std::shared_ptr<Segment> segment;
  std::unique_ptr<Liveness> liveness;
  std::shared_ptr<LoopbackFaults> faults;  // loopback only

  RankBlock& self() const { return segment->rank(topology.local_rank); }
  // "rank 1 on host a (pid 17)"
  std::string Describe(int r) const { return liveness->Describe(r); }
  int number() const { return numbers[static_cast<size_t>(rank)]; }
  bool has_left(int r) const { return segment->left(r).load(std::memory_order_seq_cst) != 0; }
  // Wakes this rank's engine thread, respectively its driver.
  void WakeIdle() const { segment->WakeIdle(topology.local_rank); }
  void WakeDriver() const { segment->WakeDriver(topology.local_rank); }
};

}  // namespace kolovod
