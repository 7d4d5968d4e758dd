// Rank 0's decisions on what ranks announce, in any order: rank, length, request; and so on.
#include "control/negotiate.h"
#include "engine/validate.h"
#include "fuzz/fuzz.h"

using namespace kolovod;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr int kSize = 3;
  fuzz::Steering steering(data, size);
  Negotiator negotiator({0, 1, 2}, 4);
  while (!steering.empty()) {
    const int rank = steering.Take<uint8_t>() % kSize;
    auto request = DecodeRequest(steering.TakeBytes(steering.Take<uint16_t>()));
    if (!request || !IsSound(*request, kSize) || !negotiator.FindFault(rank, *request).empty()) continue;
    const Request announced = *request;
    for (const Response& response : negotiator.Offer(rank, *std::move(request))) {
      const std::string bytes = EncodeResponse(response);
      const auto decoded = DecodeResponse(bytes);
      fuzz::Require(decoded.has_value(), "what rank 0 answers can be read");
      fuzz::Require(EncodeResponse(*decoded) == bytes, "a response has one encoding");
      fuzz::Require(response.id < 4, "there are so many bits");
      const bool executes = response.kind == Response::Kind::kExecute && response.request.empty();
      if (executes && response.name == announced.name) {
        (void)RowsFit(announced, decoded->rows, rank, kSize);
        const bool exchanges = announced.verb == Verb::kAlltoall;
        const Topology topology(rank, {0, 0, 0});
        fuzz::Require(!exchanges || SplitsFit(announced, decoded->splits.get(), topology),
                      "what rank 0 answers to an alltoall fits what was announced");
      }
    }
    for (int32_t id : negotiator.TakeReleased()) fuzz::Require(id >= 0 && id < 4, "a bit that exists");
  }
  return 0;
}
