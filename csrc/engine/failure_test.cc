// What the other ranks see when one of them dies, leaves, stops half-way or loses messages.
#include <chrono>
#include <cstring>
#include <latch>
#include <thread>

#include "base/version.h"
#include "testing/world.h"

namespace kolovod {
namespace {

using std::chrono::milliseconds;
using testing::Contains;
using testing::Rank;
using testing::RunRanks;
using testing::StartsWith;

TEST_CASE("a killed rank fails pending and later operations everywhere") {
  for (int size : {2, 3, 4}) {
    std::latch met(size);
    RunRanks(size, [&](Rank& rank) {
      std::vector<float> data(5000);
      CHECK_OK(rank.Allreduce("before", data));
      met.arrive_and_wait();  // the victim may be through while others are still in it
      const int victim = rank.size() - 1;
      if (rank.rank() == victim) {
        rank.world().Kill(victim);
        return;
      }
      Status status = rank.Allreduce("t", data);
      CHECK(status == Code::kRankLost);
      CHECK(status.message().rfind("rank " + std::to_string(victim), 0) == 0);
      status = rank.Allreduce("later", data);
      CHECK(status == Code::kRankLost);
    });
  }
}

// The victim dies while the others are inside a bucket that it has announced.
TEST_CASE("a rank that dies inside a bucket") {
  RunRanks(3, [](Rank& rank) {
    std::vector<float> data(200000, 1.0f);
    if (rank.rank() == 1) {
      rank.world().faults->delay_us[1] = 20'000;  // 196 chunks: the bucket takes a while
      std::thread killer([&] {
        const auto is_inside = [&] {
          const std::vector<OperationRecord> records = rank.engine().ReadLastOperations();
          return !records.empty() && records.back().state == OperationState::kStarted;
        };
        while (!is_inside()) std::this_thread::sleep_for(milliseconds(1));
        rank.world().Kill(1);
      });
      CHECK(!rank.Allreduce("t", data).ok());
      killer.join();
      return;
    }
    const Status status = rank.Allreduce("t", data);
    CHECK(status == Code::kRankLost);
    CHECK(status.message() == Contains("rank 1"));
    CHECK(status.message() == Contains("'t'"));
  });
}

// Until all have formed the world: who is still about to would fail there.
void Meet(Rank& rank, std::latch& met) {
  std::vector<float> data(1);
  CHECK_OK(rank.Allreduce("all are here", data));
  met.arrive_and_wait();
}

TEST_CASE("an asynchronous operation learns of the death too") {
  std::latch met(2);
  RunRanks(2, [&](Rank& rank) {
    std::vector<float> data(100);
    Meet(rank, met);
    if (rank.rank() == 1) {
      rank.world().Kill(1);
      return;
    }
    uint64_t handle = 0;
    const Status submitted = rank.Submit("t", data, false, &handle);
    if (!submitted.ok()) {  // the engine thread may have noticed already
      CHECK(submitted == Code::kRankLost);
      return;
    }
    bool done = false;
    for (int i = 0; i < 6000 && !done; ++i) {
      CHECK_OK(rank.engine().Poll(handle, &done));
      std::this_thread::sleep_for(milliseconds(10));
    }
    CHECK(done);
    CHECK(rank.Wait(handle) == Code::kRankLost);
  });
}

TEST_CASE("a clean leave hurts only those who need the leaver") {
  RunRanks(2, [](Rank& rank) {
    std::vector<float> data(10);
    CHECK_OK(rank.Allreduce("together", data));
    if (rank.rank() == 1) return;  // its destructor leaves
    const Status status = rank.Allreduce("alone", data);
    CHECK(status == Code::kRankLeft);
    CHECK(status.message() == Contains("rank 1"));
  });
}

TEST_CASE("shutting down with pending work is told to all") {
  std::latch met(2);
  RunRanks(2, [&](Rank& rank) {
    std::vector<float> data(10);
    Meet(rank, met);
    uint64_t handle = 0;
    if (rank.rank() == 1) {
      CHECK_OK(rank.Submit("abandoned", data, false, &handle));
      rank.engine().Shutdown();
      CHECK(rank.Wait(handle) == Code::kShutDown);
      CHECK(rank.Submit("later", data, false, &handle) == Code::kShutDown);
      return;
    }
    const Status status = rank.Allreduce("other", data);
    CHECK(status == Code::kRankLeft);
    CHECK(status.message() == Contains("abandoned"));
  });
}

TEST_CASE("an abort names its rank and reason") {
  std::latch met(3);
  RunRanks(3, [&](Rank& rank) {
    std::vector<float> data(10);
    Meet(rank, met);
    if (rank.rank() == 2) rank.engine().Abort("the data are wrong");
    const Status status = rank.Allreduce("t", data);
    CHECK(status == Code::kInterrupted);
    CHECK(status.message() == Contains("rank 2"));
    CHECK(status.message() == Contains("the data are wrong"));
  });
}

TEST_CASE("a lost announcement runs into the callers timeout and no further") {
  std::latch finished(2);
  RunRanks(2, [&](Rank& rank) {
    std::vector<float> warm(4);
    for (int i = 0; i < 3; ++i) CHECK_OK(rank.Allreduce("warm", warm));
    if (rank.rank() == 1) rank.world().faults->drop[1] = 1;
    std::vector<float> lost(4);
    uint64_t handle = 0;
    CHECK_OK(rank.Submit("warm", lost, false, &handle));
    const Status status = rank.engine().Wait(handle, 0.2, nullptr);
    CHECK(status == Code::kTimeout);
    CHECK(status.message() == Contains("'warm'"));
    std::vector<float> other(4, 1.0f);
    CHECK_OK(rank.Allreduce("other", other));  // the engine goes on with everything else
    CHECK(other[0] == 2.0f);
    // Who leaves with work pending ends the world: not before both are through.
    finished.arrive_and_wait();
  });
}

TEST_CASE("delays change nothing but time") {
  RunRanks(3, [](Rank& rank) {
    rank.world().faults->delay_us[static_cast<size_t>(rank.rank())] = rank.rank() * 300;
    for (int i = 0; i < 5; ++i) {
      std::vector<float> data(9000, 1.0f);
      CHECK_OK(rank.Allreduce("t", data));
      for (float v : data) CHECK(v == 3.0f);
    }
  });
}

TEST_CASE("an interrupt before the start leaves the operation pending") {
  RunRanks(2, [](Rank& rank) {
    std::vector<float> data(4, 1.0f);
    if (rank.rank() == 0) {
      uint64_t handle = 0;
      CHECK_OK(rank.Submit("t", data, true, &handle));
      const Status status = rank.engine().Wait(handle, -1, [] { return true; });
      CHECK(status == Code::kInterrupted);
      std::vector<float> go(1);
      CHECK_OK(rank.Allreduce("go", go));
      CHECK_OK(rank.Wait(handle));
    } else {
      std::vector<float> go(1);
      CHECK_OK(rank.Allreduce("go", go));
      CHECK_OK(rank.Allreduce("t", data));
    }
    CHECK(data[0] == 2.0f);
  });
}

TEST_CASE("a rank that never comes is named") {
  Config config = testing::SmallConfig();
  config.start_timeout_ms = 200;
  std::shared_ptr<LoopbackWorld> world;
  CHECK_OK(LoopbackWorld::Create(std::vector<int>(3), config, &world));
  std::vector<std::thread> threads;
  for (int r : {0, 2}) {
    // Rank 2 may not find rank 0 missing, too, whose thread has not run yet.
    while (r == 2 && world->segments[0]->header().attached.load() == 0) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    threads.emplace_back([&, r] {
      EngineOptions options;
      options.rank = r;
      options.size = 3;
      options.config = config;
      options.segment = world->segments[0];
      options.faults = world->faults;
      options.liveness = std::make_unique<LoopbackLiveness>(world->faults, world->ranks);
      std::unique_ptr<Engine> engine;
      const Status status = Engine::Create(std::move(options), &engine);
      CHECK(status == Code::kTimeout);
      CHECK(status.message().rfind("rank 1", 0) == 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_CASE("a segment of another release is refused at once") {
  const Config config = testing::SmallConfig();
  for (const bool is_ours : {true, false}) {
    std::shared_ptr<LoopbackWorld> world;
    CHECK_OK(LoopbackWorld::Create(std::vector<int>(2), config, &world));
    SegmentHeader& header = world->segments[0]->header();
    world->segments[0]->WriteHeader(0, config);
    header.protocol = kProtocolVersion + 1;
    std::strncpy(header.release, "9.8.7", kReleaseBytes);
    if (!is_ours) header.magic.store(kSegmentMagic + 1);
    EngineOptions options;
    options.rank = 1;
    options.size = 2;
    options.config = config;
    options.segment = world->segments[0];
    options.liveness = std::make_unique<LoopbackLiveness>(world->faults, world->ranks);
    std::unique_ptr<Engine> engine;
    const Status status = Engine::Create(std::move(options), &engine);
    CHECK(status == Code::kInvalidArgument);
    const std::string& text = status.message();
    CHECK(text == StartsWith("rank 1"));
    CHECK(text == Contains("install the same version"));
    CHECK(text == Contains(DescribeVersion(kProtocolVersion, ReleaseVersion())));
    const Contains theirs(DescribeVersion(kProtocolVersion + 1, "9.8.7"));
    if (is_ours) CHECK(text == theirs);
    if (!is_ours) CHECK(text != theirs);
    CHECK(header.attached.load() == 0);
  }
}

TEST_CASE("a world can be formed again and again") {
  for (int i = 0; i < 20; ++i) {
    RunRanks(i % 3 + 1, [](Rank& rank) {
      std::vector<float> data(100, 1.0f);
      CHECK_OK(rank.Allreduce("t", data));
      CHECK(data[99] == static_cast<float>(rank.size()));
    });
  }
}

// Two threads of the aborting rank may tell the other host of it, and the later one goes on to tell that the
// rank leaves.
TEST_CASE("another host hears of an abort before it hears of the leave that follows") {
  for (int i = 0; i < 40; ++i) {
    std::latch met(2);
    testing::RunHosts({0, 1}, [&](Rank& rank) {
      std::vector<float> data(4, 1.0f);
      Meet(rank, met);
      if (rank.rank() == 1) {
        rank.engine().Abort("the data are wrong");
      } else {
        CHECK(rank.Allreduce("t", data) == Code::kInterrupted);
      }
    });
  }
}

// What is left to see there nobody will act on: an engine's thread that looked for it again and again would
// take a core.
TEST_CASE("the thread of a world that is over sleeps") {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0}, {0, 0, 1}, {0, 1, 1}}) {
    std::latch ready(3);
    testing::RunHosts(hosts, [&](Rank& rank) {
      std::vector<float> data(4, 1.0f);
      CHECK_OK(rank.Allreduce("t", data));
      if (rank.rank() == 2) {
        ready.arrive_and_wait();
        rank.engine().Abort("the data are wrong");
        return;
      }
      ready.count_down();
      CHECK(rank.Allreduce("t", data) == Code::kInterrupted);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // rank 2 leaves meanwhile
      Segment& segment = *rank.world().SegmentOf(rank.rank());
      const int place = Topology(rank.rank(), rank.world().hosts).local_rank;
      const uint32_t before = segment.rank(place).idle_bell.load();
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      CHECK(segment.rank(place).idle_bell.load() - before < 100);
    });
  }
}

}  // namespace
}  // namespace kolovod
