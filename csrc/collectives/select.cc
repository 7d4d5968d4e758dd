#include "collectives/select.h"

#include <cmath>
#include <cstdio>

#include "collectives/combine.h"

namespace kolovod {
namespace {

constexpr const char* kNames[kAlgorithmCount] = {"auto", "direct", "tree", "pairwise", "ring", "chain"};

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
    case Verb::kBarrier:
    case Verb::kJoin:
      return false;
  }
  return false;
}

double Log2(int ranks) { return std::ceil(std::log2(ranks)); }

// Microseconds, by the model of a LinkCost.
double Estimate(Algorithm algorithm, const SelectQuestion& q, const LinkCost& cost) {
  const double others = q.ranks - 1;
  const double transfer_us = static_cast<double>(q.bytes) / cost.bytes_per_us;
  const double reduce_us = static_cast<double>(q.bytes) / cost.reduced_bytes_per_us;
  const double hop_us = cost.latency_us + cost.overhead_us;
  switch (algorithm) {
    case Algorithm::kDirect:
      return cost.latency_us + others * (cost.overhead_us + transfer_us) + reduce_us;
    case Algorithm::kTree:
      if (q.verb == Verb::kBroadcast) return Log2(q.ranks) * (hop_us + transfer_us);
      return Log2(q.ranks) * hop_us + others * transfer_us + reduce_us;
    case Algorithm::kPairwise:
      return 2 * cost.latency_us + 2 * others * cost.overhead_us + 2 * others / q.ranks * transfer_us +
             reduce_us / q.ranks;
    case Algorithm::kChain:
      return others * hop_us + transfer_us;
    default:
      return 0;
  }
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
  // The ring is not among them: its order of addition differs, and the same tensor must give the same bits
  // whatever bucket it travels in.
  constexpr Algorithm kReducing[] = {Algorithm::kDirect, Algorithm::kTree, Algorithm::kPairwise};
  constexpr Algorithm kRelaying[] = {Algorithm::kTree, Algorithm::kChain};
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
  if (q.verb == Verb::kBroadcast) {
    for (const Algorithm algorithm : kRelaying) consider(algorithm);
  } else {
    for (const Algorithm algorithm : kReducing) consider(algorithm);
  }
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

Choice Select(const SelectQuestion& question, Algorithm forced, const LinkCost& cost) {
  if (question.ranks <= 1) return {Algorithm::kAuto, "one rank: nothing to send"};
  if (forced == Algorithm::kAuto) return Automatic(question, cost);
  if (Serves(forced, question)) return {forced, std::string(NameOf(forced)) + " was asked for"};
  Choice choice = Automatic(question, cost);
  choice.reason = std::string(NameOf(forced)) + " was asked for but cannot do a" +
                  (question.verb == Verb::kAllreduce || question.verb == Verb::kAllgather ||
                           question.verb == Verb::kAlltoall
                       ? "n "
                       : " ") +
                  NameOf(question.verb) + " of " + NameOf(question.dtype) + " " + NameOf(question.op) + "; " +
                  choice.reason;
  return choice;
}

}  // namespace kolovod
