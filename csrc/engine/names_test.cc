// Many names at once, a million in all: more announcements and answers than rings and caches hold.
#include <algorithm>
#include <numeric>
#include <random>

#include "testing/world.h"

namespace kolovod {
namespace {

using testing::Rank;
using testing::RunHosts;

// `rounds` of `names` tensors, submitted and awaited in an order of each rank's own.
void Storm(Rank& rank, int rounds, int names, bool same_names) {
  std::mt19937 random(static_cast<unsigned>(rank.rank()) + 1);
  std::vector<int> order(static_cast<size_t>(names));
  std::iota(order.begin(), order.end(), 0);
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::vector<float>> data(order.size(), std::vector<float>(1));
    std::vector<uint64_t> handles(order.size());
    std::shuffle(order.begin(), order.end(), random);
    for (const int t : order) {
      const auto i = static_cast<size_t>(t);
      data[i][0] = static_cast<float>(t % 1000 + rank.rank());
      const std::string name = same_names ? std::to_string(t) : std::to_string(round * names + t);
      CHECK_OK(rank.Submit(name, data[i], false, &handles[i]));
    }
    std::shuffle(order.begin(), order.end(), random);
    for (const int t : order) {
      const auto i = static_cast<size_t>(t);
      CHECK_OK(rank.Wait(handles[i]));
      CHECK(data[i][0] == static_cast<float>(t % 1000 * rank.size() + rank.size() * (rank.size() - 1) / 2));
    }
  }
}

const std::vector<std::vector<int>> kHosts = {{0, 0}, {0, 0, 0}, {0, 0, 0, 0}, {0, 1}, {0, 0, 1}, {0, 1, 2}};

#if defined(__SANITIZE_THREAD__)
constexpr int kShare = 4;  // it takes ten times as long
#else
constexpr int kShare = 1;
#endif

TEST_CASE("more answers than the ring holds") {
  Config config = testing::SmallConfig();
  for (const std::vector<int>& hosts : kHosts) {
    for (const int64_t capacity : {1, 2, 16, 20'000}) {
      config.cache_capacity = capacity;
      RunHosts(hosts, [](Rank& rank) { Storm(rank, 3, 12'000 / kShare, false); }, config);
      RunHosts(hosts, [](Rank& rank) { Storm(rank, 4, 6'000 / kShare, true); }, config);
    }
  }
}

// The same in little.
TEST_CASE("thousands of names") {
  Config config = testing::SmallConfig();
  config.cache_capacity = 2;
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0}, {0, 0, 1}}) {
    RunHosts(hosts, [](Rank& rank) { Storm(rank, 2, 6000 / kShare, true); }, config);
  }
}

// The answer repeats the name, so its frame is larger than the ring that it goes through.
TEST_CASE("an answer longer than its ring") {
  for (const int size : {1, 2, 3}) {
    RunHosts(std::vector<int>(static_cast<size_t>(size)), [](Rank& rank) {
      for (int i = 0; i < 4; ++i) {
        std::vector<float> data(1, 1.0f);
        CHECK_OK(rank.Allreduce(std::string(3 * kBroadcastRingBytes, 'n'), data));
        CHECK(data[0] == static_cast<float>(rank.size()));
      }
    });
  }
}

}  // namespace
}  // namespace kolovod
