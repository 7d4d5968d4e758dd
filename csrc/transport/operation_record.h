// What a rank's last operations were and which of them are pending: a ring of records in the segment. One
// writer, and readers on every rank, so that each sees who has submitted what, also of a rank that is
// stopped or dead.
//
// A pending operation keeps its record whatever comes after it; finished ones are overwritten, oldest first.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/types.h"

namespace kolovod {

inline constexpr size_t kRecordSlots = 1024;
inline constexpr size_t kRecordNameBytes = 56;           // longer names are shortened in the middle
inline constexpr uint32_t kNoRecord = UINT32_MAX;        // never opened
inline constexpr uint32_t kUnrecorded = UINT32_MAX - 1;  // opened while all slots were pending

enum class OperationState : uint32_t { kFree = 0, kSubmitted = 1, kStarted = 2, kDone = 3, kFailed = 4 };
const char* NameOf(OperationState state);

// One record as its readers see it. Times are CLOCK_MONOTONIC, 0 for what has not happened.
struct OperationRecord {
  uint64_t number = 0;  // from 1, by order of submission on its rank
  OperationState state = OperationState::kFree;
  Verb verb = Verb::kAllreduce;
  DType dtype = DType::kFloat32;  // of the first tensor
  Device device = Device::kHost;
  Codec codec = Codec::kNone;  // of any tensor: in an allreduce between hosts
  uint32_t tensors = 0;
  int32_t peer = -1;  // of a transfer: the other rank, by the engine's numbers; -1: any
  uint64_t bytes = 0;
  // In which it was executed, numbered from 1 alike on all ranks; 0: in none so far, or it needed none.
  uint64_t bucket = 0;
  int64_t submitted_ns = 0;
  int64_t started_ns = 0;
  int64_t ended_ns = 0;
  uint64_t name_hash = 0;  // of the whole name
  std::string name;

  bool pending() const { return state == OperationState::kSubmitted || state == OperationState::kStarted; }
};

// Words, so that readers of another process meet no torn value; `version` is odd while a new operation is
// being written into the slot.
struct alignas(2 * kLine) OperationSlot {
  std::atomic<uint32_t> version;
  std::atomic<uint32_t> state;
  std::atomic<uint64_t> number, name_hash, bytes, bucket, kind;
  std::atomic<int64_t> submitted_ns, started_ns, ended_ns;
  std::array<std::atomic<uint64_t>, kRecordNameBytes / 8> name;
};
static_assert(sizeof(OperationSlot) == 2 * kLine);

uint64_t HashName(std::string_view name);

// The writer. No allocation and no system call; calls for one operation come in this order, from one thread
// at a time, and `Open` from one thread at a time.
class OperationRecorder {
 public:
  // `unrecorded` counts pending operations that found all slots pending.
  OperationRecorder(OperationSlot* slots, std::atomic<uint32_t>* unrecorded)
      : slots_(slots), unrecorded_(unrecorded) {}

  // The slot, or kUnrecorded. `tensors`: of a transfer the peer, + 1.
  uint32_t Open(std::string_view name, Verb verb, DType dtype, Device device, Codec codec, size_t tensors,
                size_t bytes, int64_t now_ns);
  void Started(uint32_t slot, uint64_t bucket, int64_t now_ns);
  void Ended(uint32_t slot, bool ok, int64_t now_ns);

 private:
  OperationSlot* const slots_;
  std::atomic<uint32_t>* const unrecorded_;
  uint64_t number_ = 0;
  size_t next_ = 0;
};

// All records in `slots`, by number. What changes meanwhile is read as it is before or after, or left out.
std::vector<OperationRecord> ReadRecords(const OperationSlot* slots);

// When the oldest pending operation was submitted, or started if it was; INT64_MAX: none. Cheaper than
// ReadRecords.
int64_t OldestPendingNs(const OperationSlot* slots);

}  // namespace kolovod
