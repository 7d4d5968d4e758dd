// A fused range as one run of bytes without gaps, and the reduction of slices of it: what the algorithms
// between hosts share.
#pragma once

#include <sys/uio.h>

#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "collectives/backend.h"
#include "control/fusion.h"

namespace kolovod {

// The pieces one behind the other. Positions are bytes; slices are cut at multiples of every dtype's size.
class PackedRange {
 public:
  // `range` must outlive it.
  explicit PackedRange(const FusedRange& range);

  size_t total() const { return total_; }
  // All of it is one tensor, so that no gathering is needed.
  bool single() const { return pieces_.size() <= 1; }

  // Where the bytes of a slice lie in the tensors, for gathering and scattering.
  const std::vector<iovec>& Inputs(Slice slice);
  const std::vector<iovec>& Outputs(Slice slice);

  struct Part {
    const char* in;
    char* out;        // null where the range has no output
    size_t in_slice;  // byte offset within the slice
    size_t bytes;
  };
  // Calls visit(Part) for every stretch of the slice that lies in one tensor.
  template <class Visit>
  void ForEach(Slice slice, Visit visit) const {
    if (slice.begin >= slice.end) return;
    for (size_t i = Find(slice.begin); i < pieces_.size() && begins_[i] < slice.end; ++i) {
      const size_t begin = std::max(slice.begin, begins_[i]);
      const size_t end = std::min(slice.end, i + 1 < pieces_.size() ? begins_[i + 1] : total_);
      const size_t skip = begin - begins_[i];
      char* out = pieces_[i].out == nullptr ? nullptr : static_cast<char*>(pieces_[i].out) + skip;
      visit(Part{static_cast<const char*>(pieces_[i].in) + skip, out, begin - slice.begin, end - begin});
    }
  }

 private:
  size_t Find(size_t position) const;

  std::vector<Piece> pieces_;   // those that are not empty
  std::vector<size_t> begins_;  // by piece
  size_t total_ = 0;
  std::vector<iovec> parts_;
};

// What is done with the members' data.
struct Combine {
  DType dtype;
  Op op;
  double prescale;  // of a member's own tensor, before it is sent or added
  double scale;     // of the result
  int divisor;      // of the result: how many ranks an Average is over, else 1

  static Combine Of(const FusedRange& range, int ranks) {
    return Combine{range.dtype, range.op, range.prescale, range.postscale,
                   range.op == Op::kAverage ? ranks : 1};
  }
};

// Reduces a slice into the outputs, in the order of `sources`: each the slice's bytes without gaps. Where a
// source is null the inputs themselves are read, and multiplied by prescale.
void ReduceSlice(const Combine& combine, const PackedRange& range, Slice slice,
                 std::span<const char* const> sources);
// Copies a slice of the inputs, multiplied by prescale, to `to`.
void PackSlice(const Combine& combine, const PackedRange& range, Slice slice, char* to);
// What remains of an allreduce among one rank: factors and the copy.
void ReduceAlone(const FusedRange& range);

// Integers whose sum must not wrap before it is divided are added in 64 bits (PartialOf). An algorithm that
// sends partial sums in the tensor's own type cannot average them.
bool NeedsOnePlace(DType dtype, Op op);

// Memory that is used again.
class Scratch {
 public:
  // At least `bytes`, aligned to cache lines; what was in it is lost. kInternal without memory.
  Status Reserve(size_t bytes);
  char* data() { return data_.get(); }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> data_;
  size_t bytes_ = 0;
};

}  // namespace kolovod
