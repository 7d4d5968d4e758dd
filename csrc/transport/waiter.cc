#include "transport/waiter.h"

#include <sched.h>

namespace kolovod {

Status Waiter::Stopped() {
  if (segment_.revoked() && !stop_.load()) return segment_.RevokedStatus();
  return Status(Code::kShutDown, "this rank was shut down while an operation was pending");
}

bool Waiter::CheckPeers() {
  const int dead = liveness_.FindDead();
  if (dead < 0 || dead == rank_) return false;
  if (segment_.left(dead).load(std::memory_order_seq_cst) != 0) return false;
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

bool Waiter::ShouldLeave(uint32_t core, const cpu_set_t& allowed) {
  int drivers[CPU_SETSIZE] = {};
  for (int r = 0; r < segment_.layout().size; ++r) {
    RankBlock& peer = segment_.rank(r);
    if (r != local_ && peer.driving.load(std::memory_order_relaxed) == 0) continue;
    const uint32_t noted = peer.core.load(std::memory_order_relaxed);
    if (noted == 0 || noted > CPU_SETSIZE) continue;
    if (r < local_ && noted - 1 == core) return false;
    ++drivers[noted - 1];
  }
  for (uint32_t other = 0; other < CPU_SETSIZE; ++other) {
    if (CPU_ISSET(other, &allowed) && drivers[core] >= drivers[other] + 2) return true;
  }
  return false;
}

void Waiter::SpreadOverCores(int64_t now_ns) {
  NoteCore();
  if (now_ns < next_spread_ns_) return;
  const uint32_t noted = segment_.rank(local_).core.load(std::memory_order_relaxed);
  if (noted == 0 || noted > CPU_SETSIZE) return;
  bool shared = false;
  for (int r = 0; r < segment_.layout().size && !shared; ++r) {
    RankBlock& peer = segment_.rank(r);
    shared = r != local_ && peer.driving.load(std::memory_order_relaxed) != 0 &&
             peer.core.load(std::memory_order_relaxed) == noted;
  }
  if (!shared) return;
  next_spread_ns_ = now_ns + kSpreadPeriodNs;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || !ShouldLeave(noted - 1, allowed)) return;
  cpu_set_t elsewhere = allowed;
  CPU_CLR(noted - 1, &elsewhere);
  if (sched_setaffinity(0, sizeof(elsewhere), &elsewhere) == 0) {
    sched_setaffinity(0, sizeof(allowed), &allowed);
  }
  NoteCore();
}

Status Waiter::Periodic(bool in_bucket) {
  const int64_t now_ns = NowNs();
  if (watch_) watch_();
  if (now_ns >= next_liveness_check_ns_) {
    next_liveness_check_ns_ = now_ns + kLivenessPeriodNs;
    if (CheckPeers()) return segment_.RevokedStatus();
  }
  if (next_signal_check_ns_ == 0) next_signal_check_ns_ = now_ns + kSignalPeriodNs;
  if (interrupted_ && now_ns >= next_signal_check_ns_) {
    next_signal_check_ns_ = now_ns + kSignalPeriodNs;
    if (interrupted_()) {
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
