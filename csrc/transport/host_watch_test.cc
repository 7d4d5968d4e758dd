#include "transport/host_watch.h"

#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "testing/mesh_world.h"

namespace kolovod {
namespace {

constexpr int64_t kPeriodMs = 200;
constexpr int64_t kLimitMs = 1200;

// A connection as its kernel sees it, and a watch that looks at it.
struct Line {
  bool Look() { return watch.Look(signs(), now_ms * 1'000'000, kPeriodMs, kLimitMs); }
  // Time passes; false: lost on the way.
  bool Pass(int64_t ms) {
    for (int64_t end_ms = now_ms + ms; now_ms < end_ms;) {
      now_ms += kPeriodMs;
      if (Look()) return false;
      if (beats && probes == 0) Send();
    }
    return true;
  }
  void Send() {
    sent_ms = now_ms;
    unacknowledged = true;
    if (answers) heard_ms = now_ms, unacknowledged = false;
  }
  HostSigns signs() const {
    return {unacknowledged, now_ms - sent_ms, now_ms - heard_ms, now_ms - heard_ms, probes, round_trip_ms};
  }

  int64_t now_ms = 10'000;
  int64_t sent_ms = 9'000, heard_ms = 9'000;
  bool unacknowledged = false;
  int probes = 0;
  int64_t round_trip_ms = 0;
  bool beats = true;
  bool answers = true;
  HostWatch watch;
};

TEST_CASE("a host that answers is not lost, nor one that nobody asks") {
  Line line;
  CHECK(line.Pass(60'000));
  line.beats = false;
  line.answers = false;
  CHECK(line.Pass(3'600'000));
  CHECK(line.watch.silent_ms() == 0);
}

TEST_CASE("a host that acknowledges nothing is lost after the limit and a round trip") {
  for (const int64_t round_trip_ms : {0, 400}) {
    Line line;
    line.round_trip_ms = round_trip_ms;
    CHECK(line.Pass(1000));
    line.answers = false;
    const int64_t cut_ms = line.now_ms;
    CHECK(!line.Pass(10'000));
    CHECK(line.now_ms - cut_ms >= kLimitMs + round_trip_ms);
    CHECK(line.now_ms - cut_ms <= kLimitMs + round_trip_ms + 2 * kPeriodMs);
    CHECK(line.watch.silent_ms() >= kLimitMs + round_trip_ms);
  }
}

TEST_CASE("an outage that ends in time begins anew with the next") {
  Line line;
  for (int turn = 0; turn < 100; ++turn) {
    line.answers = false;
    CHECK(line.Pass(kLimitMs - kPeriodMs));
    line.answers = true;
    CHECK(line.Pass(kPeriodMs));
  }
}

TEST_CASE("what stood still itself takes nobody for lost") {
  Line line;
  CHECK(line.Pass(1000));
  line.answers = false;
  line.Send();
  // Nothing ran here for so long, perhaps the whole machine: the answer waits to be read.
  line.now_ms += 60'000;
  CHECK(!line.Look());
  line.heard_ms = line.now_ms;
  line.unacknowledged = false;
  line.answers = true;
  CHECK(line.Pass(10'000));
}

TEST_CASE("between two probes of a closed window silence says nothing") {
  Line line;
  line.beats = false;
  line.unacknowledged = true;
  for (int64_t gap_ms = 200; gap_ms < 120'000; gap_ms *= 2) {
    line.sent_ms = line.heard_ms = line.now_ms;  // again, and answered that there is no room
    CHECK(line.Pass(gap_ms));
  }
}

TEST_CASE("one packet that is lost costs no host") {
  Line line;
  line.beats = false;
  line.answers = false;
  line.Send();  // and TCP would send it again only much later
  CHECK(line.Pass(10'000));
  line.Send();
  CHECK(line.Pass(10'000));
  line.Send();
  CHECK(!line.Pass(10'000));
}

TEST_CASE("probes that nobody answers tell of a lost host, too") {
  Line line;
  line.beats = false;
  line.probes = 2;
  CHECK(line.Pass(60'000));
  line.probes = 3;
  const int64_t cut_ms = line.now_ms;
  CHECK(!line.Pass(10'000));
  CHECK(line.now_ms - cut_ms <= kLimitMs + 2 * kPeriodMs);
}

TEST_CASE("the kernel acknowledges for a process that reads nothing") {
  int ends[2];
  testing::Connect(testing::Wire::kTcp, ends);
  HostWatch watch;
  std::string much(1 << 20, 'x');
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto end = now() + std::chrono::milliseconds(1500);
  const auto deadline = end + std::chrono::seconds(60);
  bool full = false;
  while (now() < (full ? end : deadline)) {
    full = send(ends[0], much.data(), much.size(), MSG_DONTWAIT) < 0;
    const auto signs = ReadHostSigns(ends[0]);
    CHECK(signs.has_value());
    const int64_t now_ns = now().time_since_epoch().count();
    CHECK(!watch.Look(*signs, now_ns, 20, 200));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  CHECK(full);
  close(ends[0]);
  close(ends[1]);
}

TEST_CASE("only TCP has signs") {
  int ends[2];
  testing::Connect(testing::Wire::kSocketPair, ends);
  CHECK(!ReadHostSigns(ends[0]).has_value());
  close(ends[0]);
  close(ends[1]);
}

}  // namespace
}  // namespace kolovod
