// Late ranks in a world of threads: who reports, what it says, and the end after the second limit.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <latch>
#include <thread>

#include "base/tree.h"
#include "control/stragglers.h"
#include "engine/record_file.h"
#include "testing/world.h"

namespace kolovod {
namespace {

using std::chrono::milliseconds;
using testing::Contains;
using testing::Rank;
using testing::RunHosts;
using testing::RunRanks;

Config LateConfig(int64_t report_ms, int64_t failure_ms) {
  Config config = testing::SmallConfig();
  config.late_report_ms = report_ms;
  config.late_failure_ms = failure_ms;
  return config;
}

uint64_t ReportsOf(Rank& rank) { return rank.engine().Stats().late_reports; }

// Of all ranks together: any of those that wait may be the one that writes. Wanted is one that has all the
// parts: where threads get no core for a while, others are late first, and that is reported, too.
class Reports {
 public:
  explicit Reports(std::vector<std::string> parts) : parts_(std::move(parts)) {}
  // Beside a rank that waits: whether it has written the one. Until `over`.
  void Watch(Rank& rank, const std::atomic<bool>& over) {
    for (uint64_t read = 0; !over.load() && !seen_.load();) {
      if (const uint64_t count = ReportsOf(rank); count != read) {
        read = count;
        Read(rank.engine().LastLateReport());
      }
      std::this_thread::sleep_for(milliseconds(5));
    }
  }
  // Until one of those that are watched has written it; for a minute.
  void Await() {
    for (int i = 0; i < 12'000 && !seen_.load(); ++i) std::this_thread::sleep_for(milliseconds(5));
    Check();
  }
  void Take(Rank& rank) {
    std::lock_guard lock(mutex_);
    count_ += ReportsOf(rank);
  }
  void Check() {
    std::lock_guard lock(mutex_);
    for (const std::string& part : parts_) CHECK(text_ == Contains(part));
  }
  // A rank that still waits reports again after the gap, so that two in a shorter time are of two ranks.
  void CheckOneForAll() {
    const auto took = std::chrono::steady_clock::now() - begun_;
    CHECK(count_ <= 1 + static_cast<uint64_t>(took / std::chrono::nanoseconds(kReportGapNs)));
  }
  std::string text_;  // the one, or the last that was read before

 private:
  void Read(const std::string& text) {
    std::lock_guard lock(mutex_);
    if (seen_.load()) return;
    text_ = text;
    seen_.store(std::all_of(parts_.begin(), parts_.end(),
                            [&](const std::string& part) { return text == Contains(part); }));
  }

  const std::vector<std::string> parts_;
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  uint64_t count_ = 0;
  std::atomic<bool> seen_{false};
};

// Until the world is over; for a minute. It submits nothing meanwhile, which others could be late with.
void AwaitEnd(Rank& rank) {
  Segment& segment = *rank.world().SegmentOf(rank.rank());
  for (int i = 0; i < 12'000 && !segment.revoked(); ++i) std::this_thread::sleep_for(milliseconds(5));
}

TEST_CASE("one rank reports for all who has not submitted what") {
  for (const bool cached : {false, true}) {
    Reports reports({"rank 1 (loopback) has not submitted 't' (allreduce, ", "; ranks 0, 2 wait\n",
                     "  rank 1, its main thread:\n  no stack: no faulthandler here\n"});
    std::latch ready(3), finished(3);
    RunRanks(
        3,
        [&](Rank& rank) {
          std::vector<float> data(4, 1.0f);
          for (int i = 0; cached && i < 3; ++i) CHECK_OK(rank.Allreduce("t", data));
          ready.arrive_and_wait();  // those who wait begin together
          std::atomic<bool> over{false};
          std::thread watch([&] { reports.Watch(rank, over); });
          if (rank.rank() == 1) reports.Await();
          CHECK_OK(rank.Allreduce("t", data));
          over.store(true);
          watch.join();
          reports.Take(rank);
          finished.arrive_and_wait();
        },
        LateConfig(600, 0));
    reports.CheckOneForAll();
  }
}

TEST_CASE("nothing is said while all is well") {
  RunRanks(
      2,
      [](Rank& rank) {
        std::vector<float> data(4, 1.0f);
        const auto end = std::chrono::steady_clock::now() + milliseconds(600);
        std::vector<float> go(1);
        while (go[0] == 0.0f) {
          CHECK_OK(rank.Allreduce("t", data));
          go[0] = std::chrono::steady_clock::now() > end ? 1.0f : 0.0f;
          CHECK_OK(rank.Allreduce("go", go, Op::kMax));
        }
        CHECK(ReportsOf(rank) == 0);
      },
      LateConfig(30'000, 0));
}

TEST_CASE("after the second limit all fail and the late rank is named") {
  std::latch ready(3);
  RunRanks(
      3,
      [&ready](Rank& rank) {
        std::vector<float> data(4, 1.0f);
        ready.arrive_and_wait();
        if (rank.rank() == 2) {
          AwaitEnd(rank);
          uint64_t handle = 0;
          CHECK(rank.Submit("other", data, false, &handle) == Code::kLate);
          return;
        }
        const Status status = rank.Allreduce("t", data);
        CHECK(status == Code::kLate);
        CHECK(status.message() == Contains("rank 2 (loopback) has not submitted 't'"));
        CHECK(status.message() == Contains("the limit is 0.3 s"));
      },
      LateConfig(0, 300));
}

TEST_CASE("a rank whose data do not come is named") {
  Reports reports({"rank 1 (loopback) does not deliver its data of 'slow'"});
  std::latch ready(2);
  RunRanks(
      2,
      [&](Rank& rank) {
        std::vector<float> data(4, 1.0f);
        CHECK_OK(rank.Allreduce("before", data));
        ready.arrive_and_wait();
        // As many chunks: where others keep the cores busy, these alone take long.
        data.assign(1000 * 40, 1.0f);
        // Until somebody has reported that, and 24 s if nobody does: rank 1 can have begun a report itself,
        // which waits for its own slow thread, and rank 0's is written only a gap and a patience later.
        if (rank.rank() == 1) rank.world().faults->delay_us[1] = 300'000;
        std::atomic<bool> over{false};
        std::thread watch([&] {
          reports.Watch(rank, over);
          rank.world().faults->delay_us[1] = 0;
        });
        CHECK_OK(rank.Allreduce("slow", data));
        over.store(true);
        watch.join();
        CHECK_OK(rank.Allreduce("after", data));
      },
      LateConfig(600, 0));
  reports.Check();
  CHECK(reports.text_ != Contains("has not submitted"));
  CHECK(reports.text_ != Contains("nothing happens"));
}

TEST_CASE("a lost announcement is found not to progress") {
  Reports reports({"every rank has submitted 't'"});
  std::latch finished(2);
  RunRanks(
      2,
      [&](Rank& rank) {
        std::vector<float> data(4, 1.0f);
        if (rank.rank() == 1) rank.world().faults->drop[1] = 1;
        uint64_t handle = 0;
        CHECK_OK(rank.Submit("t", data, false, &handle));
        std::atomic<bool> over{false};
        std::thread watch([&] { reports.Watch(rank, over); });
        std::thread waiting([&] {
          while (!over.load()) CHECK(rank.engine().Wait(handle, 0.2, nullptr) == Code::kTimeout);
        });
        reports.Await();
        over.store(true);
        watch.join();
        waiting.join();
        reports.Take(rank);
        finished.arrive_and_wait();
      },
      LateConfig(200, 0));
  reports.CheckOneForAll();
}

TEST_CASE("a late rank is reported on its own host") {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 1}, {0, 1, 1}, {0, 0, 1, 2}}) {
    const int late = static_cast<int>(hosts.size()) - 1;
    for (const bool cached : {false, true}) {
      Reports reports({"kolovod: rank " + std::to_string(late) + " (loopback) has not submitted 't'"});
      std::latch ready(static_cast<ptrdiff_t>(hosts.size())), finished(static_cast<ptrdiff_t>(hosts.size()));
      RunHosts(
          hosts,
          [&](Rank& rank) {
            std::vector<float> data(4, 1.0f);
            for (int i = 0; cached && i < 3; ++i) CHECK_OK(rank.Allreduce("t", data));
            ready.arrive_and_wait();
            std::atomic<bool> over{false};
            std::thread watch([&] { reports.Watch(rank, over); });
            if (rank.rank() == late) reports.Await();
            CHECK_OK(rank.Allreduce("t", data));
            over.store(true);
            watch.join();
            finished.arrive_and_wait();
          },
          LateConfig(400, 0));
      CHECK(reports.text_ != Contains("nothing happens"));
    }
  }
}

TEST_CASE("the second limit ends the world on all hosts") {
  RunHosts(
      {0, 1, 1, 2},
      [](Rank& rank) {
        std::vector<float> data(4, 1.0f);
        const int late = 3;
        if (rank.rank() == late) {
          AwaitEnd(rank);
          uint64_t handle = 0;
          CHECK(rank.Submit("other", data, false, &handle) == Code::kLate);
          return;
        }
        const Status status = rank.Allreduce("t", data);
        CHECK(status == Code::kLate);
        CHECK(status.message() == Contains("'t'"));
      },
      LateConfig(0, 300));
}

TEST_CASE("hosts that tell and answer") {
  constexpr int64_t kSecond = 1'000'000'000;
  StragglerNews elsewhere(3, 0);
  int silent = -1;
  CHECK(!elsewhere.TakeUnanswered());
  std::vector<OverdueWait> waits(2);
  elsewhere.Hear(1, waits, 100 * kSecond);
  CHECK(elsewhere.TakeUnanswered());
  CHECK(!elsewhere.TakeUnanswered());
  CHECK(elsewhere.Waits(101 * kSecond).size() == 2);
  CHECK(elsewhere.Waits(106 * kSecond).empty());
  elsewhere.Told(200 * kSecond);
  CHECK(elsewhere.Judge(202 * kSecond, &silent) == StragglerNews::Answers::kOutstanding);
  elsewhere.HearAnswer(1, false, 203 * kSecond);
  CHECK(elsewhere.Judge(203 * kSecond, &silent) == StragglerNews::Answers::kSilent);
  CHECK(silent == 2);
  elsewhere.HearAnswer(2, false, 203 * kSecond);
  CHECK(elsewhere.Judge(204 * kSecond, &silent) == StragglerNews::Answers::kNone);
  elsewhere.HearAnswer(2, true, 204 * kSecond);
  CHECK(elsewhere.Judge(205 * kSecond, &silent) == StragglerNews::Answers::kBlaming);
  elsewhere.Told(300 * kSecond);  // other trouble: they have time to answer again
  CHECK(elsewhere.Judge(301 * kSecond, &silent) == StragglerNews::Answers::kOutstanding);
  CHECK(elsewhere.Judge(304 * kSecond, &silent) == StragglerNews::Answers::kSilent);
  CHECK(silent == 1);
}

// A host that does not answer keeps those behind it from being heard, too.
TEST_CASE("of several silent hosts the nearest is named") {
  constexpr int64_t kSecond = 1'000'000'000;
  for (const int here : {0, 3, 25, 22}) {  // 5 leads to 21, 22, 23, 24; 6 to 25
    StragglerNews elsewhere(64, here);
    elsewhere.Told(100 * kSecond);
    for (int host = 0; host < 64; ++host) {
      const bool behind = here == 22 || host == 5 || Tree::ParentOf(host) == 5;
      if (!behind && host != here) elsewhere.HearAnswer(host, false, 102 * kSecond);
    }
    int silent = -1;
    CHECK(elsewhere.Judge(104 * kSecond, &silent) == StragglerNews::Answers::kSilent);
    CHECK(silent == 5);
  }
}

TEST_CASE("the last operations of a rank") {
  const auto on_rank = [](Rank& rank) {
    std::vector<float> data(8, 1.0f);
    CHECK_OK(rank.Allreduce("a", data));
    CHECK_OK(rank.Allreduce("b", data));
    const auto records = rank.engine().ReadLastOperations();
    CHECK(records.size() == 2);
    CHECK(records[0].name == "a");
    CHECK(records[0].state == OperationState::kDone);
    CHECK(records[0].bytes == 32);
    CHECK(records[1].bucket == records[0].bucket + 1);
    CHECK(records[1].submitted_ns <= records[1].started_ns);
    CHECK(records[1].started_ns <= records[1].ended_ns);
  };
  RunRanks(2, on_rank, testing::ByLogOnly());
}

TEST_CASE("the file of last operations") {
  std::vector<OperationRecord> records(4);
  for (size_t i = 0; i < records.size(); ++i) {
    records[i].number = i + 1;
    records[i].name = "t" + std::to_string(i);
    records[i].state = i == 1 ? OperationState::kSubmitted : OperationState::kDone;
    records[i].tensors = 1;
    records[i].submitted_ns = 1'000'000'000;
  }
  records[3].name = "quote \" back\\slash \n end \xC3\xA9\xC3";
  RecordFileHeader header;
  header.rank = 1;
  header.size = 2;
  header.reason = "why";
  header.now_ns = 3'000'000'000;
  header.wall_ns = 1'700'000'003'250'000'000;
  const std::string text = RecordFileText(header, records, 1);
  CHECK(text == Contains("{\"rank\": 1, \"size\": 2, \"epoch\": 0, "));
  CHECK(text == Contains("\"reason\": \"why\", \"written_at_s\": 1700000003.250000}\n"));
  CHECK(text != Contains("\"t0\""));
  CHECK(text == Contains("\"t1\""));
  CHECK(text != Contains("\"t2\""));
  CHECK(text == Contains("\"name\": \"quote \\\" back\\\\slash \\u000a end \xC3\xA9\xEF\xBF\xBD\""));
  CHECK(text == Contains("\"submitted_at_s\": 1700000001.250000, \"started_at_s\": null"));
}

}  // namespace
}  // namespace kolovod
