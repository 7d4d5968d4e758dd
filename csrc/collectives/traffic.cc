#include "collectives/traffic.h"

#include <algorithm>
#include <bit>

#include "collectives/balanced.h"
#include "collectives/reduce.h"

namespace kolovod {
namespace {

uint64_t Parts(uint64_t bytes, uint64_t portion_bytes) { return (bytes + portion_bytes - 1) / portion_bytes; }

uint64_t PartialRatio(const TrafficQuestion& q) {
  return SizeOf(AccumulatorOf(q.dtype, q.op)) / SizeOf(q.dtype);
}

Traffic Symmetric(uint64_t messages, uint64_t bytes) { return {messages, bytes, messages, bytes}; }

void AddSent(Traffic& traffic, uint64_t messages, uint64_t bytes) {
  traffic.sent_messages += messages;
  traffic.sent_bytes += bytes;
}
void AddReceived(Traffic& traffic, uint64_t messages, uint64_t bytes) {
  traffic.received_messages += messages;
  traffic.received_bytes += bytes;
}

// One member owns slice `member` of the range and sends it, reduced, to all others; theirs it sends in parts.
Traffic PairwiseTraffic(const TrafficQuestion& q, int member) {
  const auto others = static_cast<uint64_t>(q.ranks - 1);
  const Slice own_slice = SliceOf(q.bytes, q.ranks, member);
  const uint64_t own = own_slice.end - own_slice.begin;
  uint64_t rest_parts = 0;
  for (int m = 0; m < q.ranks; ++m) {
    const Slice slice = SliceOf(q.bytes, q.ranks, m);
    if (m != member) rest_parts += Parts(slice.end - slice.begin, q.portion_bytes);
  }
  return Symmetric(rest_parts + others * Parts(own, q.portion_bytes), q.bytes - own + others * own);
}

// All slices but one pass in each of the two rounds, the own one and the next respectively staying out.
Traffic RingTraffic(const TrafficQuestion& q, int member) {
  Traffic traffic;
  const auto part = [&](int m) {
    const Slice slice = SliceOf(q.bytes, q.ranks, (m + q.ranks) % q.ranks);
    return static_cast<uint64_t>(slice.end - slice.begin);
  };
  for (int hop = 0; hop + 1 < q.ranks; ++hop) {
    for (const uint64_t bytes : {part(member - hop), part(member + 1 - hop)}) {
      AddSent(traffic, Parts(bytes, q.portion_bytes), bytes);
    }
    for (const uint64_t bytes : {part(member - 1 - hop), part(member - hop)}) {
      AddReceived(traffic, Parts(bytes, q.portion_bytes), bytes);
    }
  }
  return traffic;
}

Traffic DoublingTraffic(const TrafficQuestion& q, int member) {
  const BalancedGroups groups(q.ranks);
  const int own = groups.GroupOf(member);
  const bool in_pair = groups.IsPair(own);
  Traffic traffic = in_pair ? Symmetric(1, q.bytes) : Traffic();
  for (int level = 0; level < groups.levels; ++level) {
    const bool to_pair = groups.IsPair(own ^ (1 << level));
    const bool raw = level == 0 && !in_pair && !to_pair;
    const uint64_t bytes = q.bytes * (raw ? 1 : PartialRatio(q));
    const uint64_t receivers = in_pair ? (to_pair || member % 2 == 0 ? 1 : 0) : (to_pair ? 2 : 1);
    AddSent(traffic, receivers, receivers * bytes);
    AddReceived(traffic, 1, bytes);
  }
  return traffic;
}

// Sent and received alike: in a pair a half of the range, then at every level a half of what remains; and the
// same amounts, as results, on the way back.
Traffic HalvingTraffic(const TrafficQuestion& q, int member) {
  const BalancedGroups groups(q.ranks);
  const int own = groups.GroupOf(member);
  const bool in_pair = groups.IsPair(own);
  uint64_t messages = 0, bytes = 0;
  uint64_t part = q.bytes;
  if (groups.pairs > 0) part /= 2;
  if (in_pair) {
    messages += Parts(part, q.portion_bytes) + 1;
    bytes += 2 * part;
  }
  const uint64_t swaps = groups.pairs > 0 && !in_pair ? 2 : 1;
  for (int level = 0; level < groups.levels; ++level) {
    const bool raw = level == 0 && !in_pair && !groups.IsPair(own ^ 1);
    part /= 2;
    messages += swaps * (Parts(part, q.portion_bytes) + 1);
    bytes += swaps * part * ((raw ? 1 : PartialRatio(q)) + 1);
  }
  return Symmetric(messages, bytes);
}

// Member 0 is the root.
Traffic BroadcastTraffic(Algorithm algorithm, const TrafficQuestion& q, int member) {
  uint64_t children = 0;
  if (algorithm == Algorithm::kChain) {
    children = member + 1 < q.ranks ? 1 : 0;
  } else {
    const int reach = member == 0 ? q.ranks : member & -member;  // members below it, itself among them
    for (int bit = 1; bit < reach; bit *= 2) children += member + bit < q.ranks ? 1 : 0;
  }
  const uint64_t parts = Parts(q.bytes, q.portion_bytes);
  const uint64_t parents = member == 0 ? 0 : 1;
  return {children * parts, children * q.bytes, parents * parts, parents * q.bytes};
}

}  // namespace

int Log2(int ranks) { return std::bit_width(static_cast<unsigned>(ranks - 1)); }

Traffic TrafficOf(Algorithm algorithm, const TrafficQuestion& q, int member) {
  const auto others = static_cast<uint64_t>(q.ranks - 1);
  if (q.verb == Verb::kBroadcast) {
    const bool relays = algorithm == Algorithm::kTree || algorithm == Algorithm::kChain;
    return relays ? BroadcastTraffic(algorithm, q, member) : Traffic();
  }
  if (q.verb != Verb::kAllreduce) return Traffic();
  switch (algorithm) {
    case Algorithm::kDirect:
      return Symmetric(others * Parts(q.bytes, q.portion_bytes), others * q.bytes);
    case Algorithm::kTree:
      return Symmetric(static_cast<uint64_t>(Log2(q.ranks)), others * q.bytes);
    case Algorithm::kPairwise:
      return PairwiseTraffic(q, member);
    case Algorithm::kRing:
      return RingTraffic(q, member);
    case Algorithm::kDoubling:
      return DoublingTraffic(q, member);
    case Algorithm::kHalving:
      return HalvingTraffic(q, member);
    default:
      return Traffic();
  }
}

int RoundsOf(Algorithm algorithm, Verb verb, int ranks) {
  switch (algorithm) {
    case Algorithm::kDirect:
      return 1;
    case Algorithm::kTree:
    case Algorithm::kDoubling:
      return Log2(ranks);
    case Algorithm::kPairwise:
      return verb == Verb::kAllreduce ? 2 : 1;
    case Algorithm::kHalving:
      return 2 * Log2(ranks);
    case Algorithm::kRing:
      return (verb == Verb::kAllreduce ? 2 : 1) * (ranks - 1);
    case Algorithm::kChain:
      return ranks - 1;
    default:
      return 0;
  }
}

}  // namespace kolovod
