#include "collectives/instant.h"

#include <sched.h>

#include "transport/waiter.h"

namespace kolovod {

namespace {
constexpr int kLooks = 32;           // between two looks at the clock
constexpr int64_t kGraceNs = 5'000;  // in which a rank completes what all others have completed
}  // namespace

uint64_t InstantSlots::Begin(uint64_t by_log) {
  if (by_log > by_log_) {
    next_ += by_log - by_log_;
    by_log_ = by_log;
  }
  if (passed_by_all_ + kInstantSlots < next_) {
    segment_.rank(rank_).instant_passed.store(next_ - 1, std::memory_order_release);
    passed_by_all_ = next_ - 1;
    for (int r = 0; r < segment_.layout().size; ++r) {
      passed_by_all_ =
          std::min(passed_by_all_, segment_.rank(r).instant_passed.load(std::memory_order_acquire));
    }
    if (passed_by_all_ + kInstantSlots < next_) return 0;
  }
  return next_;
}

bool InstantSlots::Meet(uint64_t tag, int64_t patience_ns, const std::function<bool()>& over) {
  const int size = segment_.layout().size;
  int64_t start_ns = 0;
  int missing = 0;
  for (int looks = 1;; ++looks) {
    while (missing < size && Has(missing, tag)) ++missing;
    if (missing == size) break;
    CpuRelax();
    if (looks % kLooks != 0) continue;
    const int64_t now_ns = NowNs();
    if (start_ns == 0) start_ns = now_ns;
    const int64_t waited_ns = now_ns - start_ns;
    const bool is_elsewhere =
        waited_ns >= kGraceNs && segment_.rank(missing).pending.load(std::memory_order_relaxed) != 0;
    const bool is_proposed = Word(tag).load(std::memory_order_relaxed) >> 2 == tag;
    if (!is_elsewhere && !is_proposed && waited_ns < patience_ns && !over()) continue;
    if (Withdraw(tag, over)) return false;
    start_ns = now_ns;  // all have come
  }
  if (IsWithdrawn(tag, over)) return false;
  const uint64_t signature = At(rank_, tag).signature;
  for (int r = 0; r < size; ++r) {
    if (At(r, tag).signature != signature) return false;
  }
  return true;
}

bool InstantSlots::Withdraw(uint64_t tag, const std::function<bool()>& over) {
  std::atomic<uint64_t>& word = Word(tag);
  uint64_t before = word.load(std::memory_order_seq_cst);
  do {
    if (before >> 2 == tag) return IsWithdrawn(tag, over);
  } while (!word.compare_exchange_weak(before, tag << 2 | kProposed, std::memory_order_seq_cst));
  bool all = true;
  for (int r = 0; r < segment_.layout().size; ++r) all = all && Has(r, tag);
  word.store(tag << 2 | (all ? kCancelled : kWithdrawn), std::memory_order_seq_cst);
  return !all;
}

bool InstantSlots::IsWithdrawn(uint64_t tag, const std::function<bool()>& over) const {
  while (true) {
    const uint64_t word = Word(tag).load(std::memory_order_seq_cst);
    if (word >> 2 != tag) return false;
    if ((word & 3) != kProposed) return (word & 3) == kWithdrawn;
    if (over()) return true;
    sched_yield();
  }
}

void InstantSlots::End(uint64_t tag, bool met) {
  next_ = tag + 1;
  by_log_ += met ? 0 : 1;  // it goes that way, and is counted by this tag
  unmet_ = met ? 0 : unmet_ + 1;
  if (unmet_ == kInstantSlots) {  // not each time: with many ranks that takes long
    unmet_ = 0;
    for (int r = 0; r < segment_.layout().size; ++r) {
      for (uint64_t t = 0; t < kInstantSlots; ++t) {
        next_ = std::max(next_, At(r, t).tag.load(std::memory_order_relaxed) + 1);
      }
    }
  }
  segment_.rank(rank_).instant_passed.store(next_ - 1, std::memory_order_release);
}

}  // namespace kolovod
