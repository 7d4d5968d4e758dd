#include "collectives/select.h"

#include "testing/check.h"

namespace kolovod {

static doctest::String toString(Algorithm value) { return NameOf(value); }

namespace {

using testing::Contains;

struct Row {
  SelectQuestion question;
  Algorithm forced;
  Algorithm chosen;
  const char* reason;  // a part of it
};

constexpr Algorithm kAuto = Algorithm::kAuto;
constexpr DType kF32 = DType::kFloat32;

TEST_CASE("the table") {
  const Row rows[] = {
      {{Verb::kAllreduce, 4, 1}, kAuto, kAuto, "one rank"},
      // Small: everybody's data to everybody, among many by trees.
      {{Verb::kAllreduce, 4, 2}, kAuto, Algorithm::kDirect, "direct is estimated at 27 us"},
      {{Verb::kAllreduce, 4096, 8}, kAuto, Algorithm::kDirect, "among 8 ranks"},
      {{Verb::kAllreduce, 64, 85}, kAuto, Algorithm::kTree, "tree is estimated"},
      {{Verb::kAllreduce, 256 << 10, 2}, kAuto, Algorithm::kDirect, "direct is estimated"},
      // Large: an owner for every slice; among two ranks that saves no bytes, but half of the adding.
      {{Verb::kAllreduce, 1 << 20, 2}, kAuto, Algorithm::kPairwise, "pairwise is estimated"},
      {{Verb::kAllreduce, 1 << 20, 3}, kAuto, Algorithm::kPairwise, "allreduce of 1048576 bytes"},
      {{Verb::kAllreduce, 64 << 20, 64}, kAuto, Algorithm::kPairwise, "pairwise is estimated"},
      // More hosts than that: in a balanced order.
      {{Verb::kAllreduce, 4, 128}, kAuto, Algorithm::kDoubling, "doubling is estimated"},
      {{Verb::kAllreduce, 4, 1000}, kAuto, Algorithm::kDoubling, "halving at"},
      {{Verb::kAllreduce, 1 << 20, 128}, kAuto, Algorithm::kHalving, "doubling at"},
      {{Verb::kAllreduce, 64 << 20, 1000}, kAuto, Algorithm::kHalving, "halving is estimated"},
      {{Verb::kAllreduce, 64 << 20, 4}, Algorithm::kDoubling, Algorithm::kDoubling, "doubling was asked for"},
      {{Verb::kAllreduce, 4, 4, DType::kInt8, Op::kAverage},
       Algorithm::kHalving,
       Algorithm::kHalving,
       "halving was asked for"},
      {{Verb::kAllgather, 1 << 20, 8}, Algorithm::kHalving, Algorithm::kDirect, "cannot do an allgather of"},
      // What was asked for, where it can.
      {{Verb::kAllreduce, 4, 4}, Algorithm::kRing, Algorithm::kRing, "ring was asked for"},
      {{Verb::kAllreduce, 64 << 20, 4}, Algorithm::kTree, Algorithm::kTree, "tree was asked for"},
      {{Verb::kAllreduce, 64 << 20, 4}, Algorithm::kDirect, Algorithm::kDirect, "direct was asked for"},
      {{Verb::kAllreduce, 4, 4}, Algorithm::kPairwise, Algorithm::kPairwise, "pairwise was asked for"},
      {{Verb::kAllreduce, 1 << 20, 4, DType::kInt8, Op::kAverage},
       Algorithm::kRing,
       Algorithm::kPairwise,
       "ring was asked for but cannot do an allreduce of int8 Average; allreduce of"},
      {{Verb::kAllreduce, 1 << 20, 4, DType::kInt64, Op::kAverage},
       Algorithm::kRing,
       Algorithm::kRing,
       "ring was asked for"},
      {{Verb::kAllreduce, 4, 4}, Algorithm::kChain, Algorithm::kDirect, "chain was asked for but cannot"},
      {{Verb::kBroadcast, 4, 8}, kAuto, Algorithm::kTree, "broadcast of 4 bytes"},
      {{Verb::kBroadcast, 64 << 20, 8}, kAuto, Algorithm::kChain, "chain is estimated"},
      {{Verb::kBroadcast, 4, 8}, Algorithm::kChain, Algorithm::kChain, "chain was asked for"},
      {{Verb::kBroadcast, 64 << 20, 8}, Algorithm::kRing, Algorithm::kChain, "cannot do a broadcast of"},
      {{Verb::kAllgather, 1 << 20, 8}, kAuto, Algorithm::kDirect, "straight from its rank"},
      {{Verb::kAllgather, 1 << 20, 8}, Algorithm::kRing, Algorithm::kRing, "ring was asked for"},
      {{Verb::kAllgather, 1 << 20, 8}, Algorithm::kTree, Algorithm::kDirect, "cannot do an allgather of"},
      {{Verb::kAlltoall, 1 << 20, 8}, Algorithm::kRing, Algorithm::kDirect, "cannot do an alltoall of"},
      {{Verb::kReducescatter, 1 << 20, 8, kF32}, kAuto, Algorithm::kPairwise, "the rank that keeps it"},
      {{Verb::kReducescatter, 1 << 20, 8, kF32}, Algorithm::kRing, Algorithm::kPairwise, "cannot do a"},
      {{Verb::kBarrier, 0, 8}, kAuto, kAuto, "no bytes"},
  };
  for (const Row& row : rows) {
    const Choice choice = Select(row.question, row.forced);
    CAPTURE(row.question.verb);
    CAPTURE(row.question.bytes);
    CAPTURE(row.question.ranks);
    CAPTURE(choice.reason);
    CHECK(choice.algorithm == row.chosen);
    CHECK(choice.reason == Contains(row.reason));
  }
}

// Nothing is chosen whose order of addition differs: a tensor's bits may not depend on its bucket, nor on
// what the links are measured to be.
TEST_CASE("the number of ranks decides the order of addition alone") {
  for (int ranks = 2; ranks <= 4096; ++ranks) {
    const Order order = OrderOf(ranks);
    CHECK(order == (ranks < 89 ? Order::kRanks : Order::kBalanced));
    for (size_t bytes = 1; bytes <= size_t{1} << 34; bytes *= 16) {
      for (const LinkCost& cost : {LinkCost(), LinkCost{500, 10, 12, 8000}, LinkCost{2, 1, 10000, 8000}}) {
        const Algorithm chosen = Select({Verb::kAllreduce, bytes, ranks}, kAuto, cost).algorithm;
        const bool balanced = chosen == Algorithm::kDoubling || chosen == Algorithm::kHalving;
        CHECK(chosen != Algorithm::kRing);
        CHECK(balanced == (order == Order::kBalanced));
      }
    }
  }
}

TEST_CASE("the ring is never chosen") {
  for (const Verb verb : {Verb::kAllreduce, Verb::kBroadcast, Verb::kAllgather, Verb::kReducescatter}) {
    for (int ranks = 1; ranks <= 4096; ranks *= 2) {
      for (size_t bytes = 1; bytes <= size_t{1} << 34; bytes *= 4) {
        const Choice choice = Select({verb, bytes, ranks}, kAuto);
        CHECK(choice.algorithm != Algorithm::kRing);
        CHECK(!choice.reason.empty());
      }
    }
  }
}

TEST_CASE("slower links prefer fewer bytes") {
  const SelectQuestion question{Verb::kAllreduce, 32 << 10, 4};
  CHECK(Select(question, kAuto, LinkCost{25, 2, 10000, 8000}).algorithm == Algorithm::kDirect);
  CHECK(Select(question, kAuto, LinkCost{25, 2, 100, 8000}).algorithm == Algorithm::kPairwise);
}

TEST_CASE("portions suit the link") {
  constexpr size_t kMost = 256 << 10;
  CHECK(PortionBytes(LinkCost{25, 2, 12, 8000}, kMost) == 4 << 10);    // 100 Mbit/s
  CHECK(PortionBytes(LinkCost{25, 2, 119, 8000}, kMost) == 16 << 10);  // 1 Gbit/s
  CHECK(PortionBytes(LinkCost{25, 2, 2500, 8000}, kMost) == kMost);
  CHECK(PortionBytes(LinkCost{25, 2, 1e300, 8000}, 4096) == 4096);
  CHECK(PortionBytes(LinkCost{25, 2, 250, 8000}, kMost) == 64 << 10);        // 2 Gbit/s
  CHECK(PortionBytes(LinkCost{25, 2, 12, 8000, false}, kMost) == 64 << 10);  // or so somebody thinks
  CHECK(PortionBytes(LinkCost{25, 2, 2500, 8000, false}, kMost) == kMost);
  CHECK(PortionBytes(LinkCost{20'000, 2, 12, 8000}, kMost) == 16 << 10);  // no more messages than 63
  CHECK(PortionBytes(LinkCost{50'000, 2, 119, 8000}, kMost) == kMost);
}

TEST_CASE("ahead of the answer goes what the link holds") {
  CHECK(LeadOf(LinkCost{25, 2, 119, 8000}, 16 << 10, 2) == 1);
  CHECK(LeadOf(LinkCost{1000, 2, 12, 8000}, 4 << 10, 1) ==
        1 + 8);  // 24,000 bytes there and back, 12,000 in 1 ms
  CHECK(LeadOf(LinkCost{25, 2, 119, 8000}, 16 << 10, 1) == 1 + 7);
  CHECK(LeadOf(LinkCost{25, 2, 2500, 8000}, 256 << 10, 1) == 1);
  CHECK(LeadOf(LinkCost{1000, 2, 12, 8000}, 4 << 10, 3) == 1 + 1);
  CHECK(LeadOf(LinkCost{1e6, 2, 1e4, 8000}, 4 << 10, 1) == 64);  // memory is bounded
  CHECK(LeadOf(LinkCost(), 4 << 10, 0) == 31);
  CHECK(LeadOf(LinkCost(), 256 << 10, 0) == 1);
  CHECK(BlocksAhead(LinkCost{100, 2, 1e4, 8000}, 1) == 1);
  CHECK(BlocksAhead(LinkCost{20'000, 2, 12, 8000}, 256 << 10) == 4);
  CHECK(BlocksAhead(LinkCost{20'000, 2, 1, 8000}, 256 << 10) == 1);
  CHECK(BlocksAhead(LinkCost{1e6, 2, 1e4, 8000}, 256 << 10) == 16);
  // Over a long link twice as much, since its rate is learnt from what is sent.
  CHECK(LeadOf(LinkCost{20'000, 2, 12, 8000}, 16 << 10, 3) == 1 + 19);
}

TEST_CASE("long links that one connection cannot fill have several") {
  CHECK(StripesOf(LinkCost{25, 2, 12'500, 8000}) == 1);    // 100 Gbit/s beside each other
  CHECK(StripesOf(LinkCost{20'000, 2, 12.5, 8000}) == 1);  // 100 Mbit/s, 40 ms there and back
  CHECK(StripesOf(LinkCost{50'000, 2, 125, 8000}) == 8);   // 1 Gbit/s, 100 ms
  CHECK(StripesOf(LinkCost{10'000, 2, 125, 8000}) == 2);   // 1 Gbit/s, 20 ms
  CHECK(StripesOf(LinkCost{1e7, 2, 50'000, 8000}) == 8);
}

TEST_CASE("names") {
  for (int a = 0; a < kAlgorithmCount; ++a) {
    Algorithm parsed = Algorithm::kChain;
    CHECK_OK(ParseAlgorithm(NameOf(static_cast<Algorithm>(a)), &parsed));
    CHECK(parsed == static_cast<Algorithm>(a));
  }
  Algorithm parsed = kAuto;
  const Status status = ParseAlgorithm("Ring", &parsed);
  CHECK(status == Code::kInvalidArgument);
  CHECK(status.message() ==
        "algorithm 'Ring' is not one of auto, direct, tree, pairwise, ring, chain, doubling, "
        "halving");
}

}  // namespace
}  // namespace kolovod
