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
  if (segment_.rank(dead).left.load(std::memory_order_seq_cst) != 0) return false;
  if (segment_.revoked()) return true;
  segment_.Revoke(Code::kRankLost, liveness_.Describe(dead) +
                                       " died: its process ended without shutting down (killed, "
                                       "crashed or out of memory)");
  return true;
}

void Waiter::NoteCore() {
  const auto core = static_cast<uint32_t>(sched_getcpu() + 1);
  std::atomic<uint32_t>& noted = segment_.rank(rank_).core;
  // Written only when it changes: peers read this line.
  if (noted.load(std::memory_order_relaxed) != core) noted.store(core, std::memory_order_relaxed);
}

void Waiter::SeparateFromPeers(int64_t now_ns) {
  NoteCore();
  if (now_ns < next_separation_ns_) return;
  const uint32_t mine = segment_.rank(rank_).core.load(std::memory_order_relaxed);
  bool shared = false;
  for (int r = 0; r < segment_.layout().size && !shared; ++r) {
    RankBlock& peer = segment_.rank(r);
    shared = r != rank_ && peer.driving.load(std::memory_order_relaxed) != 0 &&
             peer.core.load(std::memory_order_relaxed) == mine;
  }
  if (!shared || mine == 0) return;
  next_separation_ns_ = now_ns + kSeparationPeriodNs;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
  cpu_set_t elsewhere = allowed;
  CPU_CLR(mine - 1, &elsewhere);
  if (sched_setaffinity(0, sizeof(elsewhere), &elsewhere) == 0) {
    sched_setaffinity(0, sizeof(allowed), &allowed);
  }
  NoteCore();
}

Status Waiter::Periodic(bool in_bucket) {
  const int64_t now_ns = NowNs();
  if (now_ns >= next_liveness_check_ns_) {
    next_liveness_check_ns_ = now_ns + kLivenessPeriodNs;
    if (CheckPeers()) return segment_.RevokedStatus();
  }
  if (interrupted_ && now_ns >= next_signal_check_ns_) {
    next_signal_check_ns_ = now_ns + kSignalPeriodNs;
    if (interrupted_()) {
      if (in_bucket) {
        segment_.Revoke(Code::kInterrupted, liveness_.Describe(rank_) +
                                                " was interrupted (signal) in the middle of an "
                                                "operation that had started");
      }
      return Status(Code::kInterrupted, liveness_.Describe(rank_) + " was interrupted by a signal");
    }
  }
  return Status();
}

}  // namespace kolovod
