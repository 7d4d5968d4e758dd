#include "collectives/combine.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "collectives/reduce.h"

namespace kolovod {

PackedRange::PackedRange(const FusedRange& range, size_t align) : range_(&range), item_(SizeOf(range.dtype)) {
  begins_.reserve(range.pieces.size());
  for (const Piece& piece : range.pieces) {
    begins_.push_back(total_);
    total_ += RoundUp(piece.count * item_, align);
    if (piece.count > 0) ++filled_;
  }
}

PackedRange::PackedRange(const FusedRange& range, std::vector<size_t> begins, size_t total)
    : range_(&range),
      item_(SizeOf(range.dtype)),
      begins_(std::move(begins)),
      filled_(begins_.size()),
      total_(total) {}

void PackedRange::Cursor::Enter(size_t slice) {
  while (slice < 2 && slices_[slice].begin >= slices_[slice].end) ++slice;
  slice_ = slice;
  if (slice_ == 2) return;
  at_ = slices_[slice_].begin;
  const std::vector<size_t>& begins = packed_->begins_;
  index_ = static_cast<size_t>(std::upper_bound(begins.begin(), begins.end(), at_) - begins.begin()) - 1;
  Settle();
}

void PackedRange::Cursor::Settle() {
  const std::vector<size_t>& begins = packed_->begins_;
  const size_t slice_end = slices_[slice_].end;
  while (at_ < slice_end && at_ >= packed_->EndOf(index_)) {
    at_ = ++index_ < begins.size() ? begins[index_] : slice_end;
  }
  if (at_ >= slice_end) return Enter(slice_ + 1);
  edge_ = std::min(slice_end, packed_->EndOf(index_));
  if (cut_bytes_ > 0) edge_ = std::min(edge_, origin_ + ((at_ - origin_) / cut_bytes_ + 1) * cut_bytes_);
}

const std::vector<iovec>& PackedRange::Inputs(Slice slice) {
  parts_.clear();
  ForEach(slice, [&](const Part& part) { parts_.push_back({const_cast<char*>(part.in), part.bytes}); });
  return parts_;
}

const std::vector<iovec>& PackedRange::Outputs(Slice slice) {
  parts_.clear();
  ForEach(slice, [&](const Part& part) { parts_.push_back({part.out, part.bytes}); });
  return parts_;
}

Reduction Combine::ToReduction() const {
  Reduction r;
  r.dtype = dtype;
  r.op = op;
  r.prescale = prescale;
  r.scale = scale;
  r.divisor = divisor;
  return r;
}

void ReduceSlice(const Combine& combine, const PackedRange& range, Slice slice,
                 std::span<const char* const> sources, const Kernels& kernels) {
  std::vector<const void*> at(sources.size());
  Exchange x;
  Reduction& r = x.reduce = combine.ToReduction();
  r.sources = at.data();
  r.source_count = static_cast<int>(sources.size());
  for (size_t s = 0; s < sources.size(); ++s) {
    if (sources[s] == nullptr) r.own_source = static_cast<int>(s);
  }
  range.ForEach(slice, [&](const PackedRange::Part& part) {
    for (size_t s = 0; s < sources.size(); ++s) {
      at[s] = sources[s] == nullptr ? part.in : sources[s] + part.in_slice;
    }
    r.out = part.out;
    r.count = part.bytes / SizeOf(combine.dtype);
    kernels.exchange(x);
  });
}

void CopyScaled(DType dtype, double prescale, const char* from, char* to, size_t bytes) {
  if (bytes == 0) return;
  if (prescale == 1.0) {
    if (from != to) std::memcpy(to, from, bytes);
    return;
  }
  Exchange x;
  x.reduce.dtype = dtype;
  x.reduce.prescale = prescale;
  x.pack_from = from;
  x.pack_to = to;
  x.pack_bytes = bytes;
  ActiveKernels().exchange(x);
}

void PackSlice(const Combine& combine, const PackedRange& range, Slice slice, char* to) {
  range.ForEach(slice, [&](const PackedRange::Part& part) {
    CopyScaled(combine.dtype, combine.prescale, part.in, to + part.in_slice, part.bytes);
  });
}

void ReduceAlone(const FusedRange& range, const Kernels& kernels) {
  const PackedRange view(range);
  const Slice all{0, view.total()};
  if (range.prescale != 1.0 || range.postscale != 1.0) {
    const char* const own = nullptr;
    return ReduceSlice(Combine::Of(range, 1), view, all, {&own, 1}, kernels);
  }
  view.ForEach(all, [](const PackedRange::Part& part) {
    if (part.in != part.out) std::memcpy(part.out, part.in, part.bytes);
  });
}

bool NeedsOnePlace(DType dtype, Op op) {
  return dtype != DType::kInt64 && AccumulatorOf(dtype, op) == DType::kInt64;
}

Status Scratch::Reserve(size_t bytes) {
  if (bytes <= bytes_) return Status();
  bytes = RoundUp(bytes, 4096);
  data_.reset(static_cast<char*>(std::aligned_alloc(kLine, bytes)));
  bytes_ = data_ == nullptr ? 0 : bytes;
  if (data_ != nullptr) return Status();
  return Status(Code::kInternal,
                "no memory for " + std::to_string(bytes) + " bytes of a collective's scratch");
}

}  // namespace kolovod
