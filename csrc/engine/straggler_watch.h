// Watches for ranks that are late, on each rank of a world: who waits too long finds out for whom, asks that
// rank where its main thread is, and says it on standard error; after a second limit it ends the world.
//
// All it needs is in the segment, so that no lease and no lock of the engine is taken: it works while the
// driver is stuck, and tells what a stopped rank had submitted. No step of it blocks.
//
// Between hosts the leaders tell each other for what their hosts wait. A rank that is late is found, and
// reported, on its own host; the others only wait for that, and speak up if a host does not answer.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/thread_annotations.h"
#include "base/topology.h"
#include "control/message.h"
#include "control/stragglers.h"
#include "engine/stack.h"
#include "engine/straggler_news.h"
#include "transport/segment.h"

namespace kolovod {

struct StragglerOptions {
  Topology topology{0, {0}};
  RankNames names;                                // by rank of the engine
  std::string where;                              // empty for the world, else which process set this is
  std::shared_ptr<StackSource> stacks;            // null where there is no Python
  std::function<void(const Note&)> tell_leaders;  // of a leader, with several hosts
};

class StragglerWatch {
 public:
  StragglerWatch(Segment& segment, const Config& config, StragglerOptions options);

  // Any thread, often: the engine thread when it wakes, a driver while it waits. Never blocks.
  void Tick();
  // A leader: kLate or kOverdueSeen from another. Any thread.
  void Hear(const Note& note);

  uint64_t reports() const { return reports_.load(std::memory_order_relaxed); }
  // The last report that this rank wrote to standard error.
  std::string last_report() EXCLUDES(mutex_);

 private:
  // A report that waits for the late ranks' stacks. Ranks here are those of the segment.
  struct Report {
    int64_t begun_ns;
    int64_t last_report_ns;        // before this one
    std::vector<uint32_t> asked;   // by rank: what its `answered` must reach; 0 not asked
    std::vector<bool> answered{};  // by rank, at the end
    bool is_clear = false;         // when it was begun: what is waited for, and by whose fault
  };

  bool several_hosts() const { return options_.topology.hosts() > 1; }
  void TickLocked() REQUIRES(mutex_);
  void Answer(int64_t now_ns) REQUIRES(mutex_);
  bool HasReasonToLook(int64_t now_ns) REQUIRES(mutex_);
  void Look(int64_t now_ns) REQUIRES(mutex_);
  void Begin(const StragglerVerdict& verdict, int64_t now_ns, int64_t last_ns) REQUIRES(mutex_);
  // The ranks of this host, then those of others that wait.
  StragglerView View(int64_t now_ns, int64_t last_report_ns) REQUIRES(mutex_);
  // With several hosts, what nobody here is to blame for is the other hosts' to tell, if they can.
  void LeaveToOthers(StragglerVerdict* verdict, int64_t now_ns);
  void TellOthers(const StragglerView& view, const StragglerVerdict& verdict) REQUIRES(mutex_);
  // All that can answer.
  bool HaveAnswered(const Report& report);
  void Finish(int64_t now_ns) REQUIRES(mutex_);
  std::vector<StragglerFinding> BlameSilent(std::vector<StragglerFinding> findings, const Report& report);
  std::string WhereIs(int rank, const Report& report) REQUIRES(mutex_);
  std::string InnermostCall(int rank, const Report& report);
  std::string Stack(int rank);

  Segment& segment_;
  const StragglerOptions options_;
  const int rank_;  // in the segment, as all below that is not said to be of the engine
  const int size_;
  const StragglerLimits limits_;
  const int64_t period_ns_;  // between looks at the own records
  std::atomic<uint64_t> reports_{0};
  StragglerNews news_;

  Mutex mutex_;
  int64_t next_look_ns_ GUARDED_BY(mutex_) = 0;
  uint32_t answered_ GUARDED_BY(mutex_) = 0;
  std::vector<int> shown_ GUARDED_BY(mutex_);  // of the last view: the engine's number of each rank
  std::optional<Report> report_ GUARDED_BY(mutex_);
  std::string last_report_ GUARDED_BY(mutex_);
};

}  // namespace kolovod
