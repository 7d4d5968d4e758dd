// What there is to know of a verb before any data moves: one row of a table each. A new verb is a number and
// a row here, how it is executed (engine/executor.cc), and its data movement in each backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace kolovod {

// The numbers are part of the wire format (docs/wire.md) and of the Python front end: they never change.
enum class Verb : uint8_t {
  kAllreduce = 0,
  kBroadcast = 1,
  kAllgather = 2,
  kBarrier = 3,
  kAlltoall = 4,
  kReducescatter = 5,
  kJoin = 6,
  kSend = 7,
  kRecv = 8,
};

// How many tensors an operation has.
enum class TensorCount : uint8_t { kNone, kOne, kAny };
// What may differ between the ranks' requests, so that all are told what each has said: nothing, the first
// dimensions of the tensors, or those and the rows for each rank.
enum class RowsDiffer : uint8_t { kNo, kFirstDimension, kSplits };

struct VerbTraits {
  Verb verb;
  const char* name;
  TensorCount tensors = TensorCount::kAny;
  RowsDiffer rows_differ = RowsDiffer::kNo;
  bool reduces = false;        // combines the ranks' elements: has an op and factors
  bool fuses = false;          // tensors of several operations are reduced as one range
  bool makes_outputs = false;  // only the engine knows how large the results are
  bool has_root = false;       // one rank's data goes to all
  bool is_transfer = false;    // from one rank to another, without the others
  bool allows_joined = false;  // ranks that have joined take part with zeros
};

inline constexpr VerbTraits kVerbTable[] = {
    {.verb = Verb::kAllreduce, .name = "allreduce", .reduces = true, .fuses = true, .allows_joined = true},
    {.verb = Verb::kBroadcast, .name = "broadcast", .has_root = true},
    {.verb = Verb::kAllgather,
     .name = "allgather",
     .rows_differ = RowsDiffer::kFirstDimension,
     .makes_outputs = true},
    {.verb = Verb::kBarrier, .name = "barrier", .tensors = TensorCount::kNone},
    {.verb = Verb::kAlltoall,
     .name = "alltoall",
     .tensors = TensorCount::kOne,
     .rows_differ = RowsDiffer::kSplits,
     .makes_outputs = true},
    {.verb = Verb::kReducescatter, .name = "reducescatter", .reduces = true, .makes_outputs = true},
    {.verb = Verb::kJoin, .name = "join", .tensors = TensorCount::kNone},
    {.verb = Verb::kSend, .name = "send", .tensors = TensorCount::kOne, .is_transfer = true},
    {.verb = Verb::kRecv, .name = "recv", .tensors = TensorCount::kOne, .is_transfer = true},
};

inline constexpr int kVerbCount = std::size(kVerbTable);

constexpr const VerbTraits& TraitsOf(Verb verb) { return kVerbTable[static_cast<int>(verb)]; }
constexpr const char* NameOf(Verb verb) { return TraitsOf(verb).name; }

static_assert(
    [] {
      for (int i = 0; i < kVerbCount; ++i) {
        if (static_cast<int>(kVerbTable[i].verb) != i) return false;
      }
      return true;
    }(),
    "the rows are in the order of the numbers");

}  // namespace kolovod
