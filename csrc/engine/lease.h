// Who drives the engine: one thread at a time, a blocking caller or else the engine thread, which hands the
// lease over between buckets when a caller wants it.
#pragma once

#include <atomic>

#include "engine/locks.h"
#include "engine/membership.h"

namespace kolovod {

class Lease {
 public:
  explicit Lease(const Membership& membership) : membership_(membership) {}

  // `background`: by the engine thread.
  bool TryTake(bool background) TRY_ACQUIRE(true, kLease) NO_THREAD_SAFETY_ANALYSIS {
    if (held_.load(std::memory_order_relaxed) || held_.exchange(true, std::memory_order_acquire)) {
      return false;
    }
    membership_.self().driving.store(1, std::memory_order_seq_cst);
    background_ = background;
    return true;
  }
  // At the end: nobody drives any more, until Drop.
  bool TryKeep() TRY_ACQUIRE(true, kLease) NO_THREAD_SAFETY_ANALYSIS { return !held_.exchange(true); }
  void Drop() RELEASE(kLease) NO_THREAD_SAFETY_ANALYSIS { held_.store(false); }
  bool background() const REQUIRES(kLease) { return background_; }

  // What is left when the lease is let go.
  struct Left {
    bool more = false;    // work, which a caller may take over as well as the engine thread
    bool unread = false;  // what nobody else will be told of
  };
  // look() -> Left is called when peers see that nobody drives here, so that nothing which comes later is
  // missed: what looks done then, and changes, is told to the engine thread. True: a caller waits for the
  // lease, and must be woken.
  template <class Look>
  bool Release(Look look) RELEASE(kLease) NO_THREAD_SAFETY_ANALYSIS {
    RankBlock& self = membership_.self();
    self.driving.store(0, std::memory_order_seq_cst);
    const uint32_t bell = self.idle_bell.load(std::memory_order_seq_cst);
    const bool was_background = background_;
    const Left left = look();
    if (membership_.faults != nullptr) membership_.faults->Shuffle();
    held_.store(false, std::memory_order_seq_cst);
    // Who rang after that look found the lease taken.
    const bool rung = self.idle_bell.load(std::memory_order_seq_cst) != bell;
    const bool is_wanted = wanted();
    // Our thread itself, too: what was announced after its last step, while it was driving, nobody rang for.
    if (left.unread || ((left.more || rung) && !(was_background && is_wanted))) membership_.WakeIdle();
    return is_wanted;
  }

  // Any thread.
  bool held() const { return held_.load(); }
  // Whether callers wait for it.
  bool wanted() const { return wanted_.load(std::memory_order_seq_cst) > 0; }
  void AddWanted() { wanted_.fetch_add(1); }
  void DropWanted() { wanted_.fetch_sub(1); }

 private:
  const Membership& membership_;
  std::atomic<bool> held_{false};
  std::atomic<int> wanted_{0};
  bool background_ GUARDED_BY(kLease) = false;
};

}  // namespace kolovod
