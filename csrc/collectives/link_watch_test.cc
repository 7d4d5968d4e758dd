#include "collectives/link_watch.h"

#include "testing/check.h"

namespace kolovod {
namespace {

constexpr size_t kBytes = 1 << 20;

LinkCost Measured(double bytes_per_us) { return LinkCost{25, 2, bytes_per_us, 8000, false}; }
int64_t NsAt(double bytes_per_us) { return static_cast<int64_t>(kBytes * 1000.0 / bytes_per_us); }

// Operations at this rate until a revision; how many it took, at most `most`.
int Until(LinkWatch& watch, double rate, int most, LinkCost* cost) {
  for (int i = 1; i <= most; ++i) {
    watch.Delivered(kBytes, NsAt(rate));
    if (const std::optional<LinkCost> revised = watch.Revise()) {
      *cost = *revised;
      return i;
    }
  }
  return most + 1;
}

bool Near(double a, double b) { return a > 0.99 * b && a < 1.01 * b; }

TEST_CASE("a link that is faster than believed is known after two operations") {
  LinkWatch watch(Measured(47));
  LinkCost cost;
  CHECK(Until(watch, 2600, 10, &cost) == 2);
  CHECK(Near(cost.bytes_per_us, 2600));
  CHECK(!cost.confirmed);
  CHECK(Until(watch, 2600, 10, &cost) == 8);  // and then confirmed, once
  CHECK(Near(cost.bytes_per_us, 2600));
  CHECK(cost.confirmed);
  CHECK(Until(watch, 2600, 1000, &cost) == 1001);
}

TEST_CASE("a slow link is believed after eight") {
  LinkWatch watch(Measured(4'194'304));
  LinkCost cost;
  CHECK(Until(watch, 12, 10, &cost) == 8);
  CHECK(Near(cost.bytes_per_us, 12));
  CHECK(cost.confirmed);
  CHECK(cost.latency_us == 25);
}

TEST_CASE("operations that are late make no link slow") {
  LinkWatch watch(Measured(2500));
  LinkCost cost;
  CHECK(Until(watch, 2500, 10, &cost) == 8);
  for (int i = 0; i < 1000; ++i) {
    watch.Delivered(kBytes, i % 4 == 0 ? NsAt(2400) : NsAt(20));  // three of four wait for somebody
    CHECK(!watch.Revise().has_value());
  }
  // All of them, and it is no longer what an operation gets.
  CHECK(Until(watch, 20, 20, &cost) <= 16);
  CHECK(Near(cost.bytes_per_us, 20));
}

TEST_CASE("one that found all in a buffer makes none fast") {
  LinkWatch watch(Measured(100));
  LinkCost cost;
  CHECK(Until(watch, 100, 10, &cost) == 8);
  for (int i = 0; i < 1000; ++i) {
    watch.Delivered(kBytes, i % 16 == 0 ? 1 : NsAt(110));
    CHECK(!watch.Revise().has_value());
  }
}

TEST_CASE("what is short says nothing") {
  LinkWatch watch(Measured(100));
  for (int i = 0; i < 100; ++i) {
    watch.Delivered(LinkWatch::kLeastBytes - 1, 1);
    watch.Delivered(kBytes, 0);
    CHECK(!watch.Revise().has_value());
  }
}

TEST_CASE("what no link can be is bounded") {
  LinkWatch watch(Measured(100));
  LinkCost cost;
  CHECK(Until(watch, 1e9, 10, &cost) == 2);
  CHECK(cost.bytes_per_us == kFastestBytesPerUs);
}

}  // namespace
}  // namespace kolovod
