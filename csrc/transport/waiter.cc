#include "transport/waiter.h"

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
