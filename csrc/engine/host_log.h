// A leader's hand on the log of its host: what the root has decided goes into the log in that order, and the
// responses into the ring from which the ranks of the host read them. All under the lease.
//
// An entry that stands for a response is appended once the whole response is in the ring.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <string>

#include "control/log.h"
#include "control/message_ring.h"
#include "engine/locks.h"
#include "engine/membership.h"

namespace kolovod {

class HostLog {
 public:
  HostLog(const Membership& membership, Log& log);

  // Next in the log: a response, a bit, or (which takes no entry) that a rank of another host has left.
  void PushResponse(const std::string& body) REQUIRES(kLease);
  void PushBit(uint32_t id) REQUIRES(kLease) { order_.push_back(static_cast<int64_t>(id)); }
  void PushLeft(int rank) REQUIRES(kLease) { order_.push_back(kLeftBase - rank); }
  // Bit `id` will stand for another name.
  void Reset(uint32_t id) REQUIRES(kLease) { log_.Reset(id); }
  // The root of another host has decided where a bucket ends.
  void CloseBucket(uint64_t bucket, BucketEnd end) REQUIRES(kLease);

  // Moves to the ring what there is room for, and appends what is complete.
  void Flush() REQUIRES(kLease);
  bool CanFlush() const REQUIRES(kLease) { return !responses_.empty() && responses_.HasRoom(); }
  // True: the ranks of this host must read before more can be written.
  bool lags() const REQUIRES(kLease) { return !responses_.empty(); }
  // Ranks of other hosts wait for the data of those of this host that nobody drives.
  void WakeUndriven() const;

  // Any thread.
  uint64_t message_bytes() const { return message_bytes_.load(std::memory_order_relaxed); }

 private:
  // What order_ holds beside the bits of cached names.
  static constexpr int64_t kResponse = -1;
  static constexpr int64_t kLeftBase = -2;  // minus the rank

  void AppendInOrder() REQUIRES(kLease);
  void MarkLeft(int rank) REQUIRES(kLease);

  const Membership& membership_;
  Log& log_;
  MessageRingWriter responses_ GUARDED_BY(kLease);
  std::deque<int64_t> order_ GUARDED_BY(kLease);  // not in the log yet
  int complete_ GUARDED_BY(kLease) = 0;           // responses that are in the ring and not in the log
  std::atomic<uint64_t> message_bytes_{0};
};

}  // namespace kolovod
