#include "engine/engine.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "testing/world.h"

namespace kolovod {
namespace {

using testing::Contains;
using testing::FirstDifference;
using testing::Rank;
using testing::RunRanks;

std::vector<float> Values(size_t count, int rank, int salt = 0) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] =
        static_cast<float>((i * 31 + static_cast<size_t>(rank) * 17 + static_cast<size_t>(salt)) % 97);
  }
  return values;
}

std::vector<float> Expected(size_t count, int size, int salt = 0) {
  std::vector<float> sum(count, 0.0f);
  for (int r = 0; r < size; ++r) {
    const std::vector<float> values = Values(count, r, salt);
    for (size_t i = 0; i < count; ++i) sum[i] += values[i];
  }
  return sum;
}

TEST_CASE("allreduce of every size on every world") {
  for (int size : {1, 2, 3, 4, 8}) {
    RunRanks(size, [](Rank& rank) {
      for (size_t count : {0, 1, 15, 17, 1000, 5000, 70000}) {
        for (int again = 0; again < 4; ++again) {
          std::vector<float> data = Values(count, rank.rank(), again);
          CHECK_OK(rank.Allreduce("t" + std::to_string(count), data));
          CHECK(FirstDifference(data, Expected(count, rank.size(), again)) == "");
        }
      }
    });
  }
}

TEST_CASE("reducescatter and alltoall on every world") {
  for (int size : {1, 2, 3, 4, 8}) {
    RunRanks(size, [](Rank& rank) {
      const auto n = static_cast<size_t>(rank.size());
      const auto r = static_cast<size_t>(rank.rank());
      for (size_t count : {0, 1, 7, 1000, 30011}) {
        const std::vector<float> sum = Expected(count, rank.size());
        size_t begin = 0;
        for (size_t q = 0; q < r; ++q) begin += PartOf(count, rank.size(), static_cast<int>(q));
        const size_t part = PartOf(count, rank.size(), rank.rank());
        std::vector<float> result;
        CHECK_OK(rank.Scatter(Verb::kReducescatter, "r", Values(count, rank.rank()), {}, &result));
        CHECK(FirstDifference(result, std::vector<float>(sum.begin() + static_cast<long>(begin),
                                                         sum.begin() + static_cast<long>(begin + part))) ==
              "");
        // Rank s sends count / (s + d + 1) rows, filled with 100 s + d, to rank d.
        std::vector<float> data, wanted;
        std::vector<int64_t> splits;
        for (size_t d = 0; d < n; ++d) {
          splits.push_back(static_cast<int64_t>(count / (r + d + 1)));
          data.insert(data.end(), count / (r + d + 1), static_cast<float>(100 * r + d));
          wanted.insert(wanted.end(), count / (r + d + 1), static_cast<float>(100 * d + r));
        }
        CHECK_OK(rank.Scatter(Verb::kAlltoall, "a", data, splits, &result));
        CHECK(FirstDifference(result, wanted) == "");
      }
    });
  }
}

TEST_CASE("unnamed operations match by order") {
  RunRanks(3, [](Rank& rank) {
    for (int i = 0; i < 50; ++i) {
      std::vector<float> data = Values(static_cast<size_t>(i), rank.rank(), i);
      CHECK_OK(rank.Allreduce("", data));
      CHECK(FirstDifference(data, Expected(static_cast<size_t>(i), 3, i)) == "");
    }
  });
}

// Every rank submits the same names in an order of its own, and waits in yet another.
TEST_CASE("any order of submission works") {
  for (int size : {2, 3, 4}) {
    RunRanks(size, [](Rank& rank) {
      std::mt19937 random(static_cast<unsigned>(rank.rank()) * 7 + 1);
      constexpr int kTensors = 40;
      std::vector<int> order(kTensors);
      std::iota(order.begin(), order.end(), 0);
      for (int step = 0; step < 8; ++step) {
        std::vector<std::vector<float>> data;
        for (int t = 0; t < kTensors; ++t) {
          data.push_back(Values(static_cast<size_t>(t * t * 3), rank.rank(), t + step));
        }
        std::vector<uint64_t> handles(kTensors);
        std::shuffle(order.begin(), order.end(), random);
        for (int t : order) {
          CHECK_OK(rank.Submit("g" + std::to_string(t), data[static_cast<size_t>(t)], false,
                               &handles[static_cast<size_t>(t)]));
        }
        std::shuffle(order.begin(), order.end(), random);
        for (int t : order) CHECK_OK(rank.Wait(handles[static_cast<size_t>(t)]));
        for (int t = 0; t < kTensors; ++t) {
          CHECK(data[static_cast<size_t>(t)] ==
                Expected(static_cast<size_t>(t * t * 3), rank.size(), t + step));
        }
      }
    });
  }
}

TEST_CASE("the steady state sends no messages") {
  RunRanks(2, [](Rank& rank) {
    const auto step = [&] {
      std::vector<std::vector<float>> data;
      std::vector<uint64_t> handles(20);
      for (int t = 0; t < 20; ++t) data.push_back(Values(100, rank.rank(), t));
      for (size_t t = 0; t < 20; ++t) {
        CHECK_OK(rank.Submit("g" + std::to_string(t), data[t], false, &handles[t]));
      }
      for (uint64_t handle : handles) CHECK_OK(rank.Wait(handle));
    };
    step();
    step();
    const EngineStats before = rank.engine().Stats();
    CHECK(before.control.message_bytes > 0);
    for (int i = 0; i < 10; ++i) step();
    const EngineStats after = rank.engine().Stats();
    CHECK(after.control.message_bytes == before.control.message_bytes);
    CHECK(after.control.full_announcements == before.control.full_announcements);
    CHECK(after.control.bit_announcements == before.control.bit_announcements + 200);
    CHECK(after.operations == before.operations + 200);
  });
}

TEST_CASE("a name whose shape varies leaves bits for others") {
  RunRanks(
      3,
      [](Rank& rank) {
        for (int i = 0; i < 500; ++i) {  // SmallConfig has 64 bits
          const auto count = static_cast<size_t>(1 + i % 2);
          std::vector<float> data = Values(count, rank.rank(), i);
          CHECK_OK(rank.Allreduce("varies", data));
          CHECK(FirstDifference(data, Expected(count, 3, i)) == "");
        }
        const uint64_t before = rank.engine().Stats().control.bit_announcements;
        for (int i = 0; i < 12; ++i) {
          std::vector<float> data = Values(10, rank.rank(), i);
          CHECK_OK(rank.Allreduce("steady", data));
          CHECK(FirstDifference(data, Expected(10, 3, i)) == "");
        }
        CHECK(rank.engine().Stats().control.bit_announcements == before + 10);
      },
      testing::ByLogOnly());
}

TEST_CASE("a changed shape is negotiated again") {
  RunRanks(3, [](Rank& rank) {
    for (int i = 0; i < 60; ++i) {
      const size_t count = static_cast<size_t>(i / 5 * 10);
      std::vector<float> data = Values(count, rank.rank(), i);
      CHECK_OK(rank.Allreduce("t", data));
      CHECK(FirstDifference(data, Expected(count, 3, i)) == "");
    }
  });
}

// One rank still announces the cached bit while another comes with a new shape.
TEST_CASE("a bit against a new shape is a mismatch on every rank") {
  RunRanks(3, [](Rank& rank) {
    for (int i = 0; i < 4; ++i) {
      std::vector<float> data(8);
      CHECK_OK(rank.Allreduce("t", data));
    }
    std::vector<float> data(rank.rank() == 1 ? 9 : 8);
    const Status status = rank.Allreduce("t", data);
    CHECK(status == Code::kMismatch);
    CHECK(status.message() == Contains("rank 0 has (8,), rank 1 has (9,)"));
    std::vector<float> again = Values(8, rank.rank());
    CHECK_OK(rank.Allreduce("t", again));
    CHECK(FirstDifference(again, Expected(8, 3)) == "");
  });
}

TEST_CASE("a pending name cannot be submitted again") {
  RunRanks(2, [](Rank& rank) {
    std::vector<float> a(4);
    std::vector<float> b(4);
    uint64_t first = 0;
    uint64_t second = 0;
    if (rank.rank() == 0) {
      CHECK_OK(rank.Submit("t", a, false, &first));
      CHECK(rank.Submit("t", b, false, &second) == Code::kDuplicateName);
    }
    CHECK_OK(rank.Allreduce("sync", b));
    if (rank.rank() == 1) CHECK_OK(rank.Submit("t", a, false, &first));
    CHECK_OK(rank.Wait(first));
    CHECK(rank.engine().Wait(first, -1, nullptr) == Code::kInvalidArgument);
  });
}

TEST_CASE("broadcast from every root") {
  for (int size : {1, 2, 4}) {
    RunRanks(size, [](Rank& rank) {
      for (int root = 0; root < rank.size(); ++root) {
        for (size_t count : {0, 3, 9000}) {
          std::vector<float> data = Values(count, rank.rank());
          uint64_t handle = 0;
          CHECK_OK(rank.Submit("b", data, true, &handle, Op::kSum, Verb::kBroadcast, root));
          CHECK_OK(rank.Wait(handle));
          CHECK(data == Values(count, root));
        }
      }
    });
  }
}

TEST_CASE("allgather with different first dimensions") {
  RunRanks(3, [](Rank& rank) {
    for (int round = 0; round < 6; ++round) {
      // Cached from the third round on; the last round changes one rank only.
      const auto rows = [&](int r) { return static_cast<size_t>(r * 1500 + (round == 5 && r == 1 ? 2 : 0)); };
      std::vector<float> data = Values(rows(rank.rank()), rank.rank());
      uint64_t handle = 0;
      CHECK_OK(rank.Submit("g", data, true, &handle, Op::kSum, Verb::kAllgather));
      const OperationPtr op = rank.engine().Find(handle);
      CHECK_OK(rank.Wait(handle));
      std::vector<float> expected;
      for (int r = 0; r < 3; ++r) {
        const std::vector<float> part = Values(rows(r), r);
        expected.insert(expected.end(), part.begin(), part.end());
      }
      CHECK(op->buffers[0].bytes == expected.size() * sizeof(float));
      CHECK(std::memcmp(op->buffers[0].data.get(), expected.data(), op->buffers[0].bytes) == 0);
    }
  });
}

// The order of addition is the order of ranks, whatever the size of the bucket or who owns a slice.
TEST_CASE("the result is the same on every rank and in every bucket") {
  constexpr size_t kCount = 20000;
  std::vector<std::vector<float>> results(4);
  RunRanks(4, [&](Rank& rank) {
    std::mt19937 random(static_cast<unsigned>(rank.rank()));
    std::vector<float> data(kCount);
    for (float& v : data) v = std::uniform_real_distribution<float>(-1e4f, 1e4f)(random);
    std::vector<float> head(data.begin(), data.begin() + 100);  // one-shot
    CHECK_OK(rank.Allreduce("whole", data, Op::kAverage));
    CHECK_OK(rank.Allreduce("head", head, Op::kAverage));
    CHECK(std::equal(head.begin(), head.end(), data.begin()));
    results[static_cast<size_t>(rank.rank())] = std::move(data);
  });
  for (int r = 1; r < 4; ++r) {
    CHECK(std::memcmp(results[0].data(), results[static_cast<size_t>(r)].data(), kCount * sizeof(float)) ==
          0);
  }
}

// A name that comes for the third time has a bit, and little data then comes with its announcement.
TEST_CASE("small operations have the same bits either way") {
  for (const int size : {2, 3, 5}) {
    RunRanks(
        size,
        [](Rank& rank) {
          std::mt19937 random(static_cast<unsigned>(rank.rank()));
          for (const size_t count : {1, 13, 500, 1024, 1025}) {
            std::vector<float> data(count);
            for (float& v : data) v = std::uniform_real_distribution<float>(-1e4f, 1e4f)(random);
            std::vector<std::vector<float>> results(4, data);
            const uint64_t before = rank.engine().Stats().staged;
            for (std::vector<float>& result : results) {
              CHECK_OK(rank.Allreduce("t" + std::to_string(count), result, Op::kAverage));
              CHECK(result == results[0]);
            }
            std::vector<float> unnamed = data;
            CHECK_OK(rank.Allreduce("", unnamed, Op::kAverage));
            CHECK(unnamed == results[0]);
            CHECK(rank.engine().Stats().staged - before == (count <= 1024 ? 3 : 0));
          }
        },
        testing::ByLogOnly());
  }
}

// More at a time than there are slots, of ranks that run far ahead of a slow one.
TEST_CASE("small operations of ranks that are ahead") {
  RunRanks(3, [](Rank& rank) {
    if (rank.rank() == 2) rank.world().Delay(2, 20);
    std::mt19937 random(static_cast<unsigned>(rank.rank()));
    for (int round = 0; round < 60; ++round) {
      std::vector<std::vector<float>> data;
      std::vector<uint64_t> handles(80);
      for (int t = 0; t < 80; ++t) data.push_back(Values(1 + static_cast<size_t>(t), rank.rank(), t + round));
      for (size_t t = 0; t < 80; ++t) {
        const std::string name = t % 2 == 0 ? "" : "t" + std::to_string(t);
        CHECK_OK(rank.Submit(name, data[t], false, &handles[t]));
      }
      for (size_t t = 0; t < 80; ++t) {
        CHECK_OK(rank.Wait(handles[t]));
        CHECK(FirstDifference(data[t], Expected(1 + t, 3, static_cast<int>(t) + round)) == "");
      }
      std::vector<float> scalar(1, static_cast<float>(round));
      CHECK_OK(rank.Allreduce("", scalar));
      CHECK(scalar[0] == static_cast<float>(3 * round));
    }
    CHECK(rank.engine().Stats().staged > 60 * 10);
  });
}

// Rank r has 3 (r + 1) steps, with names that come again, so that bits are in use when ranks join.
TEST_CASE("ranks with uneven data join") {
  for (int size : {1, 2, 3, 4}) {
    RunRanks(size, [](Rank& rank) {
      for (int epoch = 0; epoch < 3; ++epoch) {
        for (int step = 0; step < 3 * (rank.rank() + 1); ++step) {
          std::vector<std::vector<float>> data(4);
          std::vector<uint64_t> handles(4);
          for (size_t t = 0; t < 4; ++t) {
            data[t].assign(700 * (t + 1), 1.0f);
            CHECK_OK(rank.Submit("t" + std::to_string(t), data[t], false, &handles[t]));
          }
          const auto there = static_cast<float>(rank.size() - step / 3);
          for (size_t t = 0; t < 4; ++t) {
            CHECK_OK(rank.Wait(handles[t]));
            CHECK(FirstDifference(data[t], std::vector<float>(700 * (t + 1), there)) == "");
          }
        }
        CHECK(rank.Join() == rank.size() - 1);
      }
    });
  }
}

// {0, 1}, {1, 2} and {0, 2} at once, in another order on every rank, while the world works too.
TEST_CASE("process sets that overlap") {
  std::shared_ptr<LoopbackWorld> world;
  CHECK_OK(LoopbackWorld::Create(std::vector<int>(3), testing::SmallConfig(), &world));
  std::vector<std::shared_ptr<LoopbackWorld>> sets(3);
  for (int s = 0; s < 3; ++s)
    CHECK_OK(world->MakeSet({s == 2 ? 0 : s, s == 0 ? 1 : 2}, &sets[static_cast<size_t>(s)]));
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      Rank all(r, world);
      std::vector<std::unique_ptr<Rank>> mine(3);
      for (size_t s = 0; s < 3; ++s) {
        const std::vector<int>& ranks = sets[s]->ranks;
        const auto at = std::find(ranks.begin(), ranks.end(), r);
        if (at != ranks.end())
          mine[s] = std::make_unique<Rank>(static_cast<int>(at - ranks.begin()), sets[s]);
      }
      for (size_t step = 0; step < 20; ++step) {
        std::vector<std::vector<float>> data(4, std::vector<float>(3000, static_cast<float>(r)));
        std::vector<uint64_t> handles(4);
        for (size_t i = 0; i < 4; ++i) {
          const size_t s = (i + step + static_cast<size_t>(r)) % 4;
          Rank* rank = s == 3 ? &all : mine[s].get();
          if (rank != nullptr) CHECK_OK(rank->Submit("t", data[s], false, &handles[s]));
        }
        for (size_t s = 0; s < 4; ++s) {
          Rank* rank = s == 3 ? &all : mine[s].get();
          if (rank == nullptr) continue;
          CHECK_OK(rank->Wait(handles[s]));
          const float sum = s == 3 ? 3.0f : s == 0 ? 1.0f : s == 1 ? 3.0f : 2.0f;
          CHECK(FirstDifference(data[s], std::vector<float>(3000, sum)) == "");
        }
      }
      std::vector<float> data(1);
      CHECK_OK(all.Allreduce("end", data));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_CASE("bad arguments fail at once") {
  RunRanks(1, [](Rank& rank) {
    std::vector<float> data(3);
    uint64_t handle = 0;
    CHECK(rank.Submit("t", data, true, &handle, Op::kAdasum, Verb::kReducescatter) == Code::kInvalidArgument);
    CHECK(rank.Submit("t", data, true, &handle, Op::kSum, Verb::kBroadcast, 1) == Code::kInvalidArgument);
    CHECK(rank.Submit("t", data, true, &handle, Op::kSum, Verb::kBroadcast, -1) == Code::kInvalidArgument);
    CHECK_OK(rank.Allreduce("t", data));
  });
}

TEST_CASE("many threads of one rank wait at once") {
  RunRanks(2, [](Rank& rank) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&rank, t] {
        for (int i = 0; i < 30; ++i) {
          std::vector<float> data = Values(500, rank.rank(), i);
          CHECK_OK(rank.Allreduce("thread" + std::to_string(t), data));
          CHECK(FirstDifference(data, Expected(500, 2, i)) == "");
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

}  // namespace
}  // namespace kolovod
