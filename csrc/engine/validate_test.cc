#include "engine/validate.h"

#include <tuple>

#include "testing/check.h"

namespace kolovod {
namespace {

Request Of(Verb verb, std::vector<std::vector<int64_t>> shapes, std::vector<int64_t> splits = {}) {
  Request request;
  request.verb = verb;
  request.splits = std::move(splits);
  for (std::vector<int64_t>& shape : shapes) request.tensors.push_back({DType::kFloat32, std::move(shape)});
  return request;
}

TEST_CASE("a request of another rank must be one that submit lets pass") {
  CHECK(IsSound(Of(Verb::kAllreduce, {{}, {2, 3}}), 2));
  CHECK(IsSound(Of(Verb::kAllgather, {{0}, {2, 3}}), 2));
  CHECK(IsSound(Of(Verb::kAlltoall, {{3, 7}}, {1, 2}), 2));
  CHECK(IsSound(Of(Verb::kBarrier, {}), 2));
  CHECK(!IsSound(Of(Verb::kAllgather, {{2}, {}}), 2));
  CHECK(!IsSound(Of(Verb::kReducescatter, {{}}), 2));
  CHECK(!IsSound(Of(Verb::kAlltoall, {}, {1, 2}), 2));
  CHECK(!IsSound(Of(Verb::kAlltoall, {{3}, {3}}, {1, 2}), 2));
  CHECK(!IsSound(Of(Verb::kAlltoall, {{3}}, {1}), 2));
  CHECK(!IsSound(Of(Verb::kAlltoall, {{3}}, {1, 1, 1}), 2));
  CHECK(!IsSound(Of(Verb::kAlltoall, {{3}}, {2, 2}), 2));
  CHECK(!IsSound(Of(Verb::kAlltoall, {{3}}, {-1, 2}), 2));
  CHECK(!IsSound(Of(Verb::kAllreduce, {{3}}, {1, 2}), 2));
  for (const auto& [verb, op, sound] : {std::tuple{Verb::kAllreduce, Op::kAverage, true},
                                        {Verb::kAllreduce, Op::kMax, false},
                                        {Verb::kReducescatter, Op::kSum, false}}) {
    Request request = Of(verb, {{4, 2}});
    request.op = op;
    CHECK(IsSound(request, 2));
    request.tensors[0].codec = Codec::kInt8;
    CHECK(IsSound(request, 2) == sound);
  }
  for (int root : {-1, 2}) {
    Request request = Of(Verb::kBroadcast, {{3}});
    request.root = root;
    CHECK(!IsSound(request, 2));
  }
}

TEST_CASE("rows must be those that follow from the request") {
  const Request gather = Of(Verb::kAllgather, {{3, 2}, {1}});
  CHECK(RowsFit(gather, {{3, 5}, {1, 0}}, 0, 2));
  CHECK(!RowsFit(gather, {{3, 5}, {1, 0}}, 1, 2));  // rank 1 has 3 rows as well, not 5
  CHECK(!RowsFit(gather, {{3, 5}}, 0, 2));
  CHECK(!RowsFit(gather, {{3, 5}, {1, 0}, {}}, 0, 2));
  CHECK(!RowsFit(gather, {{3}, {1, 0}}, 0, 2));
  CHECK(!RowsFit(gather, {{3, 5, 0}, {1, 0}}, 0, 2));
  CHECK(!RowsFit(gather, {{3, INT64_MAX / 4}, {1, 0}}, 0, 2));  // times 8 bytes
  CHECK(!RowsFit(gather, {{3, INT64_MAX / 8}, {1, 0}}, 0, 2));  // and three rows more
  CHECK(RowsFit(Of(Verb::kAlltoall, {{3}}, {1, 2}), {}, 0, 2));
  CHECK(!RowsFit(Of(Verb::kAlltoall, {{3}}, {1, 2}), {{1, 2, 0, 7}}, 0, 2));
  CHECK(RowsFit(Of(Verb::kJoin, {}), {{1}}, 0, 2));
  CHECK(!RowsFit(Of(Verb::kJoin, {}), {{}}, 0, 2));
  CHECK(!RowsFit(Of(Verb::kJoin, {}), {}, 0, 2));
  CHECK(RowsFit(Of(Verb::kAllreduce, {{3}}), {}, 0, 2));
  CHECK(!RowsFit(Of(Verb::kAllreduce, {{3}}), {{3, 3}}, 0, 2));
}

TEST_CASE("splits must be those of the request and of this host") {
  const Request exchange = Of(Verb::kAlltoall, {{5, 2}}, {1, 2, 0});
  const Splits all = Splits::OfAll({{1, 2, 0}, {4, 0, 9}, {1, 2, 0}});
  const Topology shares(0, {0, 1, 0}), alone(1, {0, 1, 0}), other(2, {0, 1, 0});
  const Splits here = all.For({0, 2}), there = all.For({1});
  CHECK(SplitsFit(exchange, &here, shares));
  CHECK(SplitsFit(exchange, &here, other));
  CHECK(!SplitsFit(exchange, &here, alone));   // another host's
  CHECK(!SplitsFit(exchange, &there, alone));  // rank 1 sends 4, 0 and 9
  CHECK(!SplitsFit(exchange, &there, shares));
  CHECK(!SplitsFit(exchange, &all, shares));  // more than it asked for
  CHECK(SplitsFit(exchange, &all, Topology(0, {0, 0, 0})));
  CHECK(!SplitsFit(exchange, nullptr, shares));
  CHECK(!SplitsFit(exchange, &here, Topology(0, {0, 1, 0, 0})));
  CHECK(SplitsFit(Of(Verb::kBarrier, {}), nullptr, shares));
  CHECK(!SplitsFit(Of(Verb::kBarrier, {}), &here, shares));
  const Splits large = Splits::OfAll({{1, 2, 0}, {INT64_MAX / 8, 0, 0}, {0, 0, 0}});
  CHECK(!SplitsFit(exchange, &large, Topology(0, {0, 0, 0})));  // times 8 bytes, and three rows more
}

}  // namespace
}  // namespace kolovod
