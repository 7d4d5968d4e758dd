// What the holder of the lease does: it reads the log, executes what is ready bucket by bucket, moves
// messages between two ranks, and completes operations. It also ends the world when that has gone wrong.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "engine/completion.h"
#include "engine/control.h"
#include "engine/device_lane.h"
#include "engine/executor.h"
#include "engine/host_links.h"
#include "engine/last_operations.h"
#include "engine/lease.h"
#include "engine/membership.h"
#include "engine/registry.h"
#include "p2p/point_to_point.h"
#include "transport/waiter.h"

namespace kolovod {

// What it works with. All must outlive it.
struct DriverParts {
  const Membership& membership;
  Registry& registry;
  Lease& lease;
  Waiter& waiter;
  Control& control;
  PointToPoint& transfers;
  Executor& executor;
  LastOperations& last_operations;
  HostLinks* links;               // null: one host
  DeviceLane* lane;               // null: tensors are in host memory
  const std::atomic<bool>& stop;  // this rank shuts down
};

class Driver {
 public:
  explicit Driver(const DriverParts& parts);

  // `background`: by the engine thread. `interrupted`: as in Waiter.
  bool TryTakeLease(bool background, std::function<bool()> interrupted) TRY_ACQUIRE(true, kLease);
  void ReleaseLease() RELEASE(kLease);

  // Progresses until `until` is done, `deadline_ns` (0: none) is over, the caller is to look for signals
  // (Waiter::TakePause), or an error. Null: until there is nothing to do and no operation with a callback is
  // pending.
  Status Drive(const Operation* until, int64_t deadline_ns = 0) REQUIRES(kLease);
  // Only moves messages between two ranks: never stays in a bucket until the others have done their part.
  void MoveTransfers() REQUIRES(kLease);
  // After this every pending and later operation fails with `status`.
  void Break(const Status& status) REQUIRES(kLease);

  // Any thread: for some operations this rank looks by itself, whoever waits: they have a callback, or
  // another host.
  bool MustDrive() const { return registry_.HasDriven() || transfers_.WaitsElsewhere(); }
  // Any thread: an operation was appended to the log here. True: so many bytes are ready that the engine
  // thread should drive.
  bool AddReady(size_t bytes) {
    if (ready_bytes_.fetch_add(bytes) + bytes < kick_bytes_) return false;
    ready_bytes_.store(0);
    return true;
  }

  // Any thread: how many buckets have begun here.
  uint64_t buckets() const { return begun_.load(std::memory_order_relaxed); }

  // Operations that were submitted here and are not complete.
  size_t CountPending() const REQUIRES(kOperations);
  // How many operations never completed, and the name of one, counting those that shutting down has failed;
  // empty: none.
  std::string DescribeUnfinished() const REQUIRES(kOperations);

 private:
  Status Step(bool* progressed) REQUIRES(kLease);
  bool HasWork() REQUIRES(kLease);
  bool SeesLeavers() const;
  // Fails what can never complete because a rank left.
  void NoticeLeavers() REQUIRES(kLease);

  // The next bucket has its end, or this rank may decide it.
  bool CanExecute() const REQUIRES(kLease);
  Status ExecuteBucket(bool* progressed) REQUIRES(kLease);
  // Where the next bucket ends; all entries before that have been read then.
  Status AwaitBucketEnd(BucketEnd* end) REQUIRES(kLease);
  // What this rank proposes.
  BucketEnd FindBucketEnd() REQUIRES(kLease);
  // The operations of the log up to there, but for those that the lane holds.
  std::vector<OperationPtr> TakeReady(uint64_t end) REQUIRES(kLease);
  void Complete(const std::vector<OperationPtr>& ops) REQUIRES(kLease);

  Status StepTransfers(bool* progressed) REQUIRES(kLease);
  void CompleteTransfers(const std::vector<OperationPtr>& ops) REQUIRES(kLease);

  // It is pending no more.
  void Erase(const Operation& op) REQUIRES(kOperations);
  void Fail(const OperationPtr& op, const Status& status) REQUIRES(kOperations);
  // Break, and for all ranks if this one's engine is at fault. Returns why the world is over.
  Status EndBy(const Status& status) REQUIRES(kLease);
  // A connection for data broke: the world is over.
  Status EndForAll(const Status& broken);

  const Membership& membership_;
  Registry& registry_;
  Lease& lease_;
  Waiter& waiter_;
  Control& control_;
  PointToPoint& transfers_;
  Executor& executor_;
  LastOperations& last_operations_;
  HostLinks* const links_;
  DeviceLane* const lane_;
  Completion completion_;
  const std::atomic<bool>& stop_;
  const size_t kick_bytes_;             // ready bytes for which the engine thread drives
  std::atomic<size_t> ready_bytes_{0};  // appended here and not yet in a bucket
  std::atomic<uint32_t> leavers_seen_{0};
  std::vector<std::string> abandoned_ GUARDED_BY(kOperations);  // names that shutting down failed

  std::deque<OperationPtr> ready_ GUARDED_BY(kLease);  // read from the log
  uint64_t executed_ GUARDED_BY(kLease) = 0;           // position in the log
  uint64_t bucket_ GUARDED_BY(kLease) = 0;
  std::atomic<uint64_t> begun_{0};                  // the same, for all threads
  std::vector<bool> told_left_ GUARDED_BY(kLease);  // by local rank: the other hosts know
};

}  // namespace kolovod
