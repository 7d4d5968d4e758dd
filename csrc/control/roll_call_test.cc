#include "control/roll_call.h"

#include <atomic>
#include <thread>
#include <vector>

#include "testing/slots_world.h"

namespace kolovod {
namespace {

constexpr int kSize = 3;

struct World : testing::SlotsWorld<RollCall> {
  World() : SlotsWorld(kSize) {}
};

TEST_CASE("one appends once all have announced") {
  World world;
  const uint64_t tag = UnnamedTag(0, 1);
  world.ranks[0].Announce(tag, 5, {});
  CHECK(world.ranks[0].Look(tag) == RollCall::Seen::kSome);
  world.ranks[2].Announce(tag, 5, {});
  CHECK(world.ranks[2].Look(tag) == RollCall::Seen::kSome);
  world.ranks[1].Announce(tag, 5, {});
  for (RollCall& rank : world.ranks) {
    CHECK(rank.Look(tag) == RollCall::Seen::kAll);
    CHECK(rank.Agrees(tag));
  }
  CHECK(world.ranks[1].First(tag));
  CHECK(!world.ranks[0].First(tag));
  CHECK(!world.ranks[1].First(tag));
  CHECK(world.ranks[0].Look(tag + kEagerSlots) == RollCall::Seen::kSome);  // the next in that slot
}

// Who looks may be held up anywhere in between.
TEST_CASE("a rank that goes in full with a later number of the slot has not gone so with this one") {
  World world;
  constexpr uint64_t kRounds = 100'000;
  const auto tag_of = [](uint64_t round) { return UnnamedTag(0, 1 + 2 * round * kEagerSlots); };
  std::atomic<uint64_t> looking{0};  // the round, from 1 on
  std::thread ahead([&] {
    for (uint64_t round = 1; round <= kRounds; ++round) {
      while (looking.load() < round) {
      }
      world.ranks[1].Announce(tag_of(round), 5, {});
      world.ranks[1].InFull(tag_of(round) + kEagerSlots);
    }
  });
  uint64_t wrong = 0;
  for (uint64_t round = 1; round <= kRounds; ++round) {
    world.ranks[0].Announce(tag_of(round), 5, {});
    world.ranks[2].Announce(tag_of(round), 5, {});
    looking.store(round);
    RollCall::Seen seen = RollCall::Seen::kSome;
    while (seen != RollCall::Seen::kAll) {
      seen = world.ranks[0].Look(tag_of(round));
      wrong += seen == RollCall::Seen::kInFull;
    }
  }
  ahead.join();
  CHECK(wrong == 0);
}

TEST_CASE("what ranks may differ in is told") {
  World world;
  const uint64_t tag = UnnamedTag(0, 2);
  std::vector<std::vector<int64_t>> all;
  for (int64_t r = 0; r < kSize; ++r) {
    std::vector<int64_t>& own = all.emplace_back(kSlotRows);
    for (size_t i = 0; i < own.size(); ++i) own[i] = 100 * r + static_cast<int64_t>(i);
    world.ranks[static_cast<size_t>(r)].Announce(tag, 5, own);
  }
  for (const RollCall& rank : world.ranks) {
    CHECK(rank.Agrees(tag));
    CHECK(rank.Rows(tag, kSlotRows) == all);
  }
  CHECK(world.ranks[0].Rows(tag, 0) == std::vector<std::vector<int64_t>>(kSize));
}

TEST_CASE("what differs on any rank is seen") {
  for (int odd = 0; odd < kSize; ++odd) {
    World world;
    const uint64_t tag = UnnamedTag(3, 77);
    for (int r = 0; r < kSize; ++r) world.ranks[static_cast<size_t>(r)].Announce(tag, r == odd ? 6 : 5, {});
    for (const RollCall& rank : world.ranks) CHECK(!rank.Agrees(tag));
  }
}

TEST_CASE("a number that one announces in full is for nobodys slot") {
  World world;
  const uint64_t tag = UnnamedTag(0, 9), next = UnnamedTag(0, 9 + kEagerSlots);
  world.ranks[1].Announce(tag, 5, {});
  CHECK(world.ranks[0].Announced(1, tag));
  CHECK(!world.ranks[0].Announced(2, tag));
  world.ranks[2].InFull(tag);
  world.ranks[0].Announce(tag, 5, {});
  CHECK(world.ranks[0].Look(tag) == RollCall::Seen::kInFull);
  // Its slot's next number says so as well, and what is after that is open.
  CHECK(world.ranks[0].Look(next) == RollCall::Seen::kSome);
  world.ranks[2].InFull(next);
  world.ranks[2].InFull(tag);
  CHECK(world.ranks[0].Look(tag) == RollCall::Seen::kInFull);
  CHECK(world.ranks[0].Look(next) == RollCall::Seen::kInFull);
  // One that announced by the slot, and a later one in full, still stands for the first.
  world.ranks[1].InFull(next);
  CHECK(world.ranks[0].Announced(1, tag));
}

TEST_CASE("tags grow with joins") {
  CHECK(UnnamedTag(1, 1) > UnnamedTag(0, 1'000'000));
  CHECK(UnnamedTag(0, 2) > UnnamedTag(0, 1));
  CHECK(EagerIndexOf(UnnamedTag(4, 5)) == EagerIndexOf(UnnamedTag(4, 5 + kEagerSlots)));
}

// Either the one in full sees who announced by the slot, or that one sees it: whatever the order.
TEST_CASE("two that differ never miss each other") {
  World world;
  std::atomic<int> turn{0};
  std::vector<char> saw[2];
  constexpr int kRounds = 20'000;
  for (std::vector<char>& by : saw) by.assign(kRounds, 0);
  std::thread full([&] {
    for (int i = 0; i < kRounds; ++i) {
      const uint64_t tag = UnnamedTag(0, static_cast<uint64_t>(i) + 1);
      while (turn.load() < 2 * i) std::this_thread::yield();
      world.ranks[1].InFull(tag);
      saw[0][static_cast<size_t>(i)] = world.ranks[0].Announced(2, tag) ? 1 : 0;
      ++turn;
    }
  });
  for (int i = 0; i < kRounds; ++i) {
    const uint64_t tag = UnnamedTag(0, static_cast<uint64_t>(i) + 1);
    while (turn.load() < 2 * i) std::this_thread::yield();
    world.ranks[2].Announce(tag, 5, {});
    saw[1][static_cast<size_t>(i)] = world.ranks[2].Look(tag) == RollCall::Seen::kInFull ? 1 : 0;
    ++turn;
  }
  full.join();
  for (size_t i = 0; i < kRounds; ++i) CHECK(saw[0][i] + saw[1][i] > 0);
}

}  // namespace
}  // namespace kolovod
