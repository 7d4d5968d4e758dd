// Rank 0's answer (docs/wire.md, Response), and whether it fits what a rank has announced.
#include "control/message.h"
#include "engine/validate.h"
#include "fuzz/fuzz.h"

using namespace kolovod;

namespace {

// What is computed from rows that fit, as Engine::ExecuteAllgather and ExecuteAlltoall do.
void UseRows(const Request& request, const Response& response, int rank, int size) {
  if (!RowsFit(request, response.rows, rank, size)) return;
  for (size_t t = 0; t < response.rows.size() && request.verb != Verb::kJoin; ++t) {
    __float128 total = 0;
    TensorMeta row = request.tensors.at(t);
    row.shape.at(0) = 1;
    for (int64_t rows : response.rows[t]) {
      total += static_cast<__float128>(rows) * ElementsOf(row) * SizeOf(row.dtype);
    }
    fuzz::Require(total <= static_cast<__float128>(INT64_MAX), "the bytes of all ranks can be counted");
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
  request.splits = {1, 2};
  UseRows(request, *response, 0, 2);
  request.verb = Verb::kJoin;
  UseRows(request, *response, 0, 2);
  return 0;
}
