#include "transport/inbox.h"

#include <cstring>

namespace kolovod {

bool Inbox::Put(int to, const Envelope& envelope, const void* data, size_t bytes) {
  std::atomic<uint64_t>& head = segment_.rank(to).inbox_head;
  uint64_t ticket = head.load(std::memory_order_relaxed);
  while (true) {
    const uint64_t turn = slot(to, ticket).turn.load(std::memory_order_acquire);
    if (turn < FreeTurn(ticket)) return false;  // not read since
    if (turn == FreeTurn(ticket)) {
      if (head.compare_exchange_weak(ticket, ticket + 1, std::memory_order_relaxed)) break;
    } else {
      ticket = head.load(std::memory_order_relaxed);  // somebody else was faster
    }
  }
  InboxSlot& taken = slot(to, ticket);
  taken.envelope = envelope;
  taken.bytes = bytes;
  if (bytes > 0) std::memcpy(taken.data, data, bytes);
  taken.turn.store(FreeTurn(ticket) + 1, std::memory_order_seq_cst);
  return true;
}

bool Inbox::HasRoom(int to) {
  const uint64_t ticket = segment_.rank(to).inbox_head.load(std::memory_order_seq_cst);
  return slot(to, ticket).turn.load(std::memory_order_seq_cst) >= FreeTurn(ticket);
}

const InboxSlot* Inbox::Front() {
  const InboxSlot& next = slot(rank_, read_);
  return next.turn.load(std::memory_order_acquire) == FreeTurn(read_) + 1 ? &next : nullptr;
}

void Inbox::Pop() {
  slot(rank_, read_).turn.store(FreeTurn(read_) + 2, std::memory_order_seq_cst);
  ++read_;
}

}  // namespace kolovod
