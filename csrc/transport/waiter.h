// How a driver waits: a short spin while cores are free, then yields, then a futex; never a spin past a
// budget. While it waits it watches the revoke word, the peers' lives and the caller's signals.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

#include "base/status.h"
#include "base/topology.h"
#include "transport/liveness.h"
#include "transport/segment.h"

namespace kolovod {

inline int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// For the records of operations. The exact clock costs 40 ns, one hundredth of a small allreduce; the other a
// fifth of that, but it lags by up to 4 ms: for small ones, unless a timeline wants them `exact`.
inline int64_t RecordNs(size_t bytes, bool exact) {
  if (exact || bytes > 32 << 10) return NowNs();
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

inline void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Loads after it see what others had stored before theirs, if those do not see what was stored before it
// here.
inline void FullFence() {
#if defined(__SANITIZE_THREAD__)
  static std::atomic<int> word;  // ThreadSanitizer knows no fences
  word.fetch_add(1, std::memory_order_seq_cst);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

struct WaitBudget {
  int64_t spin_ns = 0;
  int64_t yield_ns = 0;
  // Before others' engine threads are woken: a caller that only waits for its turn on a crowded core would
  // find its lease taken by its own thread, and pay for the hand-over.
  int64_t patience_ns = 0;
};

// Whether the next wait for another host spins. Where the peer that is waited for shares the core (hosts that
// are namespaces of one machine), every spin delays it by as much: a barrier took 125 us, and 22 without. A
// spin in vain, or a yield that has let another run, ends spinning for a while; on a core of its own a rank
// that yields instead looks nearly as often.
class SpinGauge {
 public:
  // Of the next wait.
  int64_t Allowed(int64_t spin_ns) {
    if (skips_ == 0) return spin_ns;
    --skips_;
    return 0;
  }
  void InVain() { skips_ = kSkips; }
  // sched_yield(), and the time after it.
  int64_t Yield() {
    const int64_t before_ns = NowNs();
    sched_yield();
    const int64_t now_ns = NowNs();
    if (now_ns - before_ns > kOthersRanNs) skips_ = kSkips;
    return now_ns;
  }

  // A yield that takes longer has let another run.
  static constexpr int64_t kOthersRanNs = 2000;

 private:
  static constexpr int kSkips = 64;
  int skips_ = 0;
};

// How long to yield to ranks of the same core that do not get it. On some kernels a yield does not leave the
// scheduling group of the yielding process, and ranks have groups of their own: those of sessions
// (autogroups) or containers. Whoever waits by yielding then works against whom it waits for, until its turn
// of milliseconds is over; a futex is right. Where yields reach the others they are the cheaper way.
class YieldGauge {
 public:
  // Of the next wait.
  int64_t Allowed() {
    if (failures_ < kFailures) return kInVainNs;
    return ++waits_ % kRetry == 0 ? kInVainNs : 0;
  }
  void OthersRan() { failures_ = 0; }
  void InVain() { failures_ = std::min(failures_ + 1, kFailures); }

 private:
  static constexpr int64_t kInVainNs = 10'000;
  static constexpr int kFailures = 4;  // in a row
  static constexpr unsigned kRetry = 64;
  int failures_ = 0;
  unsigned waits_ = 0;
};

class Waiter {
 public:
  // `killed`: loopback only, else null.
  Waiter(Segment& segment, const Topology& topology, Liveness& liveness, const std::atomic<bool>& stop,
         const std::atomic<bool>* killed)
      : segment_(segment),
        rank_(topology.rank),
        local_(topology.local_rank),
        liveness_(liveness),
        stop_(stop),
        killed_(killed) {}

  // Set by whoever takes the lease, before driving. `pauses`: a wait that is not in a bucket returns when it
  // is time to call `interrupted`, which the caller does when it has let the lease go.
  void Configure(WaitBudget budget, std::function<bool()> interrupted, bool pauses = false) {
    budget_ = budget;
    interrupted_ = std::move(interrupted);
    pauses_ = pauses;
    pause_ = false;
    next_signal_check_ns_ = 0;  // set once a wait turns out to be long: reading the clock takes 40 ns
  }

  // Called again and again while waiting, so that bytes between hosts keep moving; true: it has more to do,
  // and sleeps are short.
  void set_background(std::function<bool()> background) { background_ = std::move(background); }

  // At most so long a driver sleeps before it looks by itself for dead peers and signals. Before the first
  // wait.
  void set_sleep_ns(int64_t sleep_ns) { sleep_ns_ = sleep_ns; }

  // Called while a wait is asleep, every 10 ms or so. Once, before the first wait.
  void SetWatch(std::function<void()> watch) { watch_ = std::move(watch); }

  // Called before every sleep, after the last look at what is waited for: only WakeDriver wakes then.
  void set_before_sleep(std::function<void()> before_sleep) { before_sleep_ = std::move(before_sleep); }

  // Returns when ready() holds. ring_lagging() is called once the spin was in vain and the patience is over,
  // and again after every sleep: it wakes the ranks that this one waits for. Both may be called many times.
  // `in_bucket`: an interrupt now leaves peers with half a result, so it aborts the world. `data`: what
  // ready() asks, if that is a data flag. `deadline_ns`: when ready() holds whatever happens; 0: never.
  template <class Ready, class Lag>
  Status Wait(Ready ready, Lag ring_lagging, bool in_bucket, DataWait data = {}, int64_t deadline_ns = 0) {
    if (ready()) return Status();
    const int64_t start_ns = NowNs();
    int64_t now_ns = start_ns;
    const int64_t spin_ns = spin_gauge_.Allowed(budget_.spin_ns);
    while (now_ns - start_ns < spin_ns) {
      for (int i = 0; i < 16; ++i) {
        if (ready()) return Status();
        CpuRelax();
      }
      if (MustStop()) return StoppedUnless(ready, in_bucket);
      now_ns = NowNs();
    }
    if (background_ && spin_ns > 0) spin_gauge_.InVain();
    SpreadOverCores(now_ns);
    const int64_t yield_end_ns = now_ns + budget_.yield_ns;
    int64_t left_in_vain_ns = yield_gauge_.Allowed();
    bool rung = false;
    while (now_ns < yield_end_ns) {
      if (!rung && now_ns - start_ns >= budget_.patience_ns) {
        ring_lagging();
        rung = true;
      }
      if (background_) background_();
      const int64_t before_ns = now_ns;
      now_ns = spin_gauge_.Yield();
      if (ready()) return Status();
      if (MustStop()) return StoppedUnless(ready, in_bucket);
      if (now_ns - before_ns > SpinGauge::kOthersRanNs) {
        yield_gauge_.OthersRan();
        continue;
      }
      left_in_vain_ns -= now_ns - before_ns;
      if (left_in_vain_ns < 0 && HoldsUpAnother()) {
        yield_gauge_.InVain();
        break;
      }
    }
    ring_lagging();
    const Noted noted(segment_.rank(local_), data);
    while (true) {
      if (SleepUnless(ready, deadline_ns)) return Status();
      if (MustStop()) return StoppedUnless(ready, in_bucket);
      const Status status = Periodic(in_bucket);
      if (status.code() == Code::kRankLost) return StoppedUnless(ready, in_bucket);
      KV_RETURN_IF_ERROR(status);
      if (ready() || pause_) return Status();
      ring_lagging();
    }
  }

  // True once after a wait that has returned for that.
  bool TakePause() { return std::exchange(pause_, false); }

  // Publishes the core that the caller runs on.
  void NoteCore();

  // Looks for dead ranks and, for the caller's thread, for pending signals; rate-limited.
  Status Periodic(bool in_bucket);
  // A rank that has died without leaving, or -1; any thread.
  int FindLost();
  // Revokes the world if there is one. True if it is revoked for that.
  bool CheckPeers();
  // The world was revoked, or this rank is shutting down.
  bool MustStop() {
    return stop_.load(std::memory_order_relaxed) || segment_.revoked() ||
           (killed_ != nullptr && killed_->load(std::memory_order_relaxed));
  }
  // Why, once MustStop() holds.
  Status Stopped();

 private:
  static constexpr int64_t kSignalPeriodNs = 100'000'000;
  // A handler that runs in a bucket may call no verb, so most buckets are over before one does.
  static constexpr int64_t kSignalPeriodInBucketNs = 500'000'000;
  static constexpr int64_t kLivenessPeriodNs = 10'000'000;
  static constexpr int64_t kBusySleepNs = 200'000;  // while there is something to do in the background
  static constexpr int64_t kSpreadPeriodNs = 2'000'000;

  // For those that post flags, and for reports on late ranks: what this rank waits for.
  class Noted {
   public:
    Noted(RankBlock& self, const DataWait& data) : self_(self), noted_(data.peer >= 0) {
      if (noted_) self_.waits_for.store(data.Word(), std::memory_order_release);
    }
    ~Noted() {
      if (noted_) self_.waits_for.store(0, std::memory_order_release);
    }
    Noted(const Noted&) = delete;
    Noted& operator=(const Noted&) = delete;

   private:
    RankBlock& self_;
    const bool noted_;
  };

  // Data can have come between a look at them and one at who has sent them, above all where this thread did
  // not run for a while: what is there completes a bucket, even if its sender has died since.
  template <class Ready>
  Status StoppedUnless(Ready ready, bool in_bucket) {
    return in_bucket && ready() ? Status() : Stopped();
  }

  // Another rank could work on the core of this one if it had it.
  bool HoldsUpAnother();
  // Steps off a core that it shares with other drivers, if another has fewer (transport/cores.h).
  void SpreadOverCores(int64_t now_ns);

  // True: ready before going to sleep. The order of stores makes a lost wake-up impossible: the waker
  // changes the state, then reads `sleepers`; we write `sleepers`, then read the state.
  template <class Ready>
  bool SleepUnless(Ready ready, int64_t deadline_ns) {
    int64_t sleep_ns = background_ && background_() ? kBusySleepNs : sleep_ns_;
    if (deadline_ns != 0) sleep_ns = std::clamp<int64_t>(deadline_ns - NowNs(), 0, sleep_ns);
    RankBlock& self = segment_.rank(local_);
    const uint32_t bell = self.driver_bell.load(std::memory_order_seq_cst);
    self.driver_sleeping.store(1, std::memory_order_seq_cst);
    segment_.header().sleepers.fetch_add(1, std::memory_order_seq_cst);
    FullFence();  // what ready() reads it may read relaxed
    const bool is_ready = ready();
    if (!is_ready && !MustStop()) {
      if (before_sleep_) before_sleep_();
      FutexWait(&self.driver_bell, bell, sleep_ns);
    }
    segment_.header().sleepers.fetch_sub(1, std::memory_order_seq_cst);
    self.driver_sleeping.store(0, std::memory_order_seq_cst);
    return is_ready;
  }

  Segment& segment_;
  const int rank_;
  const int local_;
  Liveness& liveness_;
  const std::atomic<bool>& stop_;
  const std::atomic<bool>* const killed_;
  WaitBudget budget_;
  SpinGauge spin_gauge_;
  YieldGauge yield_gauge_;
  std::function<bool()> interrupted_;
  bool pauses_ = false;
  bool pause_ = false;
  std::function<bool()> background_;
  std::function<void()> watch_;
  std::function<void()> before_sleep_;
  int64_t sleep_ns_ = 10'000'000;
  int64_t next_signal_check_ns_ = 0;
  int64_t next_liveness_check_ns_ = 0;
  int64_t next_spread_ns_ = 0;
};

}  // namespace kolovod
