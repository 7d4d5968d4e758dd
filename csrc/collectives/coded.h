// Allreduce among hosts in fewer bytes: one owner per slice, as in pairwise.h, and what travels is encoded in
// blocks (codec.h).
//
//   every member   encodes its part for each owner, itself included, and sends it
//   the owner      decodes the parts and adds them in float32, in the order of members; divides and scales;
//                  encodes the sum, keeps what that decodes to, and sends it to all
//
// So an element is rounded twice, however many members there are, and all have the same bits. No partial sum
// is encoded again. The two-step quantized allreduce of ZeRO++ (arXiv 2306.10209) and EQuARX (arXiv
// 2506.17615).
#pragma once

#include <vector>

#include "collectives/codec.h"
#include "collectives/combine.h"
#include "collectives/group.h"

namespace kolovod {

// Those of `blocks` that member `index` of `members` has.
Slice BlocksOf(size_t blocks, int members, int index);

class CodedExchange {
 public:
  // `values`: floats that are reduced in place, `blocks` times kCodecBlock. `combine`: divisor and scale.
  // `scratch`: ScratchBytes(). All must outlive it.
  CodedExchange(MeshGroup& group, Codec codec, const Combine& combine, float* values, size_t blocks,
                char* scratch);

  static size_t ScratchBytes(Codec codec, size_t blocks, int members);

  // Each once, in this order, the same on all members. What is done between them is done while bytes are on
  // their way.
  Status Contribute();
  Status Reduce();
  // The results are here, and the scratch is not needed any more.
  Status Collect();

 private:
  size_t Encoded(size_t blocks) const { return blocks * EncodedBlockBytes(codec_); }
  Slice OwnedBy(int member) const { return BlocksOf(blocks_, group_.size(), member); }
  char* Received(int member) const;

  MeshGroup& group_;
  const Codec codec_;
  const Combine combine_;
  float* const values_;
  const size_t blocks_;
  char* const parts_;                                    // what this member sends, and its own part
  char* const results_;                                  // by owner
  char* const received_;                                 // parts of the others
  std::vector<uint64_t> contributed_, gathered_, sent_;  // by member: positions
};

}  // namespace kolovod
