// Worlds of several hosts: the control plane between leaders, and what happens when one is lost.
#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "engine/engine.h"
#include "testing/world.h"

namespace kolovod {
namespace {

using testing::Rank;
using testing::RunHosts;

const std::vector<std::vector<int>> kWorlds = {{0, 1},       {0, 0, 1},       {0, 1, 0},
                                               {0, 0, 1, 1}, {0, 1, 2, 1, 0}, {5, 5, 3, 3, 3, 9}};

std::vector<float> Values(size_t count, int rank) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>((i * 3 + static_cast<size_t>(rank)) % 64);
  return values;
}

std::vector<float> Sum(size_t count, int size) {
  std::vector<float> sum(count);
  for (int r = 0; r < size; ++r) {
    const std::vector<float> values = Values(count, r);
    for (size_t i = 0; i < count; ++i) sum[i] += values[i];
  }
  return sum;
}

TEST(many_at_once_by_name_and_by_bit) {
  for (const std::vector<int>& hosts : kWorlds) {
    RunHosts(hosts, [](Rank& rank) {
      const std::vector<size_t> counts = {1, 17, 900, 5000, 40000};
      for (int again = 0; again < 5; ++again) {
        std::vector<std::vector<float>> data;
        std::vector<uint64_t> handles(counts.size());
        for (size_t count : counts) data.push_back(Values(count, rank.rank()));
        for (size_t i = 0; i < counts.size(); ++i) {
          // Every rank begins with another one.
          const size_t t = (i + static_cast<size_t>(rank.rank())) % counts.size();
          CHECK_OK(rank.Submit("t" + std::to_string(t), data[t], false, &handles[t]));
        }
        for (size_t t = 0; t < counts.size(); ++t) {
          CHECK_OK(rank.Wait(handles[t]));
          CHECK(data[t] == Sum(counts[t], rank.size()));
        }
        std::vector<float> one = Values(3, rank.rank());
        CHECK_OK(rank.Allreduce("blocking", one));
        CHECK(one == Sum(3, rank.size()));
      }
      CHECK(rank.engine().Stats().control.bit_announcements > 0);
    });
  }
}

TEST(names_that_change_their_shape) {
  for (const std::vector<int>& hosts : kWorlds) {
    RunHosts(hosts, [](Rank& rank) {
      for (size_t i = 0; i < 40; ++i) {
        const size_t count = 1 + (i / 4) % 3;
        std::vector<float> data = Values(count, rank.rank());
        CHECK_OK(rank.Allreduce("t", data));
        CHECK(data == Sum(count, rank.size()));
      }
    });
  }
}

TEST(an_idle_rank_takes_part) {
  for (const std::vector<int>& hosts : kWorlds) {
    RunHosts(hosts, [](Rank& rank) {
      std::vector<float> data = Values(30000, rank.rank());
      uint64_t handle = 0;
      CHECK_OK(rank.Submit("t", data, false, &handle));
      // All but the last rank do something else; nobody of theirs drives but the engine's thread.
      if (rank.rank() == rank.size() - 1) {
        CHECK_OK(rank.Wait(handle, 20));
      } else {
        bool done = false;
        while (!done) {
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
          done = rank.engine().Find(handle)->done.load();
        }
      }
      CHECK(data == Sum(30000, rank.size()));
    });
  }
}

TEST(ranks_of_several_hosts_join) {
  RunHosts({0, 0, 1, 1}, [](Rank& rank) {
    for (int step = 0; step < 2 * (rank.rank() + 1); ++step) {
      std::vector<float> data(100, 1.0f);
      CHECK_OK(rank.Allreduce("t" + std::to_string(step % 2), data));
      CHECK(data == std::vector<float>(100, static_cast<float>(rank.size() - step / 2)));
    }
    CHECK(rank.Join() == 3);
  });
}

// Who is through leaves at once: nobody may hear of that before what it took part in.
TEST(ranks_leave_after_their_last_operation) {
  for (int i = 0; i < 40; ++i) {
    RunHosts({0, 1, 1, 2, 2, 2}, [](Rank& rank) {
      if (rank.rank() != 0) {
        CHECK(rank.Join() >= 0);
        return;
      }
      std::vector<float> data(100, 1.0f);
      CHECK_OK(rank.Allreduce("alone", data));
      CHECK(rank.Join() == 0);
    });
  }
}

TEST(mismatches_are_told_to_all_hosts) {
  RunHosts({0, 1, 1}, [](Rank& rank) {
    std::vector<float> data(rank.rank() == 2 ? 4 : 3);
    const Status status = rank.Allreduce("t", data);
    CHECK(status.code() == Code::kMismatch);
    CHECK(status.message().find("rank 2 has (4,)") != std::string::npos);
    std::vector<float> same(3);
    CHECK_OK(rank.Allreduce("t", same));
  });
}

TEST(a_set_across_hosts) {
  std::shared_ptr<LoopbackWorld> world;
  std::shared_ptr<LoopbackWorld> set;
  CHECK_OK(LoopbackWorld::Create({0, 0, 1, 1}, testing::SmallConfig(), &world));
  CHECK_OK(world->MakeSet({1, 2, 3}, &set));
  std::vector<std::thread> threads;
  for (int r = 0; r < 4; ++r) {
    threads.emplace_back([&, r] {
      Rank all(r, world);
      if (r > 0) {
        Rank member(r - 1, set);
        for (int i = 0; i < 10; ++i) {
          std::vector<float> data(2000, static_cast<float>(r));
          CHECK_OK(member.Allreduce("t", data));
          CHECK(data == std::vector<float>(2000, 6.0f));
        }
      }
      std::vector<float> data(1, 1.0f);
      CHECK_OK(all.Allreduce("t", data));
      CHECK(data[0] == 4.0f);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Rank `victim` does something and is not there for the last allreduce; all others hear of it.
void CheckOthersFail(const std::vector<int>& hosts, int victim, Code code,
                     const std::function<void(Rank&)>& end) {
  std::atomic<int> ready{0};
  std::atomic<int> through{0};
  RunHosts(hosts, [&](Rank& rank) {
    for (int i = 0; i < 3; ++i) {
      std::vector<float> data(3000, 1.0f);
      CHECK_OK(rank.Allreduce("t", data));
    }
    ++ready;
    while (ready.load() < rank.size()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (rank.rank() == victim) return end(rank);
    std::vector<float> data(3000, 1.0f);
    const auto begin = std::chrono::steady_clock::now();
    const Status status = rank.Allreduce("t", data);
    CHECK(status.code() == code);
    CHECK(status.message().find("rank " + std::to_string(victim)) != std::string::npos);
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
    // Whoever goes now leaves, which is not what the others are to see.
    ++through;
    while (through.load() < rank.size() - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
}

TEST(an_abort_reaches_every_host) {
  for (int victim = 0; victim < 4; ++victim) {
    CheckOthersFail({0, 0, 1, 1}, victim, Code::kInterrupted,
                    [](Rank& rank) { rank.engine().Abort("enough"); });
  }
}

TEST(a_rank_that_leaves_is_named_on_every_host) {
  for (int victim = 0; victim < 4; ++victim) {
    CheckOthersFail({0, 0, 1, 1}, victim, Code::kRankLeft, [](Rank& rank) { rank.engine().Shutdown(); });
  }
}

TEST(a_rank_that_dies_is_named_on_every_host) {
  for (int victim = 0; victim < 4; ++victim) {
    CheckOthersFail({0, 0, 1, 1}, victim, Code::kRankLost,
                    [](Rank& rank) { rank.world().Kill(rank.rank()); });
  }
}

}  // namespace
}  // namespace kolovod

TEST_MAIN()
