// The operations that were submitted to this rank: their handles, the threads that sleep until one is done,
// and the callbacks that are due. It owns the mutex under which operations are submitted and completed.
//
// It does not know what an operation waits for: pending operations are found in Announcer (by name) and
// PointToPoint (by number).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <thread>
#include <unordered_map>
#include <vector>

#include "engine/locks.h"
#include "engine/operation.h"

namespace kolovod {

struct CompletionStats {
  uint64_t operations = 0;     // completed without error
  uint64_t staged = 0;         // of them, those whose data came with their announcement
  uint64_t buckets = 0;        // with data
  uint64_t bytes = 0;          // of tensors in completed operations
  uint64_t drives_caller = 0;  // buckets executed by blocking callers
  uint64_t drives_thread = 0;  // and by the engine thread
};

class Registry {
 public:
  using Clock = std::chrono::steady_clock;

  OperationsMutex& mutex() { return mutex_; }

  // Handles: from submission until Release.
  uint64_t Keep(const OperationPtr& op) REQUIRES(kOperations) {
    handles_[next_handle_] = op;
    return next_handle_++;
  }
  // Null if unknown.
  OperationPtr Find(uint64_t handle) EXCLUDES(kOperations);
  Status Release(uint64_t handle, bool* done) EXCLUDES(kOperations);

  // Operations without a name: the number by which they are matched, and how many joins came before, since
  // the ranks count anew after one.
  uint64_t NumberUnnamed() { return next_unnamed_.fetch_add(1); }
  uint64_t joins() const { return joins_.load(); }
  // This rank has no data until its join is complete.
  bool has_joined() const REQUIRES(kOperations) { return has_joined_; }
  void BeginJoin() REQUIRES(kOperations) { has_joined_ = true; }
  // Nothing is pending anywhere, and the ranks have numbered unequally many.
  void EndJoin() REQUIRES(kOperations) {
    has_joined_ = false;
    joins_.fetch_add(1);
    next_unnamed_.store(1);
  }

  // Why no operation can complete any more; OK until then. The first reason stays.
  const Status& broken() const REQUIRES(kOperations) { return broken_; }
  void Break(Status status) REQUIRES(kOperations) {
    if (broken_.ok()) broken_ = std::move(status);
  }

  // Its status is final: marks it done. After that: WakeCallers, and RunCallbacks without the mutex.
  void Finish(const OperationPtr& op) REQUIRES(kOperations);
  void Count(const Operation& op) REQUIRES(kOperations);
  void CountBucket(bool has_data, bool by_engine_thread) REQUIRES(kOperations);
  CompletionStats stats() const REQUIRES(kOperations) { return stats_; }
  void WakeCallers() REQUIRES(kOperations) {
    if (sleeping_callers_ > 0) changed_.notify_all();
  }
  void RunCallbacks() EXCLUDES(kOperations);
  bool RunsCallbacksHere() const { return calling_back_.load() == std::this_thread::get_id(); }

  // Operations that this rank drives although nobody waits by driving: they have a callback, or a thread that
  // sleeps with a time limit.
  bool HasDriven() const { return driven_.load(std::memory_order_seq_cst) > 0; }
  void AddDriven() { driven_.fetch_add(1); }
  // True: that was the last.
  bool DropDriven() { return driven_.fetch_sub(1) == 1; }

  // Sleeps until the operation is done, wakes() holds (looked at when WakeCallers is called), or `until`.
  template <class Wakes>
  void Sleep(const Operation& op, Clock::time_point until, Wakes wakes) EXCLUDES(kOperations) {
    OperationsLock lock(mutex_);
    ++sleeping_callers_;
    changed_.wait_until(lock.native(), until,
                        [&] { return op.done.load(std::memory_order_acquire) || wakes(); });
    --sleeping_callers_;
  }

 private:
  OperationsMutex mutex_;
  std::condition_variable changed_;  // an operation completed, or the lease became free
  int sleeping_callers_ GUARDED_BY(kOperations) = 0;
  std::unordered_map<uint64_t, OperationPtr> handles_ GUARDED_BY(kOperations);
  uint64_t next_handle_ GUARDED_BY(kOperations) = 1;
  bool has_joined_ GUARDED_BY(kOperations) = false;
  std::atomic<uint64_t> next_unnamed_{1};
  std::atomic<uint64_t> joins_{0};  // that are over
  Status broken_ GUARDED_BY(kOperations);
  std::vector<OperationPtr> finished_ GUARDED_BY(kOperations);  // their callbacks are due
  CompletionStats stats_ GUARDED_BY(kOperations);
  std::atomic<int> driven_{0};
  std::atomic<std::thread::id> calling_back_{};
};

}  // namespace kolovod
