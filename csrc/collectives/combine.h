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
#include "collectives/reduce.h"
#include "control/fusion.h"

namespace kolovod {

// A fused range as one run of bytes: where each piece begins in it, and what lies in a slice of it. Positions
// are bytes; slices are cut at multiples of every dtype's size.
class PackedRange {
 public:
  // The pieces follow each other, each at a multiple of `align` bytes. `range` must outlive this.
  explicit PackedRange(const FusedRange& range, size_t align = 1);
  // Piece i begins at begins[i] (ascending, without overlaps); the whole has `total` bytes.
  PackedRange(const FusedRange& range, std::vector<size_t> begins, size_t total);

  const FusedRange& range() const { return *range_; }
  size_t total() const { return total_; }
  // All of it is one tensor, so that no gathering is needed.
  bool single() const { return filled_ <= 1; }

  // Where the bytes of a slice lie in the tensors, for gathering and scattering.
  const std::vector<iovec>& Inputs(Slice slice);
  const std::vector<iovec>& Outputs(Slice slice);

  struct Part {
    const char* in;
    char* out;        // null where the range has no output
    size_t in_slice;  // byte offset within the slice, or from the cursor's origin
    size_t bytes;
  };

  // Goes through one slice or two in turn, part by part. A part lies in one tensor and, if cut_bytes is not
  // 0, between two multiples of it, counted from `origin`; so is Part::in_slice.
  class Cursor {
   public:
    Cursor() = default;  // nothing to do
    Cursor(const PackedRange& range, size_t origin, size_t cut_bytes, Slice first, Slice second = {0, 0})
        : packed_(&range), origin_(origin), cut_bytes_(cut_bytes), slices_{first, second} {
      Enter(0);
    }
    bool done() const { return slice_ == 2; }
    Part part() const {
      const Piece& piece = packed_->range_->pieces[index_];
      const size_t skip = at_ - packed_->begins_[index_];
      char* out = piece.out == nullptr ? nullptr : static_cast<char*>(piece.out) + skip;
      return Part{static_cast<const char*>(piece.in) + skip, out, at_ - origin_, edge_ - at_};
    }
    // Goes on by at most part().bytes.
    void Take(size_t bytes) {
      at_ += bytes;
      if (at_ == edge_) Settle();
    }

   private:
    void Enter(size_t slice);
    // Finds the part at at_, after skipping what lies between pieces, and finished slices.
    void Settle();

    const PackedRange* packed_ = nullptr;
    size_t origin_ = 0;
    size_t cut_bytes_ = 0;
    Slice slices_[2] = {};
    size_t slice_ = 2;
    size_t at_ = 0;
    size_t edge_ = 0;
    size_t index_ = 0;
  };

  // Calls visit(Part) for every stretch of the slice that lies in one tensor.
  template <class Visit>
  void ForEach(Slice slice, Visit visit) const {
    for (Cursor at(*this, slice.begin, 0, slice); !at.done(); at.Take(at.part().bytes)) visit(at.part());
  }

 private:
  size_t EndOf(size_t piece) const { return begins_[piece] + range_->pieces[piece].count * item_; }

  const FusedRange* range_;
  size_t item_;
  std::vector<size_t> begins_;  // by piece
  size_t filled_ = 0;           // pieces that are not empty
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
  // All of a Reduction but its memory.
  Reduction ToReduction() const;
};

// Reduces a slice into the outputs, in the order of `sources`: each the slice's bytes without gaps. Where a
// source is null the inputs themselves are read, and multiplied by prescale.
void ReduceSlice(const Combine& combine, const PackedRange& range, Slice slice,
                 std::span<const char* const> sources, const Kernels& kernels = ActiveKernels());
// Copies `bytes`, multiplied by prescale.
void CopyScaled(DType dtype, double prescale, const char* from, char* to, size_t bytes);
// Copies a slice of the inputs, multiplied by prescale, to `to`.
void PackSlice(const Combine& combine, const PackedRange& range, Slice slice, char* to);
// What remains of an allreduce among one rank: factors and the copy.
void ReduceAlone(const FusedRange& range, const Kernels& kernels = ActiveKernels());

// Integers whose sum must not wrap before it is divided are added in 64 bits (AccumulatorOf). An algorithm
// that sends partial sums in the tensor's own type cannot average them.
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
