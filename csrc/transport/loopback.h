// N ranks in one process over the real segment code, with faults: for tests, and public as
// kolovod.testing.loopback.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "base/config.h"
#include "base/status.h"
#include "transport/liveness.h"
#include "transport/segment.h"

namespace kolovod {

class LoopbackWorld {
 public:
  static Status Create(int size, const Config& config, std::shared_ptr<LoopbackWorld>* out) {
    std::vector<int> ranks;
    for (int r = 0; r < size; ++r) ranks.push_back(r);
    return Create(std::move(ranks), config, nullptr, out);
  }

  // A process set: some ranks of this world, which share its fate and its faults.
  Status MakeSet(std::vector<int> members, std::shared_ptr<LoopbackWorld>* out) {
    KV_RETURN_IF_ERROR(Create(std::move(members), config, segment, out));
    std::lock_guard lock(mutex_);
    sets_.push_back(*out);
    return Status();
  }

  // The rank does nothing more, as a process that was killed, and its peers can see that it is dead.
  void Kill(int rank) {
    ForEach(rank, [](LoopbackWorld& world, int index) {
      world.faults->killed[static_cast<size_t>(index)].store(true);
      world.segment->RingDriver(index);
      world.segment->RingIdle(index);
    });
  }
  void Delay(int rank, int us) {
    ForEach(rank, [us](LoopbackWorld& world, int index) {
      world.faults->delay_us[static_cast<size_t>(index)].store(us);
    });
  }
  void Drop(int rank, int count) {
    ForEach(rank, [count](LoopbackWorld& world, int index) {
      world.faults->drop[static_cast<size_t>(index)].store(count);
    });
  }

  Config config;
  std::vector<int> ranks;  // numbers in the world
  std::shared_ptr<Segment> segment;
  std::shared_ptr<Segment> world;  // of a process set
  std::shared_ptr<LoopbackFaults> faults;

 private:
  static Status Create(std::vector<int> ranks, const Config& config, std::shared_ptr<Segment> world,
                       std::shared_ptr<LoopbackWorld>* out) {
    const auto size = static_cast<int>(ranks.size());
    auto made = std::make_shared<LoopbackWorld>();
    made->config = config;
    made->ranks = std::move(ranks);
    made->world = std::move(world);
    made->faults = std::make_shared<LoopbackFaults>(size);
    KV_RETURN_IF_ERROR(Segment::Map(-1, SegmentLayout(size, config), &made->segment));
    *out = std::move(made);
    return Status();
  }

  // Calls visit(world, index of the rank there) for this world and the sets that the rank is in.
  template <class Visit>
  void ForEach(int rank, Visit visit) {
    visit(*this, rank);
    std::lock_guard lock(mutex_);
    for (const auto& set : sets_) {
      const auto found = std::find(set->ranks.begin(), set->ranks.end(), rank);
      if (found != set->ranks.end()) visit(*set, static_cast<int>(found - set->ranks.begin()));
    }
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<LoopbackWorld>> sets_;  // guarded by mutex_
};

}  // namespace kolovod
