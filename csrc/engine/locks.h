// The two locks that the classes of one engine share.
#pragma once

#include "base/thread_annotations.h"

namespace kolovod {

// Held: this thread has the engine's OperationsMutex, which guards what submitting threads and the driver
// share.
inline constexpr Role kOperations;
// Held: this thread drives the engine (engine/lease.h).
inline constexpr Role kLease;

class OperationsMutex {
 public:
  void lock() ACQUIRE(kOperations) NO_THREAD_SAFETY_ANALYSIS { mutex_.lock(); }
  void unlock() RELEASE(kOperations) NO_THREAD_SAFETY_ANALYSIS { mutex_.unlock(); }
  std::mutex& native() { return mutex_; }

 private:
  std::mutex mutex_;
};

class SCOPED_CAPABILITY OperationsLock {
 public:
  explicit OperationsLock(OperationsMutex& mutex) ACQUIRE(kOperations) : lock_(mutex.native()) {}
  ~OperationsLock() RELEASE() = default;
  OperationsLock(const OperationsLock&) = delete;
  OperationsLock& operator=(const OperationsLock&) = delete;
  // For std::condition_variable.
  std::unique_lock<std::mutex>& native() { return lock_; }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace kolovod
