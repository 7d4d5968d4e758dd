// Messages between two ranks of one host: each rank has an inbox in the segment, into which all others put,
// and which only it reads. Messages of one sender stay in order.
//
// Slots are taken by a ticket (D. Vyukov, bounded queue): a sender needs no lock, and is never in another's
// way for longer than that one needs to copy 4 KiB. One that dies in between stops the queue, and its death
// ends the world.
#pragma once

#include <atomic>
#include <cstdint>

#include "transport/segment.h"

namespace kolovod {

// PURE. Not thread-safe: of several threads of one rank only who holds the lease uses it.
class Inbox {
 public:
  Inbox(Segment& segment, int rank) : segment_(segment), rank_(rank) {}

  // At most kMailBytes of data. False: rank `to` has no room now.
  bool Put(int to, const Envelope& envelope, const void* data, size_t bytes);
  bool HasRoom(int to);
  // Rank `to` is to tell when it has room again; call HasRoom after this.
  void WantRoom(int to) { segment_.rank(to).inbox_wanted.store(1, std::memory_order_seq_cst); }

  // This rank's next message, or null. It stays until Pop.
  const InboxSlot* Front();
  bool HasMail() { return Front() != nullptr; }
  void Pop();
  // Whether somebody waited for room since the last call.
  bool TakeWanted() {
    std::atomic<uint32_t>& wanted = segment_.rank(rank_).inbox_wanted;
    return wanted.load(std::memory_order_seq_cst) != 0 && wanted.exchange(0) != 0;
  }

 private:
  InboxSlot& slot(int of, uint64_t ticket) { return segment_.inbox(of)[ticket % kMailSlots]; }
  static constexpr uint64_t FreeTurn(uint64_t ticket) { return 2 * (ticket / kMailSlots); }

  Segment& segment_;
  const int rank_;  // among those of the segment
  uint64_t read_ = 0;
};

}  // namespace kolovod
