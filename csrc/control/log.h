// The numbered log that every rank of a host executes in the same order, in shared memory.
//
// Whoever announces a cached name last appends its entry, so a lone small tensor needs no trip to a
// coordinator. Only rank 0 appends negotiated messages. Buckets are closed by whichever rank wants to
// execute next: the first compare-and-swap decides, the others read it.
#pragma once

#include <cstdint>
#include <optional>

#include "transport/segment.h"

namespace kolovod {

// Where a bucket ends.
struct BucketEnd {
  uint64_t position = 0;  // in the log, after its last entry
  // What this and earlier buckets have for a device, and has not begun, begins now (engine/device_lane.h).
  bool starts_device = false;

  uint64_t Word() const { return position << 1 | static_cast<uint64_t>(starts_device); }
  static BucketEnd Of(uint64_t word) { return {word >> 1, (word & 1) != 0}; }
};

class Log {
 public:
  explicit Log(Segment& segment)
      : segment_(segment),
        mask_(segment.layout().log_slots - 1),
        bucket_mask_(segment.layout().bucket_slots - 1) {}

  struct Entry {
    bool is_message;  // the next message of the broadcast ring; else the cached name `id`
    uint32_t id;
  };

  void AppendId(uint32_t id) { Append(id); }
  void AppendMessage() { Append(kMessageBit); }

  uint64_t tail() const { return segment_.header().log_tail.load(std::memory_order_seq_cst); }

  // nullopt: not written yet.
  std::optional<Entry> Read(uint64_t position) const {
    const uint64_t word = segment_.log()[position & mask_].load(std::memory_order_acquire);
    if (static_cast<uint32_t>(word) != Tag(position)) return std::nullopt;
    const auto value = static_cast<uint32_t>(word >> 32);
    return Entry{(value & kMessageBit) != 0, value & ~kMessageBit};
  }

  // Announces cached name `id` for this rank; true if it was the last rank, whose duty it is to append.
  // Nobody can announce the next instance before this one is in the log, so the reset cannot race.
  bool AnnounceId(uint32_t id) {
    std::atomic<uint32_t>& counter = segment_.counters()[id];
    const uint32_t announced = counter.fetch_add(1, std::memory_order_acq_rel) + 1;
    if (announced != static_cast<uint32_t>(segment_.layout().size)) return false;
    counter.store(0, std::memory_order_release);
    return true;
  }

  // Rank 0: `id` will stand for another name, and ranks may have announced it before it was forgotten.
  void Reset(uint32_t id) { segment_.counters()[id].store(0, std::memory_order_seq_cst); }

  // Of bucket `bucket`, which begins at `begin`; nullopt: not closed.
  std::optional<BucketEnd> EndOf(uint64_t bucket, uint64_t begin) const {
    return Unpack(segment_.bucket_ends()[bucket & bucket_mask_].load(std::memory_order_acquire), bucket,
                  begin);
  }

  // Proposes `end`; returns the end that holds.
  BucketEnd CloseBucket(uint64_t bucket, uint64_t begin, BucketEnd end) {
    std::atomic<uint64_t>& slot = segment_.bucket_ends()[bucket & bucket_mask_];
    uint64_t current = slot.load(std::memory_order_acquire);
    const uint64_t proposed = (end.Word() << 32) | Tag(bucket);
    while (true) {
      if (const auto closed = Unpack(current, bucket, begin)) return *closed;
      if (slot.compare_exchange_weak(current, proposed, std::memory_order_acq_rel)) return end;
    }
  }

 private:
  static constexpr uint32_t kMessageBit = 1u << 31;
  static uint32_t Tag(uint64_t number) { return static_cast<uint32_t>(number) + 1; }

  static std::optional<BucketEnd> Unpack(uint64_t word, uint64_t bucket, uint64_t begin) {
    if (static_cast<uint32_t>(word) != Tag(bucket)) return std::nullopt;
    const BucketEnd end = BucketEnd::Of(word >> 32);
    const uint64_t distance = (end.position - begin) & 0x7fff'ffff;
    return BucketEnd{begin + distance, end.starts_device};
  }

  void Append(uint32_t value) {
    const uint64_t position = segment_.header().log_tail.fetch_add(1, std::memory_order_seq_cst);
    segment_.log()[position & mask_].store((static_cast<uint64_t>(value) << 32) | Tag(position),
                                           std::memory_order_seq_cst);
    segment_.WakeWaiting();
  }

  Segment& segment_;
  const uint64_t mask_;
  const uint64_t bucket_mask_;
};

}  // namespace kolovod
