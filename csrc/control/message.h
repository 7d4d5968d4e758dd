// What ranks tell each other before data moves, and its bytes (docs/wire.md). Every read is checked
// against the end of the buffer, every count against what the buffer could hold.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/splits.h"
#include "base/types.h"

namespace kolovod {

struct TensorMeta {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  Device device = Device::kHost;
  Codec codec = Codec::kNone;  // that was asked for; of an allreduce by Sum or Average
  bool operator==(const TensorMeta&) const = default;
};

// One rank has this ready.
struct Request {
  std::string name;
  bool cacheable = true;  // named by the user, so it may come again
  Verb verb = Verb::kAllreduce;
  Op op = Op::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  int32_t root = 0;
  std::vector<int64_t> splits;      // alltoall: rows for each rank
  std::vector<TensorMeta> tensors;  // all on one device
  // Without a name: the lines of the script that call it, innermost first, or empty where they do not matter.
  std::string called_from;
  // Announced in full: hashes of all lines from which the innermost one was called by this rank.
  std::vector<int64_t> callers;

  Device device() const { return tensors.empty() ? Device::kHost : tensors.front().device; }
};

inline constexpr int32_t kNoId = -1;

// The sequencer's answer, the same on every rank but for what is left out of `splits`.
struct Response {
  // kForgetAll: a rank has joined and announces nothing more by bit, so nobody does until all have.
  // kLinks: what the links between hosts cost, from the bucket on in which this is.
  enum class Kind : uint8_t { kExecute = 0, kError = 1, kForget = 2, kForgetAll = 3, kLinks = 4 };
  static constexpr int kKindCount = 5;
  Kind kind = Kind::kExecute;
  std::string name;
  int32_t id = kNoId;  // kExecute: announce by this bit next time; kForget: no longer valid
  std::string error;   // kError
  // While ranks have joined: the encoded request, from which those make an operation that contributes zeros.
  std::string request;
  // What a rank cannot know by itself: for each tensor of an allgather dimension 0 by rank; for a join who
  // came last. kLinks: the latency in nanoseconds, bytes per millisecond,
  // and whether operations have confirmed them.
  std::vector<std::vector<int64_t>> rows;
  // Of an alltoall: who sends how much to whom. What the root decides holds all; what it tells a host, that
  // host's ranks.
  std::shared_ptr<const Splits> splits;
};

// What all must know of what one rank gives: the first dimensions of an allgather's tensors, the splits of an
// alltoall.
std::vector<int64_t> OwnRows(const Request& request);
// From everybody's, by rank: Response::rows of an allgather, Response::splits of an alltoall.
void SetRows(Verb verb, const std::vector<std::vector<int64_t>>& by_rank,
             std::vector<std::vector<int64_t>>* rows, std::shared_ptr<const Splits>* splits);

std::string EncodeRequest(const Request& request);
std::optional<Request> DecodeRequest(std::string_view bytes);
std::string EncodeResponse(const Response& response);
std::optional<Response> DecodeResponse(std::string_view bytes);

// What goes up to the root and down from it: within a host through its leader's rings, between leaders
// through their connections.
struct Note {
  enum class Kind : uint8_t {
    kRequest = 0,  // up: `rank` has this ready; body: the request
    kId = 1,  // up: all ranks of the host have announced bit `number`; down: all have, it is next in the log
    kResponse = 2,     // down: next in the log; body: the response; rank: 0, or for which leader's host alone
    kReset = 3,        // down: bit `number` will stand for another name
    kBucketEnd = 4,    // down: bucket `number` ends at `end` (BucketEnd::Word)
    kLeft = 5,         // both: `rank` has left cleanly
    kRevoked = 6,      // both: the world is over; number: the code, body: the text
    kOverdue = 7,      // both: body: for what the ranks of leader `rank`'s host wait too long
    kOverdueSeen = 8,  // both: that leader has read it; number: 1 if it knows a rank of its host to be late
    kWaits = 9,        // both: body: what `rank` says of its waits, for the number-th time
  };
  static constexpr int kKindCount = 10;
  Kind kind = Kind::kRequest;
  int32_t rank = 0;
  uint64_t number = 0;
  uint64_t end = 0;
  std::string body;
};

std::string EncodeNote(const Note& note);
std::optional<Note> DecodeNote(std::string_view bytes);

inline constexpr size_t kMaxDims = 64;

}  // namespace kolovod
