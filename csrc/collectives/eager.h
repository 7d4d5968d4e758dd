// Small operations whose data are there before they begin: a rank copies what it gives into a slot of its own
// in the segment and announces the operation after that. Once all have announced it all data are there, and
// every rank takes what it needs without waiting for anybody.
//
// Slots are used again without a message. Every operation has a tag, the same on all ranks and used once. A
// slot says whose data it holds; its rank writes it anew when every rank of the host has executed the
// operation that was in it. If that is not so yet the operation goes the ordinary way, on all ranks, for all
// of them see that the tag is not there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/backend.h"
#include "transport/segment.h"

namespace kolovod {

// The verbs over what ranks have staged. Calls take the tensors of an operation in their order; factors are
// applied when data are staged, so prescale is ignored.
class EagerBackend : public Backend {
 public:
  // `given`: by rank, where it has staged what it gives; of a broadcast, the root's only.
  EagerBackend(int rank, std::vector<const char*> given) : rank_(rank), given_(std::move(given)) {}

  // What a tensor takes in a slot.
  static size_t PlaceBytes(size_t bytes) { return RoundUp(bytes, sizeof(uint64_t)); }
  // Copies a tensor, multiplied by prescale; returns where the next one goes.
  static char* Copy(const void* in, size_t count, DType dtype, double prescale, char* to);

  Status Allreduce(const FusedRange& range) override;
  Status Broadcast(const Piece& piece, DType dtype, int root, const std::string& name) override;
  Status Allgather(const void* in, char* out, const std::vector<size_t>& bytes) override;
  Status Alltoall(const char* in, char* out, const Splits& rows, size_t row_bytes) override;
  Status Reducescatter(const FusedRange& range, const std::vector<size_t>& counts) override;

 private:
  // Of the elements from `begin` on.
  void Reduce(const FusedRange& range, size_t begin, size_t count, void* out) const;

  const int rank_;
  std::vector<const char*> given_;  // of the next tensor
};

class EagerSlots {
 public:
  // `rank`: among those of the segment.
  EagerSlots(Segment& segment, int rank) : segment_(segment), rank_(rank), in_use_until_(kEagerSlots, 0) {}

  // Memory of kEagerBytes for what this rank gives to the operation `tag` (not 0); null: the slot is in use.
  // Then Publish, before the operation is announced. One thread at a time.
  char* Claim(uint64_t tag);
  void Publish(uint64_t tag) { At(rank_, tag).tag.store(tag, std::memory_order_release); }
  // The operation was the last before this position of the log that used the slot, and is over here. As
  // Claim.
  void Release(uint64_t tag, uint64_t position) { in_use_until_[EagerIndexOf(tag)] = position; }

  // What the ranks give to an operation that all have announced, for EagerBackend; nothing: not all have
  // published it (`root` has not; -1: all). The same answer on all ranks. Good until this rank says Executed.
  std::optional<std::vector<const char*>> Find(uint64_t tag, int root) const;
  // Everything before this position of the log is over here. One thread at a time.
  void Executed(uint64_t position) {
    segment_.rank(rank_).executed.store(position, std::memory_order_release);
  }

 private:
  static constexpr uint64_t kPending = UINT64_MAX;
  EagerSlot& At(int rank, uint64_t tag) const { return segment_.eager(rank)[EagerIndexOf(tag)]; }

  Segment& segment_;
  const int rank_;
  std::vector<uint64_t> in_use_until_;  // by slot: a position that all must have executed
  uint64_t executed_by_all_ = 0;        // as far as this rank has looked
};

}  // namespace kolovod
