// Rank 0's answer (docs/wire.md, Response), and whether it fits what a rank has announced.
#include "control/message.h"
#include "engine/validate.h"
#include "fuzz/fuzz.h"

using namespace kolovod;

namespace {

// What is computed from rows that fit, as Engine::ExecuteAllgather does.
void UseRows(const Request& request, const Response& response, int rank, int size) {
  if (!RowsFit(request, response.rows, rank, size)) return;
  for (size_t t = 0; t < response.rows.size() && request.verb != Verb::kJoin; ++t) {
    long double total = 0;
    TensorMeta row = request.tensors.at(t);
    row.shape.at(0) = 1;
    for (int64_t rows : response.rows[t]) {
      total += static_cast<long double>(rows) * ElementsOf(row) * SizeOf(row.dtype);
    }
    fuzz::Require(total <= static_cast<long double>(INT64_MAX), "the bytes of all ranks can be counted");
  }
}

// Of rank 1 of three, alone on its host, and of ranks 0 and 2, who share theirs.
void UseSplits(const Request& request, const Splits* splits) {
  for (int rank = 0; rank < 3; ++rank) {
    const Topology topology(rank, {0, 1, 0});
    if (!SplitsFit(request, splits, topology) || splits == nullptr) continue;
    long double total = 0;
    for (const int r : topology.local_ranks) {
      for (int peer = 0; peer < 3; ++peer) total += splits->sent(r, peer) + splits->received(peer, r);
    }
    const Splits inside = splits->Within(topology.local_ranks);
    for (const int r : topology.local_ranks) total += splits->For({r}).SumSent();
    fuzz::Require(inside.total() <= splits->total(), "a part is no more than the whole");
    total *= static_cast<long double>(SizeOf(request.tensors[0].dtype));
    fuzz::Require(total <= 3 * static_cast<long double>(INT64_MAX), "the bytes of this host can be counted");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto response = fuzz::Bounded(bytes, 16, DecodeResponse);
  if (!response) return 0;
  fuzz::Require(EncodeResponse(*response) == bytes, "a response has one encoding");
  Request request;
  request.verb = Verb::kAllgather;
  request.tensors = {{DType::kFloat32, {3, 1000}}};
  UseRows(request, *response, 1, 2);
  request.verb = Verb::kAlltoall;
  request.splits = {1, 2, 0};
  UseRows(request, *response, 0, 3);
  UseSplits(request, response->splits.get());
  request.verb = Verb::kJoin;
  UseRows(request, *response, 0, 2);
  return 0;
}
