// Threads that run what the engine's thread must not: completions of the hosts of graph_clients.h.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <utility>

#include "base/thread_annotations.h"

namespace kolovod {

// Runs tasks in the order given. Up to `most` threads do, and idle ones are kept for the next: with one
// thread a task waits for those before it, with no limit it waits for nothing. Never destroy one that has
// run a task: its threads have no end before the process's.
class Threads {
 public:
  // `name`: what the system calls the threads; up to 15 characters.
  explicit Threads(size_t most, const char* name) : most_(most), name_(name) {}

  void Run(std::function<void()> task) {
    MutexLock lock(mutex_);
    tasks_.push_back(std::move(task));
    WakeOne();
  }

 private:
  // One at a time is on its way, and it sends for the next before it runs what it finds: so no
  // task waits behind another that takes long, yet short ones do not wake a thread each.
  void WakeOne() REQUIRES(mutex_) {
    if (is_waking_) return;
    if (idle_ > 0) {
      is_waking_ = true;
      changed_.notify_one();
    } else if (threads_ < most_) {  // else one that is busy comes to it
      is_waking_ = true;
      ++threads_;
      std::thread([this] { Work(); }).detach();
    }
  }

  void Work() {
    pthread_setname_np(pthread_self(), name_);
    MutexLock lock(mutex_);
    while (true) {
      ++idle_;
      while (!is_waking_) changed_.wait(lock.native());
      --idle_;
      is_waking_ = false;
      while (!tasks_.empty()) {
        std::function<void()> task = std::move(tasks_.front());
        tasks_.pop_front();
        if (!tasks_.empty()) WakeOne();
        lock.Unlock();
        task();
        task = nullptr;  // what it holds is let go without the lock
        lock.Lock();
      }
    }
  }

  const size_t most_;
  const char* const name_;
  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_ GUARDED_BY(mutex_);
  size_t idle_ GUARDED_BY(mutex_) = 0;
  bool is_waking_ GUARDED_BY(mutex_) = false;  // a thread has been told, and is not here yet
  size_t threads_ GUARDED_BY(mutex_) = 0;
};

}  // namespace kolovod
