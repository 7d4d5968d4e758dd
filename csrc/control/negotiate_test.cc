#include "control/negotiate.h"

#include "control/line_history.h"
#include "testing/check.h"

namespace kolovod {
namespace {

using testing::Contains;
using Kind = Response::Kind;

Request Make(const std::string& name, std::vector<int64_t> shape = {2, 3}) {
  Request request;
  request.name = name;
  request.tensors = {{DType::kFloat32, std::move(shape)}};
  return request;
}

// Offers the same request from every rank; returns the last answer.
std::vector<Response> OfferAll(Negotiator& n, int size, const Request& request) {
  std::vector<Response> last;
  for (int r = 0; r < size; ++r) last = n.Offer(r, request);
  return last;
}

TEST_CASE("nothing is said until every rank has it") {
  Negotiator n({0, 1, 2}, 8);
  CHECK(n.Offer(2, Make("a")).empty());
  CHECK(n.Offer(0, Make("b")).empty());
  CHECK(n.Offer(0, Make("a")).empty());
  const auto said = n.Offer(1, Make("a"));
  CHECK(said.size() == 1);
  CHECK(said[0].kind == Kind::kExecute);
  CHECK(said[0].name == "a");
}

TEST_CASE("a name that comes again gets a bit") {
  Negotiator n({0, 1}, 1);
  CHECK(OfferAll(n, 2, Make("a"))[0].id == kNoId);
  CHECK(OfferAll(n, 2, Make("b"))[0].id == kNoId);
  CHECK(OfferAll(n, 2, Make("a"))[0].id == 0);
  CHECK(OfferAll(n, 2, Make("b"))[0].id == kNoId);  // the capacity of 1 is used up
  Request unnamed = Make("unnamed.1");
  unnamed.cacheable = false;
  CHECK(OfferAll(n, 2, unnamed)[0].id == kNoId);
}

TEST_CASE("a cached name with a new shape is forgotten first") {
  Negotiator n({0, 1}, 8);
  OfferAll(n, 2, Make("a"));
  const int32_t id = OfferAll(n, 2, Make("a"))[0].id;
  CHECK(id != kNoId);
  const auto said = n.Offer(1, Make("a", {5}));
  CHECK(said.size() == 1);
  CHECK(said[0].kind == Kind::kForget);
  CHECK(said[0].id == id);
  const auto answer = n.Offer(0, Make("a", {5}));
  CHECK(answer.size() == 1);
  CHECK(answer[0].kind == Kind::kExecute);
}

TEST_CASE("ids of forgotten names are given out again") {
  Negotiator n({0, 1}, 2);
  OfferAll(n, 2, Make("a"));
  for (int64_t i = 1; i < 100; ++i) {
    // Its id is free for others only once all ranks have announced the name in full.
    const auto said = n.Offer(1, Make("a", {i}));
    CHECK(said.size() == (i > 1 ? 1 : 0));
    CHECK(n.TakeReleased().empty());
    const auto answer = n.Offer(0, Make("a", {i}));
    CHECK(answer.size() == 1);
    CHECK(answer[0].id >= 0);
    CHECK(answer[0].id < 2);
    CHECK(n.TakeReleased().size() == (i > 1 ? 1 : 0));
  }
  OfferAll(n, 2, Make("b"));
  CHECK(OfferAll(n, 2, Make("b"))[0].id != kNoId);
}

Request MakeJoin() {
  Request request = Make("join", {});
  request.verb = Verb::kJoin;
  request.tensors.clear();
  request.cacheable = false;
  return request;
}

TEST_CASE("who has joined says nothing until all have") {
  Negotiator n({3, 5}, 8);
  CHECK(n.FindFault(1, MakeJoin()).empty());
  n.Offer(1, MakeJoin());
  CHECK(n.FindFault(1, MakeJoin()) ==
        "rank 5 has joined, and then announces join 'join' before all have joined");
  CHECK(n.FindFault(1, Make("t")).starts_with("rank 5 has joined, and then announces allreduce 't'"));
  CHECK(n.FindFault(0, Make("t")).empty());
  n.Offer(0, MakeJoin());
  CHECK(n.FindFault(1, MakeJoin()).empty());
}

TEST_CASE("others go on without those that have joined") {
  Negotiator n({4, 5, 6}, 8);
  OfferAll(n, 3, Make("a"));
  CHECK(OfferAll(n, 3, Make("a"))[0].id != kNoId);
  CHECK(n.Offer(0, Make("waits")).empty());
  CHECK(n.Offer(2, Make("waits")).empty());
  // All bits are forgotten, and what waited for the one that joined goes on.
  const auto said = n.Offer(1, MakeJoin());
  CHECK(said.size() == 2);
  CHECK(said[0].kind == Kind::kForgetAll);
  CHECK(said[1].name == "waits");
  CHECK(DecodeRequest(said[1].request)->tensors == Make("waits").tensors);
  // No bits while somebody has joined, and the old one is free once the name was announced by the rest.
  CHECK(n.Offer(0, Make("a")).empty());
  const auto again = n.Offer(2, Make("a"));
  CHECK(again.size() == 1);
  CHECK(again[0].kind == Kind::kExecute);
  CHECK(again[0].id == kNoId);
  CHECK(n.TakeReleased().size() == 1);
  Request gather = Make("g");
  gather.verb = Verb::kAllgather;
  n.Offer(0, gather);
  const auto refused = n.Offer(2, gather);
  CHECK(refused[0].kind == Kind::kError);
  CHECK(refused[0].error == Contains("rank 5 has joined"));
  CHECK(n.Offer(2, MakeJoin()).size() == 1);
  CHECK(n.Offer(0, Make("alone"))[0].kind == Kind::kExecute);
  const auto done = n.Offer(0, MakeJoin());
  CHECK(done.size() == 1);
  CHECK(done[0].kind == Kind::kExecute);
  CHECK(done[0].name == "join");
  CHECK(done[0].rows == std::vector<std::vector<int64_t>>{{0}});
  // And then everything is as before.
  CHECK(OfferAll(n, 3, gather)[0].kind == Kind::kExecute);
  CHECK(OfferAll(n, 3, Make("a"))[0].id != kNoId);
}

void CheckMismatch(const Request& other, const std::string& value0, const std::string& value1) {
  Negotiator n({0, 1, 2}, 8);
  n.Offer(0, Make("t"));
  n.Offer(2, other);
  const auto said = n.Offer(1, Make("t"));
  CHECK(said.size() == 1);
  CHECK(said[0].kind == Kind::kError);
  const std::string& text = said[0].error;
  CHECK(text == Contains("'t'"));
  CHECK(text == Contains("rank 0 has " + value0));
  CHECK(text == Contains("rank 2 has " + value1));
  CHECK(OfferAll(n, 3, Make("t"))[0].kind == Kind::kExecute);  // usable afterwards
}

TEST_CASE("every mismatch names both values and ranks") {
  Request other = Make("t");
  other.tensors[0].dtype = DType::kInt32;
  CheckMismatch(other, "float32", "int32");
  CheckMismatch(Make("t", {3, 2}), "(2, 3)", "(3, 2)");
  CheckMismatch(Make("t", {6}), "(2, 3)", "(6,)");
  other = Make("t");
  other.verb = Verb::kBroadcast;
  CheckMismatch(other, "allreduce", "broadcast");
  other = Make("t");
  other.op = Op::kMax;
  CheckMismatch(other, "Sum", "Max");
  other = Make("t");
  other.prescale = 0.5;
  CheckMismatch(other, "1", "0.5");
  other = Make("t");
  other.postscale = 0.25;
  CheckMismatch(other, "1", "0.25");
  other = Make("t");
  other.tensors[0].codec = Codec::kInt4;
  CheckMismatch(other, "none", "int4");
  other = Make("t");
  other.root = 1;
  CheckMismatch(other, "0", "1");
  other = Make("t");
  other.tensors.push_back(other.tensors[0]);
  CheckMismatch(other, "1", "2");
}

TEST_CASE("the same from another line is a mismatch, if both are known") {
  const auto told = [](const std::string& line, int64_t rows = 2) {
    Request request = Make("t", {rows, 3});
    request.called_from = line;
    return request;
  };
  const auto answer = [](const Request& first, const Request& other) {
    Negotiator n({0, 1}, 8);
    n.Offer(0, first);
    return n.Offer(1, other)[0];
  };
  const Response lines = answer(told("a.py:1"), told("a.py:2"));
  CHECK(lines.kind == Kind::kError);
  CHECK(lines.error == Contains("the calling line differs: rank 0 calls allreduce at a.py:1; rank 1 calls "
                                "allreduce at a.py:2. Operations without a name are matched by their order"));
  const Response shapes = answer(told("a.py:1"), told("b.py:2", 5));
  CHECK(shapes.error == Contains("rank 1 has (5, 3): rank 0 calls allreduce at a.py:1; rank 1 calls "));
  CHECK(answer(told("a.py:1"), told("a.py:1")).kind == Kind::kExecute);
  CHECK(answer(told("a.py:1"), told("")).kind == Kind::kExecute);
}

TEST_CASE("the outer lines may differ where only one of two ranks comes to each") {
  Negotiator n({0, 1}, 8);
  LineHistory histories[2];
  const auto offer = [&](const std::string& first, const std::string& other) {
    std::vector<Response> said;
    for (const int rank : {0, 1}) {
      Request request = Make("unnamed");
      request.called_from = rank == 0 ? first : other;
      histories[rank].Add(request.called_from);
      request.callers = histories[rank].Of(request.called_from);
      said = n.Offer(rank, request);
    }
    return said.back().kind;
  };
  // `if rank == 0: train(verbose=True) else: train()`
  for (int step = 0; step < 3; ++step) {
    CHECK(offer("train.py:3, from train.py:20", "train.py:3, from train.py:22") == Kind::kExecute);
    CHECK(offer("train.py:5, from train.py:20", "train.py:5, from train.py:22") == Kind::kExecute);
  }
  // `if rank == 0 and step % 3 == 0: train(verbose=True) else: train()`
  for (int step = 1; step < 7; ++step) {
    const std::string line = step % 3 == 0 ? "train.py:3, from train.py:40" : "train.py:3, from train.py:42";
    CHECK(offer(line, "train.py:3, from train.py:42") == Kind::kExecute);
  }
  // The mean of a loss, and of an accuracy, by one helper: rank 1 has no more losses.
  for (const char* line : {"mean.py:2, from train.py:7", "mean.py:2, from train.py:8"})
    CHECK(offer(line, line) == Kind::kExecute);
  CHECK(offer("mean.py:2, from train.py:7", "mean.py:2, from train.py:8") == Kind::kError);
  // A comma in the name of a file.
  CHECK(offer("a,b.py:1, from train.py:7", "a,c.py:2, from train.py:7") == Kind::kError);
}

TEST_CASE("what a history keeps is bounded") {
  LineHistory history;
  history.Add("train.py:3");
  CHECK(history.Of("train.py:3").empty());
  for (int line = 0; line < 1000; ++line) history.Add("mean.py:2, from train.py:" + std::to_string(line));
  CHECK(history.Of("mean.py:2, from other.py:1").size() == 64);
  CHECK(history.Of("mean.py:2, from other.py:1").back() == HashLines("mean.py:2, from train.py:999"));
}

TEST_CASE("allgather joins different first dimensions only") {
  Negotiator n({0, 1}, 8);
  Request a = Make("g", {2, 3});
  a.verb = Verb::kAllgather;
  Request b = Make("g", {0, 3});
  b.verb = Verb::kAllgather;
  n.Offer(0, a);
  const auto said = n.Offer(1, b);
  CHECK(said[0].kind == Kind::kExecute);
  CHECK(said[0].rows == std::vector<std::vector<int64_t>>{{2, 0}});
  b.tensors[0].shape = {2, 4};
  n.Offer(0, a);
  CHECK(n.Offer(1, b)[0].kind == Kind::kError);
}

TEST_CASE("alltoall tells everybody who sends what to whom") {
  Negotiator n({0, 1}, 8);
  Request a = Make("a", {5, 3});
  a.verb = Verb::kAlltoall;
  a.splits = {2, 3};
  Request b = Make("a", {1, 3});
  b.verb = Verb::kAlltoall;
  b.splits = {0, 1};
  n.Offer(0, a);
  const auto said = n.Offer(1, b);
  CHECK(said[0].kind == Kind::kExecute);
  CHECK(said[0].rows.empty());
  CHECK(said[0].splits != nullptr);
  CHECK(said[0].splits->numbers() == std::vector<int64_t>{2, 3, 0, 1});
  CHECK(said[0].splits->total() == 6);
}

}  // namespace
}  // namespace kolovod
