// Watches for ranks that are late, on each rank of a world: who waits too long finds out for whom, asks that
// rank where its main thread is, and says it on standard error; after a second limit it ends the world.
//
// All it needs is in the segment, so that no lease and no lock of the engine is taken: it works while the
// driver is stuck, and tells what a stopped rank had submitted. No step of it blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "control/late.h"
#include "engine/stack.h"
#include "transport/segment.h"

namespace kolovod {

class LateWatch {
 public:
  // `stacks`: null where there is no Python.
  // Ranks are counted as in the segment. `where`: empty for the world, else which process set this is.
  LateWatch(Segment& segment, int rank, const Config& config, RankNames names, std::string where,
            std::shared_ptr<StackSource> stacks);

  // Any thread, often: the engine thread when it wakes, a driver while it waits. Never blocks.
  void Tick();

  uint64_t reports() const { return reports_.load(std::memory_order_relaxed); }
  // The last report that this rank wrote to standard error.
  std::string last_report();

 private:
  // A report that waits for the late ranks' stacks.
  struct Report {
    int64_t begun_ns;
    int64_t last_report_ns;        // before this one
    std::vector<uint32_t> asked;   // by rank: what its `answered` must reach; 0 not asked
    std::vector<bool> answered{};  // by rank, at the end
  };

  void Answer(int64_t now_ns);
  void Look(int64_t now_ns);
  LateView View(int64_t now_ns, int64_t last_report_ns);
  bool HaveAnswered(const Report& report);
  void Finish(int64_t now_ns);
  std::vector<LateFinding> BlameSilent(std::vector<LateFinding> findings, const Report& report);
  std::string WhereIs(int rank, const Report& report);
  std::string InnermostCall(int rank, const Report& report);
  std::string Stack(int rank);

  Segment& segment_;
  const int rank_;
  const int size_;
  const LateLimits limits_;
  const int64_t period_ns_;  // between looks at the own records
  const RankNames names_;
  const std::string where_;
  const std::shared_ptr<StackSource> stacks_;
  std::atomic<uint64_t> reports_{0};

  std::mutex mutex_;  // guards what follows
  int64_t next_look_ns_ = 0;
  uint32_t answered_ = 0;
  std::optional<Report> report_;
  std::string last_report_;
};

}  // namespace kolovod
