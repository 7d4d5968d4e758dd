#include "control/message.h"

#include <numeric>
#include <random>

#include "control/bytes.h"
#include "testing/check.h"

namespace kolovod {
namespace {

Request SomeRequest() {
  Request request;
  request.name = "layer.weight";
  request.verb = Verb::kAllreduce;
  request.op = Op::kAverage;
  request.prescale = 0.5;
  request.postscale = 3.0;
  request.root = 2;
  request.splits = {1, 0, 4};
  request.tensors = {{DType::kBFloat16, {3, 4, 5}}, {DType::kInt64, {}}, {DType::kBool, {0}}};
  request.tensors[0].codec = Codec::kInt4;
  request.called_from = "loss.py:3, from train.py:40";
  request.callers = {5, 7};
  return request;
}

Response SomeResponse() {
  Response response;
  response.kind = Response::Kind::kError;
  response.name = "x";
  response.id = 7;
  response.error = "shape differs";
  response.rows = {{1, 2, 3}, {}};
  response.splits =
      std::make_shared<const Splits>(Splits::OfAll({{1, 300, 0}, {7, 0, 1 << 20}, {0, 2, 127}}));
  return response;
}

TEST_CASE("a request survives") {
  const Request request = SomeRequest();
  const auto decoded = DecodeRequest(EncodeRequest(request));
  CHECK(decoded.has_value());
  CHECK(decoded->name == request.name);
  CHECK(decoded->tensors == request.tensors);
  CHECK(decoded->op == request.op);
  CHECK(decoded->verb == request.verb);
  CHECK(decoded->root == 2);
  CHECK(decoded->splits == request.splits);
  CHECK(decoded->prescale == 0.5);
  CHECK(decoded->postscale == 3.0);
  CHECK(decoded->called_from == request.called_from);
  CHECK(decoded->callers == request.callers);
  CHECK(EncodeRequest(*decoded) == EncodeRequest(request));
}

TEST_CASE("a response survives") {
  const Response response = SomeResponse();
  const auto decoded = DecodeResponse(EncodeResponse(response));
  CHECK(decoded.has_value());
  CHECK(decoded->kind == response.kind);
  CHECK(decoded->name == "x");
  CHECK(decoded->id == 7);
  CHECK(decoded->error == response.error);
  CHECK(decoded->rows == response.rows);
  CHECK(decoded->splits->numbers() == response.splits->numbers());
  CHECK(decoded->splits->ranks() == response.splits->ranks());
  CHECK(EncodeResponse(*decoded) == EncodeResponse(response));
}

TEST_CASE("a large world has small responses") {
  constexpr int kRanks = 4096, kOnHost = 8;
  // As one of a batch of 4 million rows sends them, some hundreds to each.
  std::vector<std::vector<int64_t>> by_rank(kRanks, std::vector<int64_t>(kRanks));
  for (size_t s = 0; s < kRanks; ++s) {
    for (size_t d = 0; d < kRanks; ++d) by_rank[s][d] = static_cast<int64_t>(s * 7 + d * 13) % 2000;
  }
  Response response;
  response.name = "exchange";
  const Splits all = Splits::OfAll(by_rank);
  size_t sum = 0;
  for (int first = 0; first < kRanks; first += kOnHost) {
    std::vector<int> ranks(kOnHost);
    std::iota(ranks.begin(), ranks.end(), first);
    response.splits = std::make_shared<const Splits>(all.For(ranks));
    const std::string bytes = EncodeNote(Note{Note::Kind::kResponse, first, 0, 0, EncodeResponse(response)});
    CHECK(bytes.size() < 2 * 2 * kOnHost * kRanks + 200);  // two bytes a number; a frame may have 64 MiB
    sum += bytes.size();
    if (first % 1024 != 0) continue;
    const auto read = DecodeResponse(DecodeNote(bytes)->body);
    CHECK(read.has_value());
    CHECK(read->splits->total() == all.total());
    CHECK(read->splits->numbers() == response.splits->numbers());
  }
  // All that leaves the root is what one response to one host was.
  CHECK(sum < sizeof(int64_t) * kRanks * kRanks);
  // However large the numbers are.
  for (auto& rows : by_rank) rows.assign(kRanks, INT64_MAX / kRanks);
  response.splits = std::make_shared<const Splits>(Splits::OfAll(by_rank).For({0, 1, 2, 3, 4, 5, 6, 7}));
  CHECK(EncodeResponse(response).size() < (1 << 20));
}

TEST_CASE("splits that cannot be are refused") {
  Response response;
  const std::string none = EncodeResponse(response);
  const std::string front = none.substr(0, none.size() - sizeof(uint32_t));
  const auto of = [&](uint32_t size, uint32_t count, const std::vector<uint8_t>& rest) {
    Writer w;
    w.Put(size);
    w.Put(count);
    for (const uint8_t byte : rest) w.Put(byte);
    return DecodeResponse(front + w.Take());
  };
  CHECK(of(2, 1, {1, 9, 3, 2, 4}).has_value());  // rank 1 sends 3 and 2, rank 0 sends 4 to it
  CHECK(of(2, 1, {1, 9, 3, 2, 4})->splits->received(0, 1) == 4);
  CHECK(!of(2, 1, {1, 9, 3, 2}).has_value());           // too few numbers
  CHECK(!of(2, 1, {1, 9, 3, 2, 4, 0}).has_value());     // too many
  CHECK(!of(2, 0, {9}).has_value());                    // nobody's
  CHECK(!of(2, 1, {2, 9, 3, 2, 4}).has_value());        // of a rank that there is not
  CHECK(!of(2, 2, {1, 0, 9, 3, 2, 4, 0}).has_value());  // in another order
  CHECK(!of(2, 1, {1, 4, 3, 2, 4}).has_value());        // less than this rank sends
  CHECK(!of(2, 1, {1, 9, 0x83, 0, 2, 4}).has_value());  // 3, but longer than need be
  CHECK(!of(2, 1, {1, 9, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 2, 4}).has_value());
  CHECK(!of(1 << 30, 1, {1, 9, 3, 2, 4}).has_value());  // without the memory for it
  CHECK(!of(UINT32_MAX, UINT32_MAX, {1}).has_value());
}

TEST_CASE("a truncated or longer message is refused") {
  const std::string request = EncodeRequest(SomeRequest());
  const std::string response = EncodeResponse(SomeResponse());
  for (size_t n = 0; n < request.size(); ++n) CHECK(!DecodeRequest(request.substr(0, n)));
  for (size_t n = 0; n < response.size(); ++n) CHECK(!DecodeResponse(response.substr(0, n)));
  CHECK(!DecodeRequest(request + "x"));
  CHECK(!DecodeResponse(response + "x"));
}

TEST_CASE("a count that cannot be there is refused before memory is taken") {
  Request request = SomeRequest();
  request.tensors.clear();
  request.called_from.clear();
  request.callers.clear();
  const std::string bytes = EncodeRequest(request);  // the three counts are at its end
  for (const size_t end : {size_t{4}, size_t{8}, size_t{12}}) {
    std::string changed = bytes;
    changed.replace(bytes.size() - end, 4, "\xff\xff\xff\x7f");
    CHECK(!DecodeRequest(changed));
  }
}

TEST_CASE("more bytes than can be counted are refused") {
  Request request = SomeRequest();
  request.tensors = {{DType::kFloat64, {int64_t{1} << 31, int64_t{1} << 28}}};  // 2^62 bytes
  CHECK(DecodeRequest(EncodeRequest(request)));
  request.tensors[0].shape.push_back(2);
  CHECK(!DecodeRequest(EncodeRequest(request)));
  request.tensors[0].shape.push_back(0);
  CHECK(!DecodeRequest(EncodeRequest(request)));
}

// What decodes must encode to the same bytes: no second meaning. Sanitizers watch the rest.
TEST_CASE("mutations never crash") {
  std::mt19937 random(3);
  const std::string seeds[] = {EncodeRequest(SomeRequest()), EncodeResponse(SomeResponse())};
  int accepted = 0;
  for (int i = 0; i < 200000; ++i) {
    std::string bytes = seeds[i % 2];
    for (int m = 0; m <= static_cast<int>(random() % 4); ++m) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    if (i % 2 == 0) {
      if (const auto request = DecodeRequest(bytes)) {
        ++accepted;
        CHECK(EncodeRequest(*request) == bytes);
      }
    } else if (const auto response = DecodeResponse(bytes)) {
      ++accepted;
      CHECK(EncodeResponse(*response) == bytes);
    }
  }
  CHECK(accepted > 0);
}

}  // namespace
}  // namespace kolovod
