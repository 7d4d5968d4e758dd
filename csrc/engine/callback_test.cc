// Operations that nobody waits for: the engine thread drives them, and their callback comes exactly once.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <latch>

#include "testing/world.h"

namespace kolovod {
namespace {

using std::chrono::milliseconds;
using testing::Contains;
using testing::Rank;
using testing::RunRanks;

// Counts callbacks and keeps their statuses, in the order in which they came.
class Record {
 public:
  Engine::Callback Callback() {
    return [this](const Operation& op) { Add(op.status); };
  }
  void Add(const Status& status) {
    std::lock_guard lock(mutex_);
    statuses_.push_back(status);
    changed_.notify_all();
  }
  // The statuses once there are `count`; fails the test after half a minute.
  std::vector<Status> Await(size_t count) {
    std::unique_lock lock(mutex_);
    CHECK(changed_.wait_for(lock, std::chrono::seconds(30), [&] { return statuses_.size() >= count; }));
    CHECK(statuses_.size() == count);
    return statuses_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Status> statuses_;
};

Status Submit(Rank& rank, const std::string& name, std::vector<float>& data, Engine::Callback on_done,
              uint64_t* handle = nullptr, int64_t drive_ns = 0) {
  Request request;
  request.name = name;
  request.op = Op::kSum;
  std::vector<SubmittedTensor> tensors(1);
  tensors[0].meta = {DType::kFloat32, {static_cast<int64_t>(data.size())}};
  tensors[0].in = tensors[0].out = data.data();
  return rank.engine().Submit(std::move(request), std::move(tensors), false, handle, std::move(on_done),
                              drive_ns);
}

// kick_bytes as on a machine with no core to spare: nothing starts the engine thread but the callbacks.
Config NeverKick() {
  Config config = testing::SmallConfig();
  config.kick_bytes = INT64_MAX;
  return config;
}

TEST_CASE("callbacks come once though nobody waits") {
  for (int size : {1, 2, 3}) {
    RunRanks(
        size,
        [](Rank& rank) {
          constexpr size_t kTensors = 12;
          for (int step = 0; step < 10; ++step) {
            Record record;
            std::vector<std::vector<float>> data;
            for (size_t t = 0; t < kTensors; ++t) data.emplace_back(1 + t * 700, static_cast<float>(t + 1));
            for (size_t i = 0; i < kTensors; ++i) {  // every rank in an order of its own
              const size_t t = (i + static_cast<size_t>(rank.rank() * 5)) % kTensors;
              CHECK_OK(Submit(rank, "t" + std::to_string(t), data[t], record.Callback()));
            }
            for (const Status& status : record.Await(kTensors)) CHECK_OK(status);
            for (size_t t = 0; t < kTensors; ++t) {
              for (float value : data[t]) CHECK(value == static_cast<float>((t + 1) * rank.size()));
            }
          }
        },
        NeverKick());
  }
}

TEST_CASE("a submission that may drive is done when it returns") {
  RunRanks(
      2,
      [](Rank& rank) {
        Record record;
        std::atomic<int> here{0};
        const std::thread::id me = std::this_thread::get_id();
        for (size_t i = 0; i < 50; ++i) {
          std::vector<float> data(10, 1.0f);
          const Engine::Callback count = [&](const Operation& op) {
            if (std::this_thread::get_id() == me) ++here;
            record.Add(op.status);
          };
          CHECK_OK(Submit(rank, "t", data, count, nullptr, 30'000'000'000));
          CHECK_OK(record.Await(i + 1).back());
          CHECK(data[0] == 2.0f);
        }
        CHECK(here > 0);  // not all: the engine thread may just have looked
      },
      NeverKick());
}

TEST_CASE("a submission drives for a while only") {
  RunRanks(
      2,
      [](Rank& rank) {
        Record record;
        std::vector<float> late(10, 1.0f), other(10, 1.0f), go(10, 1.0f);
        if (rank.rank() == 0) {
          CHECK_OK(Submit(rank, "late", late, record.Callback(), nullptr, 2'000'000));
          CHECK(late[0] == 1.0f);
          // Another is on its way, so this one is not worked on here, however long it may be.
          CHECK_OK(Submit(rank, "other", other, record.Callback(), nullptr, 30'000'000'000));
          CHECK(other[0] == 1.0f);
        }
        CHECK_OK(rank.Allreduce("go", go));
        if (rank.rank() == 1) {
          CHECK_OK(Submit(rank, "other", other, record.Callback(), nullptr, 2'000'000));
          CHECK_OK(Submit(rank, "late", late, record.Callback(), nullptr, 2'000'000));
        }
        for (const Status& status : record.Await(2)) CHECK_OK(status);
        CHECK(late[0] == 2.0f);
        CHECK(other[0] == 2.0f);
      },
      NeverKick());
}

TEST_CASE("blocking calls go on while a callback is due") {
  RunRanks(
      2,
      [](Rank& rank) {
        Record record;
        std::vector<float> lonely(4, 1.0f);
        if (rank.rank() == 0) CHECK_OK(Submit(rank, "lonely", lonely, record.Callback()));
        for (int i = 0; i < 200; ++i) {
          std::vector<float> data(10, 1.0f);
          CHECK_OK(rank.Allreduce("blocking", data));
          CHECK(data[9] == 2.0f);
        }
        if (rank.rank() == 1) CHECK_OK(Submit(rank, "lonely", lonely, record.Callback()));
        CHECK_OK(record.Await(1).front());
        CHECK(lonely[3] == 2.0f);
      },
      NeverKick());
}

TEST_CASE("a callback may submit but not wait") {
  std::latch through(2);
  RunRanks(
      2,
      [&](Rank& rank) {
        Record record;
        std::vector<float> first(4, 1.0f);
        std::vector<float> second(4, 1.0f);
        uint64_t never = 0;
        std::vector<float> pending(4);
        CHECK_OK(rank.Submit("never on rank " + std::to_string(rank.rank()), pending, false, &never));
        CHECK_OK(Submit(rank, "first", first, [&](const Operation& op) {
          const Status waited = rank.engine().Wait(never, -1, nullptr);
          CHECK(waited == Code::kInvalidArgument);
          CHECK_OK(Submit(rank, "second", second, record.Callback()));
          record.Add(op.status);
        }));
        for (const Status& status : record.Await(2)) CHECK_OK(status);
        CHECK(first[0] == 2.0f);
        CHECK(second[0] == 2.0f);
        std::vector<float> meet(1, 1.0f);
        CHECK_OK(rank.Allreduce("meet", meet));  // a wait that was refused has done no harm
        CHECK(meet[0] == 2.0f);
        // Who leaves with work pending ends the world, so that the allreduce might fail where it is not over
        // yet.
        through.arrive_and_wait();
      },
      NeverKick());
}

TEST_CASE("a handle and a callback together") {
  RunRanks(2, [](Rank& rank) {
    Record record;
    std::vector<float> data(5, 1.0f);
    uint64_t handle = 0;
    CHECK_OK(Submit(rank, "t", data, record.Callback(), &handle));
    CHECK_OK(rank.Wait(handle));
    CHECK_OK(record.Await(1).front());
    CHECK(rank.engine().Find(handle) == nullptr);
  });
}

TEST_CASE("a mismatch reaches the callback") {
  RunRanks(
      2,
      [](Rank& rank) {
        Record record;
        std::vector<float> data(rank.rank() == 0 ? 3 : 4);
        CHECK_OK(Submit(rank, "t", data, record.Callback()));
        const Status status = record.Await(1).front();
        CHECK(status == Code::kMismatch);
        CHECK(status.message() == Contains("rank 0 has (3,), rank 1 has (4,)"));
      },
      NeverKick());
}

TEST_CASE("a refused submission has no callback") {
  RunRanks(1, [](Rank& rank) {
    Record record;
    std::vector<float> data(1);
    CHECK(Submit(rank, "unnamed.1", data, record.Callback()) == Code::kInvalidArgument);
    rank.engine().Shutdown();
    CHECK(Submit(rank, "t", data, record.Callback()) == Code::kShutDown);
    record.Await(0);
  });
}

TEST_CASE("a killed rank and a leaver reach the callbacks") {
  for (const bool kill : {true, false}) {
    std::latch met(2);
    RunRanks(
        2,
        [&](Rank& rank) {
          std::vector<float> meet(1);
          CHECK_OK(rank.Allreduce("meet", meet));
          met.arrive_and_wait();
          if (rank.rank() == 1) {
            if (kill) rank.world().Kill(1);
            return;  // the destructor of a rank that was not killed leaves
          }
          Record record;
          std::vector<float> a(4), b(4);
          size_t accepted = 0;  // the engine thread may have noticed before
          if (Submit(rank, "a", a, record.Callback()).ok()) ++accepted;
          if (Submit(rank, "b", b, record.Callback()).ok()) ++accepted;
          for (const Status& status : record.Await(accepted)) {
            CHECK(status == (kill ? Code::kRankLost : Code::kRankLeft));
          }
        },
        NeverKick());
  }
}

// Whichever thread fails the pending operation, the other rank learns of it.
TEST_CASE("shutting down fails the callback here and tells the others") {
  for (int round = 0; round < 20; ++round) {
    std::latch met(2);
    RunRanks(
        2,
        [&](Rank& rank) {
          Record record;
          std::vector<float> data(30000, 1.0f);
          std::vector<float> meet(1);
          CHECK_OK(rank.Allreduce("meet", meet));
          met.arrive_and_wait();
          if (rank.rank() == 1) {
            CHECK_OK(Submit(rank, "abandoned", data, record.Callback()));
            std::this_thread::sleep_for(std::chrono::microseconds(50 * round));
            rank.engine().Shutdown();
            const Status status = record.Await(1).front();
            CHECK((status.ok() || status.code() == Code::kShutDown));
            return;
          }
          const Status submitted = Submit(rank, "abandoned", data, record.Callback());
          const Status status = submitted.ok() ? record.Await(1).front() : submitted;
          CHECK((status.ok() || status.code() == Code::kRankLeft));
        },
        NeverKick());
  }
}

}  // namespace
}  // namespace kolovod
