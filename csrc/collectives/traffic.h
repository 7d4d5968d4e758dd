// What the algorithms send, by formula: messages and bytes of one member. PURE. The model that chooses among
// them (select.h) computes with these, and traffic_test.cc holds every algorithm to them.
//
// S bytes among N members, in messages of at most B bytes; slices are exact where 64 * 2N divides S. Sources:
// R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19(1), 2005 (tree of data, doubling, halving, ring); E. Chan,
// M. Heimlich, A. Purkayastha, R. van de Geijn, "Collective communication: theory, practice, and experience",
// CCPE 19(13), 2007 (chain, binomial tree, the lower bounds).
//
//                messages                              bytes                      rounds
//   direct       (N-1) ceil(S/B)                       (N-1) S                    1
//   tree         ceil(log2 N)                          (N-1) S                    ceil(log2 N)
//   pairwise     2 (N-1) ceil(S/NB)                    2 (N-1)/N S                2
//   ring         2 (N-1) ceil(S/NB)                    2 (N-1)/N S                2 (N-1)
//   doubling     ceil(log2 N)                          ceil(log2 N) S             ceil(log2 N)
//   halving      about 2 ceil(log2 N)                  about 2 (N-1)/N S          2 ceil(log2 N)
//   broadcast, tree and chain: S to every child        S per child                ceil(log2 N); N-1
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace kolovod {

enum class Algorithm { kAuto, kDirect, kTree, kPairwise, kRing, kChain, kDoubling, kHalving };
inline constexpr int kAlgorithmCount = 8;

struct TrafficQuestion {
  Verb verb;     // allreduce or broadcast (whose root is member 0)
  size_t bytes;  // of the range
  int ranks;
  DType dtype = DType::kFloat32;  // with the op it says how large partial sums are
  Op op = Op::kSum;
  size_t portion_bytes = 256 << 10;
};

struct Traffic {
  uint64_t sent_messages = 0, sent_bytes = 0;
  uint64_t received_messages = 0, received_bytes = 0;
  bool operator==(const Traffic&) const = default;
};

// Of `member`; zero if the algorithm does not serve the verb.
Traffic TrafficOf(Algorithm algorithm, const TrafficQuestion& question, int member);
// Messages that must follow each other.
int RoundsOf(Algorithm algorithm, Verb verb, int ranks);
// ceil(log2(ranks)).
int Log2(int ranks);

}  // namespace kolovod
