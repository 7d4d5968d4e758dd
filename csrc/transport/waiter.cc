#include "transport/waiter.h"

#include <sched.h>

#include <vector>

#include "transport/cores.h"

namespace kolovod {

Status Waiter::Stopped() {
  if (segment_.revoked() && !stop_.load()) return segment_.RevokedStatus();
  return Status(Code::kShutDown, "this rank was shut down while an operation was pending");
}

int Waiter::FindLost() {
  int dead = liveness_.FindDead(0);
  while (dead >= 0 && (dead == rank_ || segment_.left(dead).load(std::memory_order_seq_cst) != 0)) {
    dead = liveness_.FindDead(dead + 1);
  }
  return dead;
}

bool Waiter::CheckPeers() {
  const int dead = FindLost();
  if (dead < 0) return false;
  if (segment_.revoked()) return true;
  segment_.Revoke(Code::kRankLost, liveness_.Describe(dead) +
                                       " died: its process ended without shutting down (killed, "
                                       "crashed or out of memory)");
  return true;
}

void Waiter::NoteCore() {
  const auto core = static_cast<uint32_t>(sched_getcpu() + 1);
  std::atomic<uint32_t>& noted = segment_.rank(local_).core;
  // Written only when it changes: peers read this line.
  if (noted.load(std::memory_order_relaxed) != core) noted.store(core, std::memory_order_relaxed);
}

void Waiter::SpreadOverCores(int64_t now_ns) {
  NoteCore();
  if (now_ns < next_spread_ns_) return;
  const auto core_of = [&](int r) {
    RankBlock& peer = segment_.rank(r);
    const bool driving = r != local_ && peer.driving.load(std::memory_order_relaxed) != 0;
    return driving ? static_cast<int>(peer.core.load(std::memory_order_relaxed)) - 1 : -1;
  };
  const int own = static_cast<int>(segment_.rank(local_).core.load(std::memory_order_relaxed)) - 1;
  bool shared = false;
  for (int r = 0; r < segment_.layout().size && !shared; ++r) shared = own >= 0 && core_of(r) == own;
  if (!shared) return;
  next_spread_ns_ = now_ns + kSpreadPeriodNs;
  std::vector<int> cores;
  for (int r = 0; r < segment_.layout().size; ++r) cores.push_back(core_of(r));
  if (LeaveSharedCore(local_, cores)) NoteCore();
}

bool Waiter::HoldsUpAnother() {
  NoteCore();
  const uint32_t own = segment_.rank(local_).core.load(std::memory_order_relaxed);
  for (int r = 0; r < segment_.layout().size; ++r) {
    const RankBlock& peer = segment_.rank(r);
    if (r != local_ && peer.core.load(std::memory_order_relaxed) == own &&
        peer.driver_sleeping.load(std::memory_order_relaxed) == 0) {
      return true;
    }
  }
  return false;
}

Status Waiter::Periodic(bool in_bucket) {
  const int64_t now_ns = NowNs();
  if (watch_) watch_();
  if (now_ns >= next_liveness_check_ns_) {
    next_liveness_check_ns_ = now_ns + kLivenessPeriodNs;
    if (CheckPeers()) return segment_.RevokedStatus();
  }
  const int64_t period_ns = in_bucket ? kSignalPeriodInBucketNs : kSignalPeriodNs;
  if (next_signal_check_ns_ == 0) next_signal_check_ns_ = now_ns + period_ns;
  if (interrupted_ && now_ns >= next_signal_check_ns_) {
    next_signal_check_ns_ = now_ns + period_ns;
    if (pauses_ && !in_bucket) {
      pause_ = true;
    } else if (interrupted_()) {
      if (in_bucket) {
        segment_.Revoke(Code::kInterrupted, liveness_.Describe(rank_) +
                                                " was interrupted (by a signal or its time limit) in "
                                                "the middle of an operation that had started");
      }
      return Status(Code::kInterrupted,
                    liveness_.Describe(rank_) + " was interrupted (by a signal or its time limit)");
    }
  }
  return Status();
}

}  // namespace kolovod
