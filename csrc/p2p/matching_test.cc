#include "p2p/matching.h"

#include "testing/check.h"

namespace kolovod {
namespace {

Arrival From(int source, int64_t tag, uint64_t id) {
  Envelope envelope;
  envelope.source = source;
  envelope.tag = tag;
  envelope.id = id;
  return {envelope, nullptr};
}

TEST_CASE("a message finds the oldest receive that takes it") {
  Matching matching;
  CHECK(!matching.Post(1, 0, 5));
  CHECK(!matching.Post(2, kAnySource, 5));
  CHECK(!matching.Post(3, 0, 5));
  CHECK(!matching.Post(4, 0, 6));
  CHECK(matching.waiting() == 4);
  CHECK(!matching.Arrive(0, 7));
  CHECK(matching.Arrive(1, 5) == 2);
  CHECK(matching.Arrive(0, 5) == 1);
  CHECK(matching.Arrive(0, 6) == 4);
  CHECK(matching.Arrive(0, 5) == 3);
  CHECK(!matching.Arrive(0, 5));
  CHECK(matching.waiting() == 0);
}

TEST_CASE("an older receive of any source goes first") {
  Matching matching;
  CHECK(!matching.Post(1, kAnySource, 0));
  CHECK(!matching.Post(2, 3, 0));
  CHECK(matching.Arrive(3, 0) == 1);
  CHECK(matching.Arrive(3, 0) == 2);
}

TEST_CASE("a receive finds the oldest message") {
  Matching matching;
  matching.Keep(From(2, 0, 10));
  matching.Keep(From(1, 0, 11));
  matching.Keep(From(2, 0, 12));
  matching.Keep(From(1, 9, 13));
  CHECK(matching.kept() == 4);
  CHECK(matching.Post(1, 1, 9)->envelope.id == 13);
  CHECK(matching.Post(2, kAnySource, 0)->envelope.id == 10);
  CHECK(matching.Post(3, kAnySource, 0)->envelope.id == 11);
  CHECK(!matching.Post(4, 1, 0));
  CHECK(matching.Post(5, 2, 0)->envelope.id == 12);
  CHECK(matching.kept() == 0);
  CHECK(matching.waiting() == 1);
}

TEST_CASE("a message has its place before its data") {
  Matching matching;
  matching.Keep({From(2, 0, 10).envelope, nullptr, false});
  matching.Complete(2, 0, std::make_unique<char[]>(1));
  matching.Keep({From(2, 0, 11).envelope, nullptr, false});
  const std::optional<Arrival> first = matching.Post(1, 2, 0), second = matching.Post(2, 2, 0);
  CHECK(first->envelope.id == 10);
  CHECK(first->complete);
  CHECK(first->data != nullptr);
  CHECK(second->envelope.id == 11);
  CHECK(!second->complete);
}

TEST_CASE("a receive that is withdrawn takes nothing") {
  Matching matching;
  CHECK(!matching.Post(1, 0, 0));
  CHECK(!matching.Post(2, 0, 0));
  matching.Withdraw(1, 0, 0);
  matching.Withdraw(7, 0, 0);
  CHECK(matching.Arrive(0, 0) == 2);
  CHECK(!matching.Arrive(0, 0));
}

}  // namespace
}  // namespace kolovod
