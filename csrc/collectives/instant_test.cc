#include "collectives/instant.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "testing/slots_world.h"
#include "transport/waiter.h"

namespace kolovod {
namespace {

constexpr int64_t kLong = 600'000'000'000;  // longer than a test may take
const auto kNever = [] { return false; };

struct World : testing::SlotsWorld<InstantSlots> {
  explicit World(int size) : SlotsWorld(size) {}
  InstantSlots& at(int rank) { return ranks[static_cast<size_t>(rank)]; }
};

TEST_CASE("one that all announce alike is met, and what they gave is there") {
  World world(3);
  for (int round = 0; round < 40; ++round) {
    uint64_t tag = 0;
    for (int r = 0; r < 3; ++r) {
      tag = world.at(r).Begin(0);
      CHECK(tag == static_cast<uint64_t>(round + 1));
      world.at(r).Own(tag).data[0] = static_cast<char>(round + r);
      world.at(r).Announce(tag, 7);
    }
    for (int r = 0; r < 3; ++r) {
      CHECK(world.at(r).Meet(tag, kLong, kNever));
      for (int s = 0; s < 3; ++s) CHECK(world.at(r).Of(s, tag).data[0] == static_cast<char>(round + s));
      world.at(r).End(tag, true);
    }
  }
}

TEST_CASE("what is announced unlike goes by the log on all ranks") {
  World world(2);
  world.at(0).Announce(world.at(0).Begin(0), 7);
  world.at(1).Announce(world.at(1).Begin(0), 9);
  for (int r = 0; r < 2; ++r) {
    CHECK(!world.at(r).Meet(1, kLong, kNever));
    world.at(r).End(1, false);
    CHECK(world.at(r).Begin(1) == 2);  // it is over there, and counted once
  }
}

TEST_CASE("who waits too long withdraws it, and who comes later sees that") {
  World world(3);
  for (int r : {0, 1}) world.at(r).Announce(world.at(r).Begin(0), 7);
  CHECK(!world.at(0).Meet(1, 0, kNever));
  CHECK(!world.at(1).Meet(1, kLong, kNever));
  world.at(2).Announce(world.at(2).Begin(0), 7);
  CHECK(!world.at(2).Meet(1, kLong, kNever));
}

// All have announced it, and somebody has proposed to withdraw it: only he knows whether he saw that.
TEST_CASE("who sees a withdrawal waits until it is known whether it holds") {
  for (const bool holds : {true, false}) {
    World world(2);
    for (int r : {0, 1}) world.at(r).Announce(world.at(r).Begin(0), 7);
    std::atomic<uint64_t>& word = world.segment->header().withdrawn[1];
    word.store(1 << 2 | 1);  // proposed
    int looks = 0;
    const auto over = [&] {
      if (++looks == 3) word.store(1 << 2 | (holds ? 2 : 3));
      return false;
    };
    CHECK(world.at(0).Meet(1, kLong, over) == !holds);
    CHECK(looks == 3);
  }
}

TEST_CASE("who waits for a rank that is elsewhere does not wait for its patience to end") {
  World world(2);
  world.segment->rank(1).pending.store(1);
  world.at(0).Announce(world.at(0).Begin(0), 7);
  CHECK(!world.at(0).Meet(1, kLong, kNever));
}

TEST_CASE("who has counted more than others is followed") {
  World world(2);
  for (uint64_t i = 0; i < kInstantSlots; ++i) {
    const uint64_t low = world.at(0).Begin(i), high = world.at(1).Begin(i + 5);  // five that 0 has not seen
    CHECK(high == low + 5);
    world.at(0).Announce(low, 7);
    world.at(1).Announce(high, 7);
    CHECK(!world.at(0).Meet(low, 0, kNever));
    CHECK(!world.at(1).Meet(high, 0, kNever));
    world.at(0).End(low, false);
    world.at(1).End(high, false);
  }
  CHECK(world.at(0).Begin(kInstantSlots) == kInstantSlots + 6);
  CHECK(world.at(1).Begin(kInstantSlots + 5) == kInstantSlots + 6);
}

TEST_CASE("a slot is used again when all are past what was in it") {
  World world(2);
  for (uint64_t tag = 1; tag <= kInstantSlots; ++tag) {
    CHECK(world.at(0).Begin(0) == tag);
    world.at(0).Announce(tag, 7);
    world.at(0).End(tag, true);
  }
  CHECK(world.at(0).Begin(0) == 0);  // rank 1 may be reading the first
  world.at(1).Announce(world.at(1).Begin(0), 7);
  CHECK(world.at(1).Meet(1, kLong, kNever));
  world.at(1).End(1, true);
  CHECK(world.at(0).Begin(0) == kInstantSlots + 1);
}

// Ranks that lose patience at once, or soon, or are late: each round goes one way on all, with its own data.
// In some all have patience for ever.
TEST_CASE("all ranks go the same way") {
#if defined(__SANITIZE_THREAD__)
  constexpr int kRounds = 2'000;
#else
  constexpr int kRounds = 20'000;
#endif
  constexpr int kPatientEvery = 100;
  for (int size : {2, 3}) {
    World world(size);
    std::vector<std::vector<char>> met(static_cast<size_t>(size), std::vector<char>(kRounds, 2));
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    std::atomic<int> arrived{0};
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        std::mt19937 random(static_cast<unsigned>(r) + 1);
        uint64_t by_log = 0;
        for (int round = 0; round < kRounds; ++round) {
          for (unsigned spin = random() % 400; spin > 0; --spin) CpuRelax();
          const uint64_t tag = world.at(r).Begin(by_log);
          bool all = false;
          if (tag != 0) {
            const uint64_t value = static_cast<uint64_t>(round) * 10 + static_cast<uint64_t>(r);
            world.at(r).Own(tag).rows[0] = static_cast<int64_t>(value);
            world.at(r).Announce(tag, static_cast<uint64_t>(round) | 1);
            const int64_t patience_ns = round % kPatientEvery == 0 ? kLong : random() % 3 == 0 ? 0 : 2'000;
            all = world.at(r).Meet(tag, patience_ns, kNever);
            for (int s = 0; all && s < size; ++s) {
              wrong += world.at(r).Of(s, tag).rows[0] == round * 10 + s ? 0 : 1;
            }
            world.at(r).End(tag, all);
          }
          met[static_cast<size_t>(r)][static_cast<size_t>(round)] = all ? 1 : 0;
          if (all) continue;
          // By the log: nobody passes before all have come.
          const int end = (arrived.fetch_add(1) / size + 1) * size;
          while (arrived.load() < end) std::this_thread::yield();
          ++by_log;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    for (const std::vector<char>& one : met) CHECK(one == met.front());
    for (int round = 0; round < kRounds; round += kPatientEvery) {
      CHECK(met.front()[static_cast<size_t>(round)] == 1);
    }
    CHECK(std::count(met.front().begin(), met.front().end(), 1) < kRounds);
  }
}

}  // namespace
}  // namespace kolovod
