#include "p2p/departures.h"

#include "testing/check.h"

namespace kolovod {
namespace {

constexpr int64_t kNow = 5'000'000'000;
constexpr int64_t kLater = kNow + Departures::kLastWordsNs;

Status Gone(const std::string& text) { return Status(Code::kRankLeft, text); }

TEST_CASE("who takes part is not gone") {
  const Departures departures;
  CHECK(departures.empty());
  CHECK(departures.FindGone(0, kNow) == nullptr);
  CHECK(departures.FindLeaver(0) == nullptr);
  CHECK(departures.NextNs(kNow) == 0);
}

TEST_CASE("a leaver of this host is gone at once") {
  Departures departures;
  departures.Left(2, Gone("left"), /*silent=*/true, kNow);
  CHECK(departures.FindLeaver(2)->status.message() == "left");
  CHECK(departures.FindGone(2, kNow)->left);
  CHECK(departures.FindGone(1, kLater) == nullptr);
}

TEST_CASE("a leaver of another host is gone when its last words are here or late") {
  Departures departures;
  departures.Left(2, Gone("left"), /*silent=*/false, kNow);
  CHECK(departures.FindLeaver(2) != nullptr);  // nothing is sent to it
  CHECK(departures.FindGone(2, kLater - 1) == nullptr);
  CHECK(departures.NextNs(kNow) == kLater);
  CHECK(departures.FindGone(2, kLater) != nullptr);
  CHECK(departures.NextNs(kLater) == 0);
  departures.Closed(2, Gone("closed"), kNow + 10);
  CHECK(departures.FindGone(2, kNow + 10)->status.message() == "left");
}

TEST_CASE("a connection that closes says nothing about why") {
  Departures departures;
  departures.Closed(2, Gone("closed"), kNow);
  CHECK(departures.FindLeaver(2) == nullptr);
  CHECK(departures.FindGone(2, kNow) == nullptr);
  CHECK(!departures.FindGone(2, kLater)->left);
  // The word comes after all.
  departures.Left(2, Gone("left"), /*silent=*/false, kNow + 10);
  CHECK(departures.FindGone(2, kNow + 10)->status.message() == "left");
}

TEST_CASE("the first word about a rank stays") {
  Departures departures;
  departures.Left(2, Gone("first"), /*silent=*/false, kNow);
  departures.Left(2, Gone("second"), /*silent=*/false, kNow + 10);
  departures.Left(1, Gone("other"), /*silent=*/false, kNow + 10);
  CHECK(departures.FindLeaver(2)->status.message() == "first");
  CHECK(departures.NextNs(kNow) == kLater);
  CHECK(departures.NextNs(kLater) == kLater + 10);
}

}  // namespace
}  // namespace kolovod
