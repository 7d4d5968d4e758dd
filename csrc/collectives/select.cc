#include "collectives/select.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <span>

#include "collectives/combine.h"

namespace kolovod {
namespace {

constexpr const char* kNames[kAlgorithmCount] = {"auto", "direct", "tree",     "pairwise",
                                                 "ring", "chain",  "doubling", "halving"};

bool Serves(Algorithm algorithm, const SelectQuestion& question) {
  switch (question.verb) {
    case Verb::kAllreduce:
      if (algorithm == Algorithm::kRing) return !NeedsOnePlace(question.dtype, question.op);
      return algorithm != Algorithm::kChain;
    case Verb::kBroadcast:
      return algorithm == Algorithm::kTree || algorithm == Algorithm::kChain;
    case Verb::kAllgather:
      return algorithm == Algorithm::kDirect || algorithm == Algorithm::kRing;
    case Verb::kAlltoall:
      return algorithm == Algorithm::kDirect;
    case Verb::kReducescatter:
      return algorithm == Algorithm::kPairwise;
    default:
      return false;
  }
}

// The part of an estimate that is the same for a byte and a gigabyte.
double FixedUs(Algorithm algorithm, Verb verb, int ranks, uint64_t messages, const LinkCost& cost) {
  return RoundsOf(algorithm, verb, ranks) * cost.latency_us +
         static_cast<double>(messages) * cost.overhead_us;
}

// How often a member adds up as much as the whole range.
double Additions(Algorithm algorithm, int ranks) {
  const double others = ranks - 1;
  switch (algorithm) {
    case Algorithm::kDirect:
    case Algorithm::kTree:
      return others;
    case Algorithm::kDoubling:
      return Log2(ranks);
    default:
      return others / ranks;
  }
}

// Microseconds, by the model of a LinkCost: those of the member that is busy longest. That is one of the
// ends: in a balanced tree the first is one of a pair if there are any, and the last alone.
double Estimate(Algorithm algorithm, const SelectQuestion& q, const LinkCost& cost) {
  const TrafficQuestion question{q.verb, q.bytes, q.ranks, q.dtype, q.op, q.portion_bytes};
  double longest_us = 0;
  for (const int member : {0, q.ranks - 1}) {
    const Traffic traffic = TrafficOf(algorithm, question, member);
    const uint64_t messages = std::max(traffic.sent_messages, traffic.received_messages);
    const uint64_t bytes = std::max(traffic.sent_bytes, traffic.received_bytes);
    longest_us = std::max(longest_us, FixedUs(algorithm, q.verb, q.ranks, messages, cost) +
                                          static_cast<double>(bytes) / cost.bytes_per_us);
  }
  if (q.verb != Verb::kAllreduce) return longest_us;
  return longest_us +
         Additions(algorithm, q.ranks) * static_cast<double>(q.bytes) / cost.reduced_bytes_per_us;
}

std::string Describe(const SelectQuestion& q, Algorithm algorithm, double best_us, Algorithm next,
                     double next_us) {
  char text[160];
  std::snprintf(text, sizeof(text),
                "%s of %zu bytes among %d ranks: %s is estimated at %.0f us, %s at %.0f us", NameOf(q.verb),
                q.bytes, q.ranks, NameOf(algorithm), best_us, NameOf(next), next_us);
  return text;
}

Choice Automatic(const SelectQuestion& q, const LinkCost& cost) {
  switch (q.verb) {
    case Verb::kAllgather:
    case Verb::kAlltoall:
      return {Algorithm::kDirect, "every part goes straight from its rank to those that want it"};
    case Verb::kReducescatter:
      return {Algorithm::kPairwise, "every part is added by the rank that keeps it"};
    case Verb::kBarrier:
    case Verb::kJoin:
      return {Algorithm::kAuto, "no bytes to move"};
    default:
      break;
  }
  // The ring is not among them: its order of addition is its own.
  constexpr Algorithm kInOrder[] = {Algorithm::kDirect, Algorithm::kTree, Algorithm::kPairwise};
  constexpr Algorithm kBalanced[] = {Algorithm::kDoubling, Algorithm::kHalving};
  constexpr Algorithm kRelaying[] = {Algorithm::kTree, Algorithm::kChain};
  std::span<const Algorithm> candidates = kInOrder;
  if (OrderOf(q.ranks) == Order::kBalanced) candidates = kBalanced;
  if (q.verb == Verb::kBroadcast) candidates = kRelaying;
  Algorithm best = Algorithm::kAuto, next = Algorithm::kAuto;
  double best_us = INFINITY, next_us = INFINITY;
  const auto consider = [&](Algorithm algorithm) {
    const double us = Estimate(algorithm, q, cost);
    if (us < best_us) {
      next = best;
      next_us = best_us;
      best = algorithm;
      best_us = us;
    } else if (us < next_us) {
      next = algorithm;
      next_us = us;
    }
  };
  for (const Algorithm algorithm : candidates) consider(algorithm);
  return {best, Describe(q, best, best_us, next, next_us)};
}

}  // namespace

const char* NameOf(Algorithm algorithm) { return kNames[static_cast<int>(algorithm)]; }

Status ParseAlgorithm(const std::string& name, Algorithm* out) {
  std::string known;
  for (int a = 0; a < kAlgorithmCount; ++a) {
    if (name == kNames[a]) {
      *out = static_cast<Algorithm>(a);
      return Status();
    }
    known += std::string(a == 0 ? "" : ", ") + kNames[a];
  }
  return Status(Code::kInvalidArgument, "algorithm '" + name + "' is not one of " + known);
}

namespace {

constexpr double kLongUs = 4000;  // from here on what was seen of a link's rate may be what we let it carry
constexpr double kMostOnTheWay = 63;

// By a link, on the way there and back.
double HeldBytes(const LinkCost& cost) {
  const double factor = cost.latency_us >= kLongUs ? 2 : 1;
  return cost.bytes_per_us * 2 * cost.latency_us * factor;
}

}  // namespace

size_t PortionBytes(const LinkCost& cost, size_t most_bytes) {
  constexpr double kPortionUs = 125;
  constexpr double kFastBytesPerUs = 250;
  constexpr size_t kLeastBytes = 4 << 10, kLeastFastBytes = 64 << 10;
  const auto bytes = static_cast<size_t>(std::clamp(cost.bytes_per_us * kPortionUs, 1.0, 1e12));
  const bool slow = cost.confirmed && cost.bytes_per_us < kFastBytesPerUs;
  const auto long_bytes = static_cast<size_t>(std::min(HeldBytes(cost) / kMostOnTheWay, 1e12));
  const size_t portion = std::max(std::bit_ceil(bytes), slow ? kLeastBytes : kLeastFastBytes);
  return std::min(std::max(portion, std::bit_ceil(long_bytes)), most_bytes);
}

size_t LeadOf(const LinkCost& cost, size_t portion_bytes, int peers) {
  constexpr double kTurnUs = 1000, kTurnBytes = 128 << 10;
  double held_bytes = HeldBytes(cost);
  if (peers == 1) held_bytes += std::min(cost.bytes_per_us * kTurnUs, kTurnBytes);
  const double step_bytes = static_cast<double>(portion_bytes) * std::max(peers, 1);
  return 1 + static_cast<size_t>(std::min(held_bytes / step_bytes, kMostOnTheWay));
}

size_t BlocksAhead(const LinkCost& cost, size_t block_bytes) {
  constexpr double kMost = 16;
  if (cost.latency_us < kLongUs) return 1;
  return static_cast<size_t>(
      std::clamp(std::ceil(HeldBytes(cost) / static_cast<double>(block_bytes)), 1.0, kMost));
}

int StripesOf(const LinkCost& cost) {
  constexpr double kEachBytes = 3 << 20, kMost = 8;
  if (cost.latency_us < kLongUs) return 1;
  return static_cast<int>(std::clamp(std::ceil(HeldBytes(cost) / kEachBytes), 1.0, kMost));
}

// The bytes of pairwise and halving are the same, to a hundredth: what does not depend on the size decides.
// The default cost, not a measured one, so that a world adds up alike tomorrow.
Order OrderOf(int ranks) {
  if (ranks <= 2) return Order::kRanks;
  const size_t bytes = 4 * kLine * static_cast<size_t>(ranks);  // any whose parts are one message each
  const TrafficQuestion question{Verb::kAllreduce, bytes,    ranks,
                                 DType::kFloat32,  Op::kSum, /*portion_bytes=*/bytes};
  const auto fixed_us = [&](Algorithm algorithm) {
    const uint64_t messages = TrafficOf(algorithm, question, ranks - 1).sent_messages;
    return FixedUs(algorithm, Verb::kAllreduce, ranks, messages, LinkCost());
  };
  return fixed_us(Algorithm::kHalving) < fixed_us(Algorithm::kPairwise) ? Order::kBalanced : Order::kRanks;
}

Choice Select(const SelectQuestion& question, Algorithm forced, const LinkCost& cost) {
  if (question.ranks <= 1) return {Algorithm::kAuto, "one rank: nothing to send"};
  if (forced == Algorithm::kAuto) return Automatic(question, cost);
  if (Serves(forced, question)) return {forced, std::string(NameOf(forced)) + " was asked for"};
  Choice choice = Automatic(question, cost);
  choice.reason = std::string(NameOf(forced)) + " was asked for but cannot do a" +
                  (NameOf(question.verb)[0] == 'a' ? "n " : " ") + NameOf(question.verb) + " of " +
                  NameOf(question.dtype) + " " + NameOf(question.op) + "; " + choice.reason;
  return choice;
}

}  // namespace kolovod
