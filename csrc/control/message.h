// What ranks tell each other before data moves, and its bytes (docs/wire.md). Every read is checked
// against the end of the buffer, every count against what the buffer could hold.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/types.h"

namespace kolovod {

struct TensorMeta {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
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
  std::vector<int64_t> splits;  // alltoall: rows for each rank
  std::vector<TensorMeta> tensors;
};

inline constexpr int32_t kNoId = -1;

// The sequencer's answer, the same on every rank.
struct Response {
  // kForgetAll: a rank has joined and announces nothing more by bit, so nobody does until all have.
  enum class Kind : uint8_t { kExecute = 0, kError = 1, kForget = 2, kForgetAll = 3 };
  static constexpr int kKindCount = 4;
  Kind kind = Kind::kExecute;
  std::string name;
  int32_t id = kNoId;  // kExecute: announce by this bit next time; kForget: no longer valid
  std::string error;   // kError
  // While ranks have joined: the encoded request, from which those make an operation that contributes zeros.
  std::string request;
  // What a rank cannot know by itself: for each tensor of an allgather dimension 0 by rank; for an alltoall
  // the rows that rank s sends to rank d, at s * size + d; for a join who came last.
  std::vector<std::vector<int64_t>> rows;
};

std::string EncodeRequest(const Request& request);
std::optional<Request> DecodeRequest(std::string_view bytes);
std::string EncodeResponse(const Response& response);
std::optional<Response> DecodeResponse(std::string_view bytes);

inline constexpr size_t kMaxDims = 64;
inline constexpr size_t kMaxFrameBytes = 64 << 20;

}  // namespace kolovod
