// The memory that the ranks of one host share: layout, flags, doorbells, the revoke word.
//
// Every word has one writer unless it says otherwise. Flags only grow, so nothing is ever reset and no
// trailing barrier is needed. Offsets and the protocol are in docs/wire.md.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/config.h"
#include "base/status.h"
#include "base/types.h"
#include "transport/envelope.h"
#include "transport/operation_record.h"

namespace kolovod {

inline constexpr uint64_t kSegmentMagic = 0x31444f564f4c4f4bULL;  // "KOLOVOD1"
inline constexpr size_t kControlRingBytes = 64 << 10;
inline constexpr size_t kBroadcastRingBytes = 256 << 10;
inline constexpr size_t kStackBytes = 4096;
inline constexpr size_t kEagerSlots = 32;              // of a rank
inline constexpr size_t kEagerBytes = 4 << 10;         // what each holds
inline constexpr size_t kSlotRows = 16;                // numbers that an announcement by a slot has
inline constexpr size_t kInstantSlots = 8;             // of a rank
inline constexpr size_t kMailSlots = 64;               // of a rank
inline constexpr size_t kMailBytes = 4 << 10;          // what each holds
inline constexpr int64_t kMostChunkBytes = 256 << 10;  // where the number of cores decides

inline constexpr size_t kNoticeBytes = 2032;  // what a rank says of its waits

inline constexpr size_t kReleaseBytes = 36;

struct SegmentHeader {
  // These three lie where they are for ever: a rank of another release must find them. The magic is written
  // last, by the leader.
  std::atomic<uint64_t> magic;
  uint32_t protocol;
  char release[kReleaseBytes];  // its version; a text, cut off
  uint32_t size;
  uint32_t epoch;
  uint64_t segment_bytes;
  int64_t config[kConfigFields];  // rank 0's Config, in VisitConfig order: every rank works with it
  alignas(kLine) std::atomic<uint32_t> attached;  // many writers: ranks that have mapped the segment
  std::atomic<uint32_t> left_count;               // many writers: ranks that left cleanly
  std::atomic<uint32_t> line_latency_ns;          // rank 0: measured one way, 0 unknown, +1 offset
  // Many writers; the first to move it 0 -> 1 fills the text and moves it to 2.
  alignas(kLine) std::atomic<uint32_t> revoked;
  uint32_t revoke_code;
  char revoke_text[768];
  alignas(kLine) std::atomic<uint32_t> sleepers;        // many writers: drivers asleep
  alignas(kLine) std::atomic<uint64_t> log_tail;        // many writers: next free log position
  alignas(kLine) std::atomic<uint64_t> broadcast_head;  // rank 0: bytes ever written
  // Many writers: when somebody last began a report on late ranks (CLOCK_MONOTONIC, 0 never). Moved by
  // compare-and-swap, so that one rank reports for all.
  alignas(kLine) std::atomic<int64_t> late_report_ns;
  std::atomic<uint32_t> late_elsewhere;  // many writers: the leader must ask other hosts who is late
  std::atomic<uint32_t> lost_written;    // many writers: the first writes the lost rank's last operations
  // Many writers: the tag whose operation is withdrawn, and how far that is (collectives/instant.h).
  alignas(kLine) std::atomic<uint64_t> withdrawn[kInstantSlots];
};

struct RankBlock {
  alignas(kLine) std::atomic<uint64_t> packed;  // last chunk whose contribution is staged
  // Last chunk for which this rank neither reads nor writes others' staging any more; in a sliced allreduce
  // its results are in there.
  alignas(kLine) std::atomic<uint64_t> done;
  alignas(kLine) std::atomic<uint32_t> driver_bell;  // many writers; futex
  std::atomic<uint32_t> driver_sleeping;             // set by this rank, cleared by who wakes it
  std::atomic<uint32_t> driving;                     // some thread of this rank drives its engine
  std::atomic<uint32_t> core;                        // where that thread ran last, + 1
  std::atomic<uint32_t> pending;                     // operations submitted here that are not complete
  alignas(kLine) std::atomic<uint32_t> idle_bell;    // many writers; futex
  std::atomic<uint32_t> idle_sleeping;
  alignas(kLine) std::atomic<uint32_t> attached;
  std::atomic<uint32_t> ping;
  std::atomic<uint32_t> reads_peers;  // whether it can read the others' memory: 1 yes, 2 no, 0 not tried yet
  int32_t pid;                        // this and the next two are written before `attached`
  uint64_t token;                     // what is to be found at
  uint64_t token_address;
  alignas(kLine) std::atomic<uint64_t> control_head;    // this rank: bytes ever written
  alignas(kLine) std::atomic<uint64_t> control_tail;    // rank 0: bytes ever read
  alignas(kLine) std::atomic<uint64_t> broadcast_tail;  // this rank: bytes ever read
  alignas(kLine) std::atomic<uint64_t> waits_for;       // a DataWait, once a wait is not short
  alignas(kLine) std::atomic<uint64_t> executed;        // the log's entries before this one are over here
  std::atomic<uint64_t> offered;                        // where others may read this rank's input; 0: nowhere
  std::atomic<uint32_t> unrecorded;                     // pending operations beyond what `records` can hold
  alignas(kLine) std::atomic<uint64_t> instant_passed;  // tags of instant slots up to this one are over here
  alignas(kLine) std::atomic<uint64_t> inbox_head;      // many writers: messages for this rank, ever
  std::atomic<uint32_t> inbox_wanted;                   // many writers: some wait for room in it
  alignas(kLine) std::atomic<uint32_t> asked;           // many writers: how often others asked where it is
  alignas(kLine) std::atomic<uint32_t> answered;        // the `asked` that the text answers
  uint32_t stack_bytes;
  char stack[kStackBytes];
  alignas(kLine) char control_ring[kControlRingBytes];
};

// See transport/wait_notices.h.
struct alignas(kLine) WaitNotice {
  std::atomic<uint32_t> version;
  std::atomic<uint32_t> bytes;
  std::array<std::atomic<uint64_t>, kNoticeBytes / 8> words;
};
static_assert(sizeof(WaitNotice) % 1024 == 0);

// What its rank gives to one small operation (collectives/eager.h), and its announcement of one without a
// name, of any size.
struct alignas(kLine) EagerSlot {
  std::atomic<uint64_t> tag;        // whose data; 0 none
  std::atomic<uint64_t> announced;  // by this slot (control/roll_call.h), the last
  std::atomic<uint64_t> in_full;    // in full, the last that has this slot
  std::atomic<uint64_t> appended;   // in rank 0's slot, many writers: the last that is in the log
  uint64_t signature;               // of what is announced
  char data[kEagerBytes];           // begins in the line of the tag: a scalar is one line
  int64_t rows[kSlotRows];          // what ranks may differ in, and all must know
};

// What its rank gives to one small operation that all ranks wait for, and what that is
// (collectives/instant.h).
struct alignas(kLine) InstantSlot {
  std::atomic<uint64_t> tag;  // of the operation; the last that this rank has announced by this slot
  uint64_t signature;         // of what is announced
  char data[kEagerBytes];     // begins in the line of the tag: a scalar is one line
  int64_t rows[kSlotRows];    // what ranks may differ in, and all must know
};

// Tags of operations without a name: their numbers, and how often all had joined before.
inline constexpr uint64_t kUnnamedTag = uint64_t{1} << 63;
inline uint64_t UnnamedTag(uint64_t joins, uint64_t number) {
  return kUnnamedTag | (joins & 0x7fffff) << 40 | (number & 0xff'ffff'ffff);
}
// The slot of a tag: the same on all ranks.
inline size_t EagerIndexOf(uint64_t tag) {
  return static_cast<size_t>((tag ^ (tag >> 32) * 7) % kEagerSlots);
}

// A message for one rank (transport/inbox.h). `turn` is 2n while the slot is free for the n-th message in it,
// 2n + 1 while it holds that.
struct alignas(kLine) InboxSlot {
  std::atomic<uint64_t> turn;
  Envelope envelope;
  uint64_t bytes;  // of data
  char data[kMailBytes];
};

// What a rank waits for in a bucket: that a flag of one peer, or of all others, reaches a value. One word, so
// that who posts a flag reads it whole and wakes those whose wait that ends. 0 in the segment: nothing.
struct DataWait {
  static constexpr int kAll = (1 << 15) - 2;
  int peer = -1;  // -1: for nothing
  bool done = false;
  uint64_t value = 0;

  uint64_t Word() const {
    return static_cast<uint64_t>(peer + 1) | static_cast<uint64_t>(done) << 15 | value << 16;
  }
  static DataWait Of(uint64_t word) {
    return {static_cast<int>(word & 0x7fff) - 1, (word >> 15 & 1) != 0, word >> 16};
  }
};

// Where everything lies, from the number of ranks and the configuration alone.
struct SegmentLayout {
  // `size`: ranks of this host; `world_size`: of all hosts.
  SegmentLayout(int size, int world_size, const Config& config);

  int size;
  int world_size;
  size_t log_slots;     // power of two
  size_t bucket_slots;  // twice as many: a bucket may be without entries, but not two in a row
  size_t cache_capacity;
  size_t chunk_bytes;  // at most; a multiple of the page size
  size_t chunk_slots;
  size_t slot_bytes;  // a chunk, and some lines that keep slots from lying alike within their pages
  size_t ranks_at, left_at, log_at, bucket_ends_at, counters_at, broadcast_at, records_at, eager_at,
      instant_at, inbox_at, notices_at, staging_at;
  size_t total_bytes;
};

class Segment {
 public:
  // Maps `fd` (kept by the caller), or fd -1: anonymous memory for ranks of this process.
  // Rank 0 writes the header; the others wait for it (Engine::Attach).
  static Status Map(int fd, const SegmentLayout& layout, std::shared_ptr<Segment>* out);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  SegmentHeader& header() { return *reinterpret_cast<SegmentHeader*>(base_); }
  RankBlock& rank(int r) {
    return *reinterpret_cast<RankBlock*>(base_ + layout_.ranks_at + static_cast<size_t>(r) * kRankStride);
  }
  // Whether a rank (of the world; its leader says so for other hosts) has left cleanly.
  std::atomic<uint32_t>& left(int rank) {
    return At<std::atomic<uint32_t>>(layout_.left_at)[static_cast<size_t>(rank)];
  }
  std::atomic<uint64_t>* log() { return At<std::atomic<uint64_t>>(layout_.log_at); }
  std::atomic<uint64_t>* bucket_ends() { return At<std::atomic<uint64_t>>(layout_.bucket_ends_at); }
  std::atomic<uint32_t>* counters() { return At<std::atomic<uint32_t>>(layout_.counters_at); }
  char* broadcast_ring() { return base_ + layout_.broadcast_at; }
  // kRecordSlots of them; written by rank r alone.
  OperationSlot* records(int r) {
    return At<OperationSlot>(layout_.records_at) + static_cast<size_t>(r) * kRecordSlots;
  }
  // kEagerSlots of them; written by rank r alone.
  EagerSlot* eager(int r) { return At<EagerSlot>(layout_.eager_at) + static_cast<size_t>(r) * kEagerSlots; }
  // kInstantSlots of them; written by rank r alone.
  InstantSlot* instant(int r) {
    return At<InstantSlot>(layout_.instant_at) + static_cast<size_t>(r) * kInstantSlots;
  }
  // kMailSlots of them; written by all others.
  InboxSlot* inbox(int r) { return At<InboxSlot>(layout_.inbox_at) + static_cast<size_t>(r) * kMailSlots; }
  // One for each rank of the world, other hosts' included.
  WaitNotice& notice(int rank) { return At<WaitNotice>(layout_.notices_at)[static_cast<size_t>(rank)]; }
  char* staging(int r, uint64_t chunk) {
    return base_ + layout_.staging_at +
           (static_cast<size_t>(r) * layout_.chunk_slots + chunk % layout_.chunk_slots) * layout_.slot_bytes;
  }
  const SegmentLayout& layout() const { return layout_; }

  void WriteHeader(uint32_t epoch, const Config& config);
  // Fails when the header is another release's, or names another world.
  Status CheckHeader(uint32_t epoch, Config* config);

  // This segment is a process set's: it is revoked with the world's, and that with it. Set before use.
  void BelongTo(std::shared_ptr<Segment> world) { world_ = std::move(world); }
  bool belongs() const { return world_ != nullptr; }

  // The first call wins; the others' text is dropped. Wakes every sleeper.
  void Revoke(Code code, const std::string& text);
  bool revoked() {
    return header().revoked.load(std::memory_order_acquire) != 0 || (world_ != nullptr && world_->revoked());
  }
  Status RevokedStatus();

  // Wakes rank r's driver, respectively its engine thread.
  void WakeDriver(int r);
  void WakeIdle(int r);
  // The engine thread of a rank that has something to bring forward, and whose driver nobody is.
  void WakeUndriven(int r) {
    RankBlock& block = rank(r);
    if (block.driving.load(std::memory_order_seq_cst) == 0 &&
        block.pending.load(std::memory_order_seq_cst) != 0) {
      WakeIdle(r);
    }
  }
  // After a message for rank r, who may wait for it.
  void WakeReceiver(int r) {
    RingSleeper(r, /*for_data=*/false);
    WakeUndriven(r);
  }
  // After a seq_cst store to what sleeping drivers may wait for: the log, rings and counts, respectively data
  // flags.
  void WakeWaiting() {
    if (header().sleepers.load(std::memory_order_seq_cst) != 0) RingSleepers(/*for_data=*/false);
  }
  void WakeDataWaiting() {
    if (header().sleepers.load(std::memory_order_seq_cst) != 0) RingSleepers(/*for_data=*/true);
  }

  // Whether what rank r waits for has come.
  bool Reached(int r, const DataWait& wait) { return Lacking(r, wait) < 0; }
  // Whose data rank r still waits for, or -1.
  int WaitsFor(int r) { return Lacking(r, DataWait::Of(rank(r).waits_for.load(std::memory_order_acquire))); }

  // In a forked child: the parent's mapping is not there (MADV_DONTFORK), so never unmap.
  void Forget() { base_ = nullptr; }

 private:
  static constexpr size_t kRankStride = RoundUp(sizeof(RankBlock), 4096);
  friend struct SegmentLayout;

  Segment(char* base, const SegmentLayout& layout) : base_(base), layout_(layout) {}
  void RingSleeper(int r, bool for_data);
  void RingSleepers(bool for_data);
  // The first whose flag has not reached the value, or -1.
  int Lacking(int r, const DataWait& wait);
  template <class T>
  T* At(size_t offset) {
    return reinterpret_cast<T*>(base_ + offset);
  }

  char* base_;
  const SegmentLayout layout_;
  std::shared_ptr<Segment> world_;
};

// Sleeps while *word == expected, at most timeout_ns. Works across processes.
void FutexWait(std::atomic<uint32_t>* word, uint32_t expected, int64_t timeout_ns);
void FutexWakeAll(std::atomic<uint32_t>* word);

}  // namespace kolovod
