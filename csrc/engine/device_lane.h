// Operations whose tensors are on a device, in the order of the log: a thread carries them, batch by batch,
// beside those in host memory, which the engine that carries them may need to connect the ranks.
//
// What is ready while a batch is on its way goes together in the next one. So that all ranks cut batches
// alike, the end of a bucket says whether what is held back begins (BucketEnd::starts_device): who closes a
// bucket looks at its own lane.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/thread_annotations.h"
#include "collectives/external.h"
#include "engine/completion.h"
#include "engine/executor.h"
#include "engine/membership.h"
#include "engine/operation.h"

namespace kolovod {

class DeviceLane {
 public:
  // `stop`: this rank shuts down. All must outlive it.
  DeviceLane(const Membership& membership, Completion completion, const std::atomic<bool>& stop);
  ~DeviceLane();
  DeviceLane(const DeviceLane&) = delete;
  DeviceLane& operator=(const DeviceLane&) = delete;

  // Where its batches go.
  ExternalBackend& external() { return *external_; }
  // This rank's tensors are on GPU number `gpu`; an error if they have been on another.
  Status Choose(int gpu) REQUIRES(kOperations);

  // Whether this operation, which is next in the log, goes this way. So does a join, which is complete when
  // all before it are.
  static bool Takes(const Operation& op) {
    return op.status.ok() && (op.request.device() != Device::kHost || op.request.verb == Verb::kJoin);
  }
  // What the next batch consists of until Begin.
  void Hold(OperationPtr op) REQUIRES(kLease);
  const std::vector<OperationPtr>& held() const REQUIRES(kLease) { return held_; }
  // Whether a bucket that ends before `ready[taken]` is to begin the next batch, as far as this rank sees.
  bool ShouldBegin(const std::deque<OperationPtr>& ready, size_t taken) const REQUIRES(kLease);
  // Nothing is on its way.
  bool idle() const { return batches_.load(std::memory_order_seq_cst) == 0; }
  // What is held, which is something, is carried from now on.
  void Begin() REQUIRES(kLease);

  // Gives up what is on its way; after that no tensor is touched any more. Idempotent.
  void Stop();
  // In a forked child, which has no such thread.
  void Forget();

 private:
  void Serve();
  // False: the world is over.
  bool Carry(const std::vector<OperationPtr>& batch);

  const Membership& membership_;
  Completion completion_;
  const std::atomic<bool>& stop_;
  std::atomic<bool> stopping_{false};
  std::unique_ptr<Executor> executor_;
  ExternalBackend* external_ = nullptr;  // the executor's
  int gpu_ GUARDED_BY(kOperations) = -1;
  std::vector<OperationPtr> held_ GUARDED_BY(kLease);
  size_t held_bytes_ GUARDED_BY(kLease) = 0;
  std::atomic<size_t> batches_{0};  // queued or carried
  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::vector<OperationPtr>> queue_ GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace kolovod
