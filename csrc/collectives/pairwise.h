// Allreduce among hosts with one owner per slice: every member sends each owner its part, the
// owner adds them in the order of members and sends the result to all. The bytes of a ring, two steps instead
// of 2(N-1), and a result that depends on nothing but the members.
//
//   to and from every peer, in this order:  part 0 | part 1 | result 0 | part 2 | result 1 | ...
//
// so that parts are on their way while those before are reduced.
#pragma once

#include <vector>

#include "collectives/combine.h"
#include "collectives/group.h"

namespace kolovod {

class Pairwise {
 public:
  // `owned[m]`: the slice that member m reduces; none overlap. `gathers`: everybody gets all results, else
  // each only its own. `portion_bytes`: of a slice, per step; a multiple of every dtype's size. `lead`: how
  // many steps' parts go out before the first result. All must outlive it.
  Pairwise(MeshGroup& group, PackedRange& range, const Combine& combine, std::vector<Slice> owned,
           bool gathers, size_t portion_bytes, size_t lead = 1);

  size_t ScratchBytes() const;
  // All steps. `scratch`: ScratchBytes().
  Status Run(char* scratch);

  // The steps one by one, for those who do something in between: each Contribute(k) once and in order, then
  // Reduce(k), not more than `lead` behind. All members in the same order.
  size_t steps() const { return steps_; }
  void Begin(char* scratch) { scratch_ = scratch; }
  Status Contribute(size_t step);
  Status Reduce(size_t step);
  // The results of all steps so far are here, and nothing of this rank's memory is needed any more.
  Status Collect();

  // For an allreduce: slices as alike as cache lines allow.
  static std::vector<Slice> EqualSlices(size_t total, int size);

 private:
  Slice Portion(int member, size_t step) const;
  // In scratch: what `member` has sent of step `step`, respectively what goes to it.
  char* Received(int member, size_t step) const;
  char* Packed(int member, size_t step) const;

  MeshGroup& group_;
  PackedRange& range_;
  const Combine combine_;
  const std::vector<Slice> owned_;
  const bool gathers_;
  const bool packs_;
  const size_t lead_;
  const size_t slots_;
  size_t portion_bytes_;
  size_t steps_ = 0;
  char* scratch_ = nullptr;
  std::vector<std::vector<uint64_t>> contributed_;  // by slot, by member: positions of what was received
  std::vector<std::vector<uint64_t>> packed_sent_;
  std::vector<uint64_t> sent_, gathered_;  // by member: positions of the last messages
};

}  // namespace kolovod
