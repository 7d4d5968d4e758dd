// Worlds of several hosts: the control plane between leaders, and what happens when one is lost.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <latch>
#include <string>
#include <thread>

#include "base/tree.h"
#include "engine/engine.h"
#include "testing/world.h"

namespace kolovod {
namespace {

using testing::Contains;
using testing::FirstDifference;
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

TEST_CASE("many at once by name and by bit") {
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
          CHECK(FirstDifference(data[t], Sum(counts[t], rank.size())) == "");
        }
        std::vector<float> one = Values(3, rank.rank());
        CHECK_OK(rank.Allreduce("blocking", one));
        CHECK(one == Sum(3, rank.size()));
      }
      CHECK(rank.engine().Stats().control.bit_announcements > 0);
    });
  }
}

TEST_CASE("names that change their shape") {
  for (const std::vector<int>& hosts : kWorlds) {
    RunHosts(hosts, [](Rank& rank) {
      for (size_t i = 0; i < 40; ++i) {
        const size_t count = 1 + (i / 4) % 3;
        std::vector<float> data = Values(count, rank.rank());
        CHECK_OK(rank.Allreduce("t", data));
        CHECK(FirstDifference(data, Sum(count, rank.size())) == "");
      }
    });
  }
}

// Rank s sends (s * 5 + d * 3 + again) % 4 * unit rows, filled with 100 s + d, to rank d.
void CheckAlltoall(Rank& rank, const std::string& name, size_t unit, int again) {
  const auto rows = [&](int s, int d) { return static_cast<size_t>((s * 5 + d * 3 + again) % 4) * unit; };
  std::vector<float> data, wanted, result;
  std::vector<int64_t> splits;
  for (int peer = 0; peer < rank.size(); ++peer) {
    splits.push_back(static_cast<int64_t>(rows(rank.rank(), peer)));
    data.insert(data.end(), rows(rank.rank(), peer), static_cast<float>(100 * rank.rank() + peer));
    wanted.insert(wanted.end(), rows(peer, rank.rank()), static_cast<float>(100 * peer + rank.rank()));
  }
  CHECK_OK(rank.Scatter(Verb::kAlltoall, name, data, splits, &result));
  CHECK(FirstDifference(result, wanted) == "");
}

// Each host is told what concerns its ranks, by way of others where there are more than five.
TEST_CASE("alltoalls with other splits for each host") {
  std::vector<std::vector<int>> worlds = kWorlds;
  worlds.push_back({0, 0, 0});
  worlds.push_back({0, 1, 2, 3, 4, 5, 6, 6, 1, 7});
  for (const std::vector<int>& hosts : worlds) {
    RunHosts(hosts, [](Rank& rank) {
      for (int again = 0; again < 6; ++again) {
        CheckAlltoall(rank, "same", 3, 0);  // by bit from the third time on
        CheckAlltoall(rank, "changes", 100, again / 2);
        CheckAlltoall(rank, "", 2000, again);
        // What is ordered between them stays there.
        std::vector<float> data = Values(50, rank.rank());
        CHECK_OK(rank.Allreduce("between", data));
        CHECK(FirstDifference(data, Sum(50, rank.size())) == "");
      }
      CHECK(rank.engine().Stats().control.bit_announcements > 0);
      std::vector<float> result;
      if (rank.rank() == 1) {
        const Status status = rank.Scatter(Verb::kReducescatter, "differs", {1, 2}, {}, &result);
        CHECK(status == Code::kMismatch);
      } else {
        const std::vector<int64_t> nothing(static_cast<size_t>(rank.size()));
        const Status status = rank.Scatter(Verb::kAlltoall, "differs", {}, nothing, &result);
        CHECK(status == Code::kMismatch);
      }
      CheckAlltoall(rank, "differs", 1, 1);
      if (rank.rank() != 1) {  // it has joined, so this cannot be done
        const std::vector<int64_t> nothing(static_cast<size_t>(rank.size()));
        const Status status = rank.Scatter(Verb::kAlltoall, "without", {}, nothing, &result);
        CHECK(status == Code::kMismatch);
        CHECK(status.message() == Contains("rank 1 has joined"));
      }
      rank.Join();
      CheckAlltoall(rank, "same", 3, 0);
    });
  }
}

// What the root sends to the leader of host 1, in the name of the root.
void Forge(int fd, const Note& note) {
  const std::string payload = EncodeNote(note);
  const uint32_t head[2] = {static_cast<uint32_t>(payload.size()), 0};
  std::string frame(reinterpret_cast<const char*>(head), sizeof(head));
  frame += payload;
  CHECK(write(fd, frame.data(), frame.size()) == static_cast<ssize_t>(frame.size()));
}

// Rank 1 leads host 1, and no other host is behind it.
TEST_CASE("a response that went astray ends the world") {
  for (const int32_t rank : {2, 3, 4, -1}) {
    std::shared_ptr<LoopbackWorld> world;
    CHECK_OK(LoopbackWorld::Create({0, 1, 1, 2}, testing::SmallConfig(), &world));
    const int fd = dup(world->ControlLinksOf(0)[1]);
    std::latch done(world->size());
    std::vector<std::thread> threads;
    for (int r = 0; r < world->size(); ++r) {
      threads.emplace_back([&, r] {
        Rank self(r, world);
        std::vector<float> data(3, 1.0f);
        CHECK_OK(self.Allreduce("first", data));
        done.arrive_and_wait();
        if (r == 0) Forge(fd, Note{Note::Kind::kResponse, rank, 0, 0, EncodeResponse(Response{})});
        const Status status = self.Allreduce(r == 0 ? "nobody else has this" : "second", data);
        const std::string text = "malformed message of kind 2 about rank " + std::to_string(rank);
        CHECK(!status.ok());
        CHECK(status.message() == Contains(text));
      });
    }
    for (std::thread& thread : threads) thread.join();
    close(fd);
  }
}

TEST_CASE("an idle rank takes part") {
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
      CHECK(FirstDifference(data, Sum(30000, rank.size())) == "");
    });
  }
}

TEST_CASE("ranks of several hosts join") {
  RunHosts({0, 0, 1, 1}, [](Rank& rank) {
    for (int step = 0; step < 2 * (rank.rank() + 1); ++step) {
      std::vector<float> data(100, 1.0f);
      CHECK_OK(rank.Allreduce("t" + std::to_string(step % 2), data));
      CHECK(FirstDifference(data, std::vector<float>(100, static_cast<float>(rank.size() - step / 2))) == "");
    }
    CHECK(rank.Join() == 3);
  });
}

// Who is through leaves at once: nobody may hear of that before what it took part in.
TEST_CASE("ranks leave after their last operation") {
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

TEST_CASE("mismatches are told to all hosts") {
  RunHosts({0, 1, 1}, [](Rank& rank) {
    std::vector<float> data(rank.rank() == 2 ? 4 : 3);
    const Status status = rank.Allreduce("t", data);
    CHECK(status == Code::kMismatch);
    CHECK(status.message() == Contains("rank 2 has (4,)"));
    std::vector<float> same(3);
    CHECK_OK(rank.Allreduce("t", same));
  });
}

TEST_CASE("a set across hosts") {
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
          CHECK(FirstDifference(data, std::vector<float>(2000, 6.0f)) == "");
          CheckAlltoall(member, "a", 700, i / 5);
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
  std::latch ready(static_cast<ptrdiff_t>(hosts.size()));
  std::latch through(static_cast<ptrdiff_t>(hosts.size() - 1));
  RunHosts(hosts, [&](Rank& rank) {
    for (int i = 0; i < 3; ++i) {
      std::vector<float> data(3000, 1.0f);
      CHECK_OK(rank.Allreduce("t", data));
    }
    ready.arrive_and_wait();
    if (rank.rank() == victim) return end(rank);
    std::vector<float> data(3000, 1.0f);
    const auto begin = std::chrono::steady_clock::now();
    const Status status = rank.Allreduce("t", data);
    CHECK(status == code);
    CHECK(status.message() == Contains("rank " + std::to_string(victim)));
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(60));
    // Whoever goes now leaves, which is not what the others are to see.
    through.arrive_and_wait();
  });
}

// Each of two hosts of two ranks; and of eight hosts the root, a leader between it and others (1 leads to 5,
// 6 and 7), its second rank, one behind it and one that is not.
void ForVictims(const std::function<void(const std::vector<int>&, int)>& check) {
  for (int victim = 0; victim < 4; ++victim) check({0, 0, 1, 1}, victim);
  for (const int victim : {0, 1, 8, 6, 3}) check({0, 1, 2, 3, 4, 5, 6, 7, 1}, victim);
}

TEST_CASE("an abort reaches every host") {
  ForVictims([](const std::vector<int>& hosts, int victim) {
    CheckOthersFail(hosts, victim, Code::kInterrupted, [](Rank& rank) { rank.engine().Abort("enough"); });
  });
}

// The leader of the second host has connected, and stops before the links are measured.
TEST_CASE("links are measured for no longer than a start may take") {
  Config config = testing::SmallConfig();
  config.start_timeout_ms = 300;
  std::shared_ptr<LoopbackWorld> world;
  CHECK_OK(LoopbackWorld::Create({0, 1}, config, &world));
  for (const int rank : {0, 1}) {
    EngineOptions options;
    options.rank = rank;
    options.size = 2;
    options.hosts = world->hosts;
    options.control_fds = world->TakeControlLinks(rank);
    options.broker = world->BrokerOf(rank);
    options.config = config;
    options.segment = world->SegmentOf(rank);
    options.faults = world->faults;
    options.ranks = world->ranks;
    options.liveness = std::make_unique<LoopbackLiveness>(world->faults, world->ranks,
                                                          Topology(rank, world->hosts).local_ranks);
    std::unique_ptr<Engine> engine;
    const auto begin = std::chrono::steady_clock::now();
    const Status status = Engine::Create(std::move(options), &engine);
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(60));
    if (rank > 0) {  // hears of it
      CHECK(!status.ok());
      continue;
    }
    CHECK(status == Code::kTimeout);
    CHECK(status.message() == "a rank of another host has connected, but sent nothing within 300 ms");
  }
}

TEST_CASE("several connections between two ranks give the same bits") {
  std::vector<std::vector<float>> results;
  for (const int64_t connections : {1, 3, 8}) {
    for (const std::vector<int>& hosts :
         std::vector<std::vector<int>>{{0, 1}, {0, 0, 1, 1}, {0, 1, 2, 3, 4}}) {
      Config config = testing::SmallConfig();
      config.connections = connections;
      std::shared_ptr<LoopbackWorld> world;
      CHECK_OK(LoopbackWorld::Create(hosts, config, &world));
      std::vector<std::vector<float>> first(hosts.size());
      std::vector<std::thread> threads;
      for (int r = 0; r < world->size(); ++r) {
        threads.emplace_back([&, r] {
          Rank rank(r, world);
          for (int i = 0; i < 6; ++i) {
            std::vector<float> data((size_t{1} << 18) + 17);
            for (size_t k = 0; k < data.size(); ++k)
              data[k] = 0.1f * static_cast<float>((k * 31 + static_cast<size_t>(r * 7 + i)) % 1009);
            CHECK_OK(rank.Allreduce("t", data));
            if (i == 0) first[static_cast<size_t>(r)] = data;
          }
          // Only as many as an operation has messages to a peer.
          const uint64_t made = rank.engine().Stats().connections;
          if (hosts.size() == 2) CHECK((made > 1) == (connections > 1));
          CHECK(made <= static_cast<uint64_t>(connections) * (hosts.size() - 1));
        });
      }
      for (std::thread& thread : threads) thread.join();
      for (const std::vector<float>& other : first) CHECK(FirstDifference(other, first[0]) == "");
      results.push_back(first[0]);
    }
  }
  for (size_t i = 3; i < results.size(); ++i) CHECK(FirstDifference(results[i], results[i % 3]) == "");
}

// What was measured when the world formed may be wrong by any factor; all ranks get to know better, alike.
TEST_CASE("a wrong belief about links is revised on all ranks") {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr size_t kCount = 1 << 18;  // each element takes a sanitizer many times as long
#else
  constexpr size_t kCount = 1 << 20;
#endif
  Config config = testing::SmallConfig();
  config.chunk_bytes = 256 << 10;  // each costs a turn of a busy machine's scheduler, as no link does
  for (const double believed : {0.05, 50'000.0}) {
    for (const std::vector<int>& hosts : std::vector<std::vector<int>>{{0, 1}, {0, 0, 1}, {0, 1, 2}}) {
      std::shared_ptr<LoopbackWorld> world;
      CHECK_OK(LoopbackWorld::Create(hosts, config, &world));
      world->believed_bytes_per_us = believed;
      const size_t size = hosts.size();
      std::vector<uint64_t> rates(size), revisions(size);
      std::vector<std::thread> threads;
      for (int r = 0; r < world->size(); ++r) {
        threads.emplace_back([&, r] {
          Rank rank(r, world);
          for (int i = 0; i < 24; ++i) {
            std::vector<float> data(kCount, 1.0f);
            CHECK_OK(rank.Allreduce("t", data));
            CHECK(FirstDifference(data, std::vector<float>(kCount, static_cast<float>(size))) == "");
          }
          std::vector<float> last(1);  // by then all have read what was told
          CHECK_OK(rank.Allreduce("last", last));
          const EngineStats stats = rank.engine().Stats();
          rates[static_cast<size_t>(r)] = stats.link_bytes_per_us;
          revisions[static_cast<size_t>(r)] = stats.link_revisions;
        });
      }
      for (std::thread& thread : threads) thread.join();
      for (size_t r = 0; r < size; ++r) {
        CHECK(rates[r] == rates[0]);
        CHECK(revisions[r] == revisions[0]);
        CHECK(rates[r] >= 1);
        CHECK(rates[r] < 50'000);
      }
      CHECK(revisions[0] >= 1);
    }
  }
}

TEST_CASE("a rank that leaves is named on every host") {
  ForVictims([](const std::vector<int>& hosts, int victim) {
    CheckOthersFail(hosts, victim, Code::kRankLeft, [](Rank& rank) { rank.engine().Shutdown(); });
  });
}

TEST_CASE("a rank that dies is named on every host") {
  ForVictims([](const std::vector<int>& hosts, int victim) {
    CheckOthersFail(hosts, victim, Code::kRankLost, [](Rank& rank) { rank.world().Kill(rank.rank()); });
  });
}

// Per step and connection of the tree: a bit up, a bit and the end of a bucket down.
TEST_CASE("a step takes few messages however many hosts") {
  for (const int n : {2, 3, 5, 6, 16, 33, 64}) {
    std::vector<int> hosts;
    for (int r = 0; r < n; ++r) hosts.push_back(r);
    std::atomic<uint64_t> sent{0};
    std::atomic<uint64_t> received{0};
    std::latch through(n);
    RunHosts(hosts, [&](Rank& rank) {
      constexpr uint64_t kSteps = 20;
      std::vector<float> nothing;
      const auto steps = [&](uint64_t count) {
        for (uint64_t i = 0; i < count; ++i) CHECK_OK(rank.Allreduce("t", nothing));
      };
      steps(3);  // by name, by name with a bit for an answer, by bit
      const ControlStats before = rank.engine().Stats().control;
      steps(kSteps);
      const ControlStats after = rank.engine().Stats().control;
      sent += after.messages_sent - before.messages_sent;
      received += after.messages_received - before.messages_received;
      CHECK(after.full_announcements == before.full_announcements);
      const uint64_t busiest =
          after.messages_sent - before.messages_sent + after.messages_received - before.messages_received;
      const auto links = static_cast<uint64_t>(std::min(n - 1, Tree::kArity + 1));
      CHECK(busiest <= 3 * links * (kSteps + 1));  // some of the step before or after
      through.arrive_and_wait();  // nobody leaves, which makes messages, before all have counted
    });
    const auto edges = static_cast<uint64_t>(n - 1);
    CHECK(sent >= 3 * edges * 19);
    CHECK(sent <= 3 * edges * 21);
    CHECK(received >= 3 * edges * 19);
    CHECK(received <= 3 * edges * 21);
  }
}

// Bits that are taken back on their way up the tree: ranks announce now by bit, now by name.
TEST_CASE("names that change on many hosts") {
  std::vector<int> hosts;
  for (int r = 0; r < 23; ++r) hosts.push_back(r);
  RunHosts(hosts, [](Rank& rank) {
    for (size_t i = 0; i < 30; ++i) {
      // Ranks come to the new shape in their own order, so that some have announced the old bit.
      std::vector<float> a = Values(1 + (i / 3) % 2, rank.rank());
      std::vector<float> b = Values(1 + (i / 4) % 3, rank.rank());
      uint64_t first = 0;
      uint64_t second = 0;
      const bool swapped = (rank.rank() + static_cast<int>(i)) % 2 == 0;
      CHECK_OK(rank.Submit(swapped ? "b" : "a", swapped ? b : a, false, &first));
      CHECK_OK(rank.Submit(swapped ? "a" : "b", swapped ? a : b, false, &second));
      CHECK_OK(rank.Wait(second));
      CHECK_OK(rank.Wait(first));
      CHECK(FirstDifference(a, Sum(a.size(), rank.size())) == "");
      CHECK(FirstDifference(b, Sum(b.size(), rank.size())) == "");
    }
  });
}

}  // namespace
}  // namespace kolovod
