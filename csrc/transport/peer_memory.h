// Reading the memory of the other ranks of this host (process_vm_readv(2)): one copy instead of two by way of
// the segment. Needs the right to trace them, which containers and Yama may withhold, so that it is tried
// once when a world begins; all ranks of a segment read, or none.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/segment.h"

namespace kolovod {

class PeerMemory {
 public:
  // `rank`: among those of the segment.
  PeerMemory(Segment& segment, int rank) : segment_(segment), rank_(rank) {}

  // What the others try to read. Before this rank attaches.
  void Announce();
  // Tries every other rank, once all have attached, and says whether it worked.
  void Probe();
  // Whether all have said so by now; then usable() is the same on all ranks.
  bool AllHaveProbed();
  bool usable() const { return usable_; }

  // This rank's memory that the others may read until they have posted `done`; nothing if the system lets
  // nobody read it, as memory of devices. Before `packed` is posted, which makes it visible.
  void Offer(const void* data, size_t bytes);
  // What that rank has offered; 0: it cannot be read.
  uint64_t Offered(int peer) { return segment_.rank(peer).offered.load(std::memory_order_acquire); }
  // Copies from another rank's memory; 0 or an errno.
  int Read(int peer, uint64_t address, void* to, size_t bytes) const;

 private:
  Segment& segment_;
  const int rank_;
  uint64_t token_ = 0;  // in this process, where others look for it
  bool usable_ = false;
};

}  // namespace kolovod
