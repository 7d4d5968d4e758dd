// Small operations that all ranks wait for at once: their announcement is their exchange. A rank writes into
// a slot of its own what the operation is and what it gives, and looks whether all have; then every rank
// takes what it needs. There is no message, no log entry, and nothing that all ranks write.
//
// A rank that waits longer than its patience, or sees that another cannot come, withdraws the operation for
// all, and it goes by the log. That holds if at least one rank has not announced it since: each looks at the
// word for withdrawals after it has seen all announcements, so it sees this one. If all have announced it
// meanwhile, the withdrawal is cancelled. Who sees a withdrawal that is neither waits until it is.
//
// Tags count the operations of a rank. They are the same on all ranks that have nothing pending, and only
// such ranks announce. Should ranks ever count differently, operations are withdrawn, and after some of them
// all go on from the highest tag: right results need only that a rank uses a tag once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "transport/segment.h"

namespace kolovod {

class InstantSlots {
 public:
  // `rank`: among those of the segment.
  InstantSlots(Segment& segment, int rank) : segment_(segment), rank_(rank) {}

  // The tag for an operation; 0: it goes by the log, since a slow rank may still read the slot. From here to
  // End there is one operation of this rank. `by_log`: how many operations that went by the log are over.
  uint64_t Begin(uint64_t by_log);
  // Where this rank writes what it gives, before Announce.
  InstantSlot& Own(uint64_t tag) { return At(rank_, tag); }
  void Announce(uint64_t tag, uint64_t signature) {
    Own(tag).signature = signature;
    Own(tag).tag.store(tag, std::memory_order_seq_cst);
  }
  // True: all ranks have announced the same, and what they give stays until End. False: it goes by the log,
  // on all ranks. `over`: the world is, or this rank shuts down.
  bool Meet(uint64_t tag, int64_t patience_ns, const std::function<bool()>& over);
  const InstantSlot& Of(int r, uint64_t tag) const { return At(r, tag); }
  // `met`: as Meet said.
  void End(uint64_t tag, bool met);

 private:
  enum State : uint64_t { kProposed = 1, kWithdrawn = 2, kCancelled = 3 };

  InstantSlot& At(int r, uint64_t tag) const { return segment_.instant(r)[tag % kInstantSlots]; }
  bool Has(int r, uint64_t tag) const { return At(r, tag).tag.load(std::memory_order_seq_cst) == tag; }
  std::atomic<uint64_t>& Word(uint64_t tag) const { return segment_.header().withdrawn[tag % kInstantSlots]; }
  // False: all have announced it.
  bool Withdraw(uint64_t tag, const std::function<bool()>& over);
  // After all announcements were seen, or where somebody has proposed it.
  bool IsWithdrawn(uint64_t tag, const std::function<bool()>& over) const;

  Segment& segment_;
  const int rank_;
  uint64_t next_ = 1;
  uint64_t by_log_ = 0;         // counted in next_
  uint64_t passed_by_all_ = 0;  // as far as this rank has looked
  size_t unmet_ = 0;            // since one was met, or this rank has looked what tags others have
};

}  // namespace kolovod
