#include <array>
#include <atomic>
#include <latch>
#include <numeric>
#include <random>

#include "testing/world.h"

namespace kolovod {
namespace {

using testing::Contains;
using testing::FirstDifference;
using testing::Rank;
using testing::RunHosts;
using testing::SmallConfig;

// As the segment reads memory of others, and as it would stream.
std::vector<Config> Configs() {
  Config streams = SmallConfig();
  streams.peer_read_bytes = 0;
  return {SmallConfig(), streams};
}

const std::vector<std::vector<int>> kHosts = {{0, 0}, {0, 0, 0}, {0, 1}, {0, 0, 1}, {0, 1, 2}, {0, 1, 0, 1}};

Status Start(Rank& rank, Verb verb, int peer, int64_t tag, float* data, size_t count, bool blocking,
             uint64_t* handle, DType dtype = DType::kFloat32) {
  Request request;
  request.verb = verb;
  request.root = peer;
  request.splits = {tag};
  std::vector<SubmittedTensor> tensors(1);
  tensors[0].meta = {dtype, {static_cast<int64_t>(count)}};
  tensors[0].in = tensors[0].out = data;
  return rank.engine().Submit(std::move(request), std::move(tensors), blocking, handle);
}

Status Send(Rank& rank, int to, std::vector<float> data, int64_t tag = 0) {
  uint64_t handle = 0;
  KV_RETURN_IF_ERROR(Start(rank, Verb::kSend, to, tag, data.data(), data.size(), true, &handle));
  return rank.Wait(handle);
}

Status Recv(Rank& rank, int from, std::vector<float>* data, int64_t tag = 0, int* source = nullptr) {
  uint64_t handle = 0;
  KV_RETURN_IF_ERROR(Start(rank, Verb::kRecv, from, tag, data->data(), data->size(), true, &handle));
  const OperationPtr op = rank.engine().Find(handle);
  KV_RETURN_IF_ERROR(rank.Wait(handle));
  if (source != nullptr) *source = static_cast<int>(op->rows[0][0]);
  return Status();
}

struct Pending {
  std::vector<float> data;
  uint64_t handle = 0;
};

std::unique_ptr<Pending> Begin(Rank& rank, Verb verb, int peer, std::vector<float> data, int64_t tag = 0) {
  auto pending = std::make_unique<Pending>(Pending{std::move(data)});
  CHECK_OK(Start(rank, verb, peer, tag, pending->data.data(), pending->data.size(), false, &pending->handle));
  return pending;
}

std::vector<float> Numbers(size_t count, int seed) {
  std::vector<float> data(count);
  std::iota(data.begin(), data.end(), static_cast<float>(seed * 1000));
  return data;
}

// Those who leave at the end must not keep others from it.
void Barrier(Rank& rank) {
  std::vector<float> one(1);
  CHECK_OK(rank.Allreduce("the end", one));
}

TEST_CASE("messages of all sizes arrive") {
  for (const Config& config : Configs()) {
    for (const std::vector<int>& hosts : kHosts) {
      RunHosts(
          hosts,
          [](Rank& rank) {
            const int next = (rank.rank() + 1) % rank.size(),
                      last = (rank.rank() + rank.size() - 1) % rank.size();
            for (const size_t count : {0, 1, 1000, 1024, 1025, 5000, 20'000, 300'000}) {
              std::vector<float> got(count);
              auto sent = Begin(rank, Verb::kSend, next, Numbers(count, rank.rank()));
              int source = -1;
              CHECK_OK(Recv(rank, last, &got, 0, &source));
              CHECK(source == last);
              CHECK(FirstDifference(got, Numbers(count, last)) == "");
              CHECK_OK(rank.Wait(sent->handle));
            }
            Barrier(rank);
          },
          config);
    }
  }
}

TEST_CASE("blocking messages go to and fro") {
  for (const std::vector<int>& hosts : kHosts) {
    RunHosts(hosts, [](Rank& rank) {
      for (int i = 0; i < 300; ++i) {
        const size_t count = i % 10 == 0 ? 30'000 : 3;
        std::vector<float> data = Numbers(count, i);
        if (rank.rank() == 0) {
          CHECK_OK(Send(rank, 1, data));
          std::vector<float> back(count);
          CHECK_OK(Recv(rank, 1, &back));
          CHECK(back == data);
        } else if (rank.rank() == 1) {
          std::vector<float> got(count);
          CHECK_OK(Recv(rank, 0, &got));
          CHECK_OK(Send(rank, 0, got));
        }
      }
      Barrier(rank);
    });
  }
}

TEST_CASE("messages match by tag and do not overtake") {
  for (const Config& config : Configs()) {
    for (const std::vector<int>& hosts : kHosts) {
      RunHosts(
          hosts,
          [](Rank& rank) {
            constexpr int kMessages = 60;
            // Small and large ones take different ways.
            const auto size_of = [](int i) { return static_cast<size_t>(i % 3 == 0 ? 40'000 : i % 7); };
            std::vector<std::unique_ptr<Pending>> all;
            if (rank.rank() == 0) {
              for (int i = 0; i < kMessages; ++i) {
                all.push_back(Begin(rank, Verb::kSend, 1, Numbers(size_of(i), i), i % 2));
              }
            } else if (rank.rank() == 1) {
              for (const int64_t tag : {1, 0}) {
                for (int i = static_cast<int>(tag); i < kMessages; i += 2) {
                  std::vector<float> got(size_of(i));
                  CHECK_OK(Recv(rank, 0, &got, tag));
                  CHECK(FirstDifference(got, Numbers(size_of(i), i)) == "");
                }
              }
            }
            for (const auto& one : all) CHECK_OK(rank.Wait(one->handle));
            Barrier(rank);
          },
          config);
    }
  }
}

TEST_CASE("any source takes what comes first and says from whom") {
  for (const std::vector<int>& hosts : kHosts) {
    RunHosts(hosts, [](Rank& rank) {
      constexpr int kRounds = 20;
      if (rank.rank() != 0) {
        for (int i = 0; i < kRounds; ++i) {
          CHECK_OK(Send(rank, 0, Numbers(i % 2 == 0 ? 2 : 30'000, rank.rank() * 100 + i), i % 2));
        }
      } else {
        std::vector<std::array<int, 2>> seen(static_cast<size_t>(rank.size()));  // by source and tag
        for (int i = 0; i < kRounds * (rank.size() - 1); ++i) {
          const int tag = i % 2;
          std::vector<float> got(tag == 0 ? 2 : 30'000);
          int source = -1;
          CHECK_OK(Recv(rank, -1, &got, tag, &source));
          CHECK(source > 0);
          CHECK(source < rank.size());
          int& before = seen[static_cast<size_t>(source)][static_cast<size_t>(tag)];
          CHECK(FirstDifference(got, Numbers(got.size(), source * 100 + 2 * before + tag)) == "");
          ++before;
        }
        const std::array<int, 2> all = {kRounds / 2, kRounds / 2};
        for (int r = 1; r < rank.size(); ++r) CHECK(seen[static_cast<size_t>(r)] == all);
      }
      Barrier(rank);
    });
  }
}

TEST_CASE("what does not fit is an error at both ends and the world goes on") {
  for (const std::vector<int>& hosts : kHosts) {
    RunHosts(hosts, [](Rank& rank) {
      for (const size_t count : {3, 50'000}) {
        if (rank.rank() == 0) {
          const Status status = Send(rank, 1, Numbers(count, 1), 5);
          CHECK(status == (count == 3 ? Code::kOk : Code::kMismatch));
          if (count > 3) CHECK(status.message() == Contains("rank 1 receives 1 elements of float32"));
        } else if (rank.rank() == 1) {
          std::vector<float> got(1);
          const Status status = Recv(rank, 0, &got, 5);
          CHECK(status == Code::kMismatch);
          CHECK(status.message() ==
                Contains("rank 0 sent " + std::to_string(count) + " elements of float32 with tag 5"));
        }
        uint64_t handle = 0;
        std::vector<float> data = Numbers(8, 1);
        if (rank.rank() == 0) CHECK_OK(Send(rank, 1, data));
        if (rank.rank() != 1) continue;
        CHECK_OK(Start(rank, Verb::kRecv, 0, 0, data.data(), 8, true, &handle, DType::kInt32));
        CHECK(rank.Wait(handle) == Code::kMismatch);
      }
      Barrier(rank);
    });
  }
}

TEST_CASE("arguments that cannot work are refused") {
  RunHosts({0, 0}, [](Rank& rank) {
    float data = 0;
    uint64_t handle = 0;
    CHECK(Start(rank, Verb::kSend, 2, 0, &data, 1, true, &handle) == Code::kInvalidArgument);
    CHECK(Start(rank, Verb::kSend, -1, 0, &data, 1, true, &handle) == Code::kInvalidArgument);
    CHECK(Start(rank, Verb::kRecv, -2, 0, &data, 1, true, &handle) == Code::kInvalidArgument);
    CHECK(Start(rank, Verb::kRecv, 0, -1, &data, 1, true, &handle) == Code::kInvalidArgument);
  });
}

// More than may be on its way unreceived: the rest is offered, and stays where it is.
TEST_CASE("many messages wait for their receives") {
  for (const std::vector<int>& hosts : kHosts) {
    RunHosts(hosts, [](Rank& rank) {
      constexpr int kMessages = 6000;
      std::vector<std::unique_ptr<Pending>> all;
      if (rank.rank() == 0) {
        for (int i = 0; i < kMessages; ++i) all.push_back(Begin(rank, Verb::kSend, 1, Numbers(500, i)));
      }
      std::vector<float> one(1);
      CHECK_OK(rank.Allreduce("between", one));
      if (rank.rank() == 1) {
        for (int i = 0; i < kMessages; ++i) {
          std::vector<float> got(500);
          CHECK_OK(Recv(rank, 0, &got));
          CHECK(FirstDifference(got, Numbers(500, i)) == "");
        }
      }
      for (const auto& sent : all) CHECK_OK(rank.Wait(sent->handle));
      Barrier(rank);
    });
  }
}

TEST_CASE("a rank sends to itself") {
  for (const std::vector<int>& hosts : {std::vector<int>{0}, {0, 0}, {0, 1}}) {
    RunHosts(hosts, [](Rank& rank) {
      for (const size_t count : {0, 5, 1000, 100'000}) {
        auto sent = Begin(rank, Verb::kSend, rank.rank(), Numbers(count, 7));
        std::vector<float> got(count);
        CHECK_OK(Recv(rank, count == 5 ? -1 : rank.rank(), &got));
        CHECK(FirstDifference(got, Numbers(count, 7)) == "");
        CHECK_OK(rank.Wait(sent->handle));
      }
    });
  }
}

#if defined(__SANITIZE_THREAD__)
constexpr int kRounds = 5;  // it takes ten times as long
#else
constexpr int kRounds = 15;
#endif

// Everybody does everything at once, in orders of his own.
TEST_CASE("messages and operations of all cross") {
  for (const Config& config : Configs()) {
    for (const std::vector<int>& hosts : kHosts) {
      RunHosts(
          hosts,
          [](Rank& rank) {
            std::mt19937 random(static_cast<unsigned>(rank.rank()));
            for (int round = 0; round < kRounds; ++round) {
              struct Step {
                bool send;
                int peer;
                int64_t tag;
              };
              std::vector<Step> steps;
              for (int r = 0; r < rank.size(); ++r) {
                for (int64_t tag = 0; tag < 4; ++tag) {
                  steps.push_back({true, r, tag});
                  steps.push_back({false, r, tag});
                }
              }
              std::shuffle(steps.begin(), steps.end(), random);
              const auto size_of = [&](int from, int to, int64_t tag) {
                return static_cast<size_t>((from * 7919 + to * 104'729 + tag * 1299 + round * 31) % 40'000);
              };
              const auto seed_of = [&](int from, int to) { return from * 64 + to + round; };
              std::vector<std::pair<Step, std::unique_ptr<Pending>>> all;
              std::vector<float> ones(3000, 1.0f);
              uint64_t sum = 0;
              for (size_t i = 0; i < steps.size(); ++i) {
                if (i == steps.size() / 2) {
                  CHECK_OK(rank.Submit("sum" + std::to_string(round), ones, false, &sum));
                }
                const Step& step = steps[i];
                const int from = step.send ? rank.rank() : step.peer,
                          to = step.send ? step.peer : rank.rank();
                const size_t count = size_of(from, to, step.tag);
                std::vector<float> data =
                    step.send ? Numbers(count, seed_of(from, to)) : std::vector<float>(count);
                all.emplace_back(step, Begin(rank, step.send ? Verb::kSend : Verb::kRecv, step.peer,
                                             std::move(data), step.tag));
              }
              CHECK_OK(rank.Wait(sum));
              CHECK(FirstDifference(ones, std::vector<float>(3000, static_cast<float>(rank.size()))) == "");
              std::shuffle(all.begin(), all.end(), random);
              for (const auto& [step, pending] : all) {
                CHECK_OK(rank.Wait(pending->handle));
                const size_t count = size_of(step.peer, rank.rank(), step.tag);
                if (!step.send)
                  CHECK(FirstDifference(pending->data, Numbers(count, seed_of(step.peer, rank.rank()))) ==
                        "");
              }
            }
            Barrier(rank);
          },
          config);
    }
  }
}

TEST_CASE("threads of a rank wait for different things") {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, {0, 1}}) {
    RunHosts(hosts, [](Rank& rank) {
      const int other = 1 - rank.rank();
      std::vector<std::thread> threads;
      for (int64_t tag = 0; tag < 3; ++tag) {
        threads.emplace_back([&rank, other, tag] {
          for (int i = 0; i < 50; ++i) {
            const size_t count = i % 5 == 0 ? 9000 : 4;
            auto sent = Begin(rank, Verb::kSend, other, Numbers(count, i), tag);
            std::vector<float> got(count);
            CHECK_OK(Recv(rank, other, &got, tag));
            CHECK(FirstDifference(got, Numbers(count, i)) == "");
            CHECK_OK(rank.Wait(sent->handle));
          }
        });
      }
      for (int i = 0; i < 50; ++i) {
        std::vector<float> ones(100, 1.0f);
        CHECK_OK(rank.Allreduce("ones", ones));
        CHECK(ones[99] == 2.0f);
      }
      for (std::thread& thread : threads) thread.join();
      Barrier(rank);
    });
  }
}

// Nobody waits on the receiving side: its engine's thread does what is to be done.
TEST_CASE("messages move while their receiver computes") {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, {0, 1}}) {
    std::atomic<bool> sent = false;
    RunHosts(hosts, [&sent](Rank& rank) {
      if (rank.rank() == 0) {
        CHECK_OK(Send(rank, 1, Numbers(200'000, 3)));
        sent.store(true);
      } else {
        auto got = Begin(rank, Verb::kRecv, 0, std::vector<float>(200'000));
        while (!sent.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        CHECK_OK(rank.Wait(got->handle));
        CHECK(FirstDifference(got->data, Numbers(200'000, 3)) == "");
      }
      Barrier(rank);
    });
  }
}

TEST_CASE("what a rank sent before it left arrives") {
  for (const std::vector<int>& hosts : kHosts) {
    std::shared_ptr<LoopbackWorld> world;
    CHECK_OK(LoopbackWorld::Create(hosts, SmallConfig(), &world));
    std::atomic<bool> left = false;
    std::vector<std::thread> threads;
    for (int r = 0; r < world->size(); ++r) {
      threads.emplace_back([&, r] {
        Rank rank(r, world);
        if (r == 1) {
          for (int i = 0; i < 30; ++i) CHECK_OK(Send(rank, 0, Numbers(900, i)));
          rank.engine().Shutdown();
          left.store(true);
        } else if (r == 0) {
          while (!left.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          for (int i = 0; i < 30; ++i) {
            std::vector<float> got(900);
            CHECK_OK(Recv(rank, 1, &got));
            CHECK(FirstDifference(got, Numbers(900, i)) == "");
          }
          std::vector<float> none(1);
          const Status status = Recv(rank, 1, &none);
          CHECK(status == Code::kRankLeft);
          CHECK(status.message() == Contains("rank 1"));
          CHECK(Send(rank, 1, Numbers(50'000, 1)) == Code::kRankLeft);
          if (rank.size() > 2) {
            CHECK_OK(Recv(rank, 2, &none));
            CHECK(none[0] == 42.0f);
          }
        } else if (r == 2) {
          CHECK_OK(Send(rank, 0, {42.0f}));
          while (!left.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST_CASE("a rank that dies is named") {
  for (const std::vector<int>& hosts : kHosts) {
    std::shared_ptr<LoopbackWorld> world;
    CHECK_OK(LoopbackWorld::Create(hosts, SmallConfig(), &world));
    std::atomic<int> waiting = 0;
    std::vector<std::thread> threads;
    for (int r = 0; r < world->size(); ++r) {
      threads.emplace_back([&, r] {
        Rank rank(r, world);
        if (r == 1) {
          while (waiting.load() < world->size() - 1)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          world->Kill(1);
          return;
        }
        auto got = Begin(rank, Verb::kRecv, r == 0 ? 1 : -1, {0.0f});
        ++waiting;
        const Status status = rank.Wait(got->handle);
        CHECK(status == Code::kRankLost);
        CHECK(status.message() == Contains("rank 1"));
        CHECK(status.message() == Contains(r == 0 ? "recv 'rank 1, tag 0'" : "recv 'any rank, tag 0'"));
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST_CASE("leaving with messages on their way is an error for all") {
  std::latch met(2);
  RunHosts({0, 0}, [&](Rank& rank) {
    std::vector<float> data(100'000), together(1);
    CHECK_OK(rank.Allreduce("together", together));
    met.arrive_and_wait();  // who is still about to form the world would fail there
    if (rank.rank() == 0) {
      auto sent = Begin(rank, Verb::kSend, 1, data);
      CHECK(rank.engine().Pending() == 1);
      rank.engine().Shutdown();
      CHECK(rank.Wait(sent->handle) == Code::kShutDown);
    } else {
      std::vector<float> one(1);
      const Status status = rank.Allreduce("never", one);
      CHECK(status == Code::kRankLeft);
      CHECK(status.message() == Contains("'rank 1, tag 0'"));
    }
  });
}

}  // namespace
}  // namespace kolovod
