// Allreduce by a balanced tree over the members, for many hosts: about log2(N) steps instead of N-1 messages.
// The two algorithms add in the same order, which depends on nothing but the number of members: the first
// 2(N-P) of them in pairs, P being the largest power of two up to N, so that P groups remain; then group
// against group at distance 1, 2, 4, ..., the lower one first. Seven members (P = 4):
//
//   ((0+1) + (2+3)) + ((4+5) + 6)
//
// Doubling: every member of a group has the whole sum of all that were added so far. Halving: it has a part
// of it, and the parts are collected in the end; the bytes of a ring. Recursive doubling, and Rabenseifner's
// recursive vector halving and distance doubling: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
// Collective Communication Operations in MPICH", IJHPCA 19(1), 2005. Where N is no power of two they let the
// second of every pair rest; here it works on (docs/design/allreduce.md): each of a pair on a half of the
// range.
//
// Partial sums travel in the type in which they are accumulated (AccumulatorOf), and are rounded once.
#pragma once

#include <vector>

#include "collectives/combine.h"
#include "collectives/group.h"

namespace kolovod {

// Which members form a group. PURE.
struct BalancedGroups {
  explicit BalancedGroups(int members);
  int GroupOf(int member) const { return member < 2 * pairs ? member / 2 : member - pairs; }
  bool IsPair(int group) const { return group < pairs; }
  // The only member of a group, or the `half`-th of a pair.
  int Member(int group, int half) const { return IsPair(group) ? 2 * group + half : group + pairs; }
  int groups;  // P, a power of two
  int pairs;   // N - P
  int levels;  // log2(P)
};

Status DoublingAllreduce(MeshGroup& group, PackedRange& range, const Combine& combine, Scratch& scratch);

// Parts are received in portions, each added while the next is on its way.
Status HalvingAllreduce(MeshGroup& group, PackedRange& range, const Combine& combine, size_t portion_bytes,
                        Scratch& scratch);

}  // namespace kolovod
