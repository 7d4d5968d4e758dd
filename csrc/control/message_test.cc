#include "control/message.h"

#include <random>

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
  return request;
}

Response SomeResponse() {
  Response response;
  response.kind = Response::Kind::kError;
  response.name = "x";
  response.id = 7;
  response.error = "shape differs";
  response.rows = {{1, 2, 3}, {}};
  return response;
}

TEST(a_request_survives) {
  const Request request = SomeRequest();
  const auto decoded = DecodeRequest(EncodeRequest(request));
  CHECK(decoded.has_value());
  CHECK(decoded->name == request.name && decoded->tensors == request.tensors);
  CHECK(decoded->op == request.op && decoded->verb == request.verb && decoded->root == 2);
  CHECK(decoded->splits == request.splits);
  CHECK(decoded->prescale == 0.5 && decoded->postscale == 3.0);
  CHECK(EncodeRequest(*decoded) == EncodeRequest(request));
}

TEST(a_response_survives) {
  const Response response = SomeResponse();
  const auto decoded = DecodeResponse(EncodeResponse(response));
  CHECK(decoded.has_value());
  CHECK(decoded->kind == response.kind && decoded->name == "x" && decoded->id == 7);
  CHECK(decoded->error == response.error && decoded->rows == response.rows);
}

TEST(a_truncated_or_longer_message_is_refused) {
  const std::string request = EncodeRequest(SomeRequest());
  const std::string response = EncodeResponse(SomeResponse());
  for (size_t n = 0; n < request.size(); ++n) CHECK(!DecodeRequest(request.substr(0, n)));
  for (size_t n = 0; n < response.size(); ++n) CHECK(!DecodeResponse(response.substr(0, n)));
  CHECK(!DecodeRequest(request + "x"));
  CHECK(!DecodeResponse(response + "x"));
}

TEST(a_count_that_cannot_be_there_is_refused_before_memory_is_taken) {
  Request request = SomeRequest();
  request.tensors.clear();
  std::string bytes = EncodeRequest(request);
  bytes.replace(bytes.size() - 4, 4, "\xff\xff\xff\x7f");
  CHECK(!DecodeRequest(bytes));
}

TEST(more_bytes_than_can_be_counted_are_refused) {
  Request request = SomeRequest();
  request.tensors = {{DType::kFloat64, {int64_t{1} << 31, int64_t{1} << 28}}};  // 2^62 bytes
  CHECK(DecodeRequest(EncodeRequest(request)));
  request.tensors[0].shape.push_back(2);
  CHECK(!DecodeRequest(EncodeRequest(request)));
  request.tensors[0].shape.push_back(0);
  CHECK(!DecodeRequest(EncodeRequest(request)));
}

// What decodes must encode to the same bytes: no second meaning. Sanitizers watch the rest.
TEST(mutations_never_crash) {
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

TEST_MAIN()
