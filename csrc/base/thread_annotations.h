// Which lock guards what, said in the type: Clang checks it (-Wthread-safety), other compilers ignore it. See
// https://clang.llvm.org/docs/ThreadSafetyAnalysis.html for the attributes.
#pragma once

#include <mutex>

#if defined(__clang__)
#define KV_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define KV_THREAD_ATTRIBUTE(x)
#endif

#define CAPABILITY(name) KV_THREAD_ATTRIBUTE(capability(name))
#define SCOPED_CAPABILITY KV_THREAD_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(x) KV_THREAD_ATTRIBUTE(guarded_by(x))
#define REQUIRES(...) KV_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) KV_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) KV_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) KV_THREAD_ATTRIBUTE(try_acquire_capability(__VA_ARGS__))
#define RELEASE(...) KV_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define ASSERT_CAPABILITY(x) KV_THREAD_ATTRIBUTE(assert_capability(x))
#define NO_THREAD_SAFETY_ANALYSIS KV_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace kolovod {

// A std::mutex that the analysis knows.
class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  std::mutex& native() { return mutex_; }

 private:
  std::mutex mutex_;
};

class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.native()) {}
  ~MutexLock() RELEASE() = default;
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  void Lock() ACQUIRE() { lock_.lock(); }
  void Unlock() RELEASE() { lock_.unlock(); }
  // For std::condition_variable.
  std::unique_lock<std::mutex>& native() { return lock_; }

 private:
  std::unique_lock<std::mutex> lock_;
};

// A right to do something that is no mutex, or one mutex that objects of several classes share: the analysis
// compares names, and could not tell that two references name the same mutex. Nothing at run time.
class CAPABILITY("role") Role {};

// Tells the analysis that the caller has it, where it cannot see that: at the beginning of a lambda.
inline void AssumeHeld(const Role& role) ASSERT_CAPABILITY(role) { (void)role; }
inline void AssumeHeld(Mutex& mutex) ASSERT_CAPABILITY(mutex) { (void)mutex; }

}  // namespace kolovod
