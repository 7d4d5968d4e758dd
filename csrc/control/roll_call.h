// Announcements of operations without a name, on one host, without a message: each rank writes the
// operation's number, what it is (a signature) and what ranks may differ in (rows) into its eager slot, and
// looks whether all have come to that number. Who finds that first appends to the log.
//
// Ranks may differ in whether they can go this way (a slot is in use, an operation is of another kind), so
// each that announces such a number in full says so in its slot before: either who announces by the slot sees
// that, and goes in full, too, or rank 0 sees the slot when the full announcement arrives, and recalls the
// number (docs/design/engine.md).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "transport/segment.h"

namespace kolovod {

// PURE. Numbers are tags (segment.h), which grow; of those that share a slot a rank announces the next by it
// only when all ranks have executed the one before.
class RollCall {
 public:
  // `rank`: among those of the segment.
  RollCall(Segment& segment, int rank) : segment_(segment), rank_(rank) {}

  enum class Seen {
    kSome,
    kAll,
    kInFull,  // a rank announces, or has announced, it in full
  };

  // This rank's slot is claimed for it. `rows`: kSlotRows numbers at most. Look after this.
  void Announce(uint64_t tag, uint64_t signature, const std::vector<int64_t>& rows) {
    EagerSlot& own = Of(rank_, tag);
    own.signature = signature;
    std::copy(rows.begin(), rows.end(), own.rows);
    own.announced.store(tag, std::memory_order_seq_cst);
  }
  Seen Look(uint64_t tag) const {
    Seen seen = Seen::kAll;
    for (int r = 0; r < segment_.layout().size; ++r) {
      const EagerSlot& slot = Of(r, tag);
      // In this order: between the two it may announce this number by its slot, and then a later one that
      // shares the slot in full. Of who has come to a later one and has not announced this by its slot it
      // is known that it has gone in full with this, too.
      const bool is_past = slot.in_full.load(std::memory_order_seq_cst) >= tag;
      if (slot.announced.load(std::memory_order_seq_cst) == tag) continue;
      if (is_past) return Seen::kInFull;
      seen = Seen::kSome;
    }
    return seen;
  }
  // After kAll: whether this rank is the one that appends.
  bool First(uint64_t tag) {
    std::atomic<uint64_t>& appended = Of(0, tag).appended;
    uint64_t before = appended.load(std::memory_order_relaxed);
    return before != tag && appended.compare_exchange_strong(before, tag, std::memory_order_acq_rel);
  }
  // Once it is in the log: whether it is the same operation on all ranks. The same answer on all.
  bool Agrees(uint64_t tag) const {
    for (int r = 1; r < segment_.layout().size; ++r) {
      if (Of(r, tag).signature != Of(0, tag).signature) return false;
    }
    return true;
  }
  // Then, if it is: the `count` numbers that each rank has announced, by rank.
  std::vector<std::vector<int64_t>> Rows(uint64_t tag, size_t count) const {
    std::vector<std::vector<int64_t>> rows;
    for (int r = 0; r < segment_.layout().size; ++r) {
      const int64_t* begin = Of(r, tag).rows;
      rows.emplace_back(begin, begin + count);
    }
    return rows;
  }

  // Before this rank announces it in full.
  void InFull(uint64_t tag) {
    std::atomic<uint64_t>& own = Of(rank_, tag).in_full;
    if (own.load(std::memory_order_relaxed) < tag) own.store(tag, std::memory_order_seq_cst);
  }
  // Rank 0, when that has arrived: whether rank r has announced it by its slot.
  bool Announced(int r, uint64_t tag) const {
    return Of(r, tag).announced.load(std::memory_order_seq_cst) == tag;
  }

 private:
  EagerSlot& Of(int r, uint64_t tag) const { return segment_.eager(r)[EagerIndexOf(tag)]; }

  Segment& segment_;
  const int rank_;
};

}  // namespace kolovod
