#include "collectives/combine.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "collectives/reduce.h"

namespace kolovod {

PackedRange::PackedRange(const FusedRange& range) {
  const size_t item = SizeOf(range.dtype);
  pieces_.reserve(range.pieces.size());
  begins_.reserve(range.pieces.size());
  for (const Piece& piece : range.pieces) {
    if (piece.count == 0) continue;
    pieces_.push_back(piece);
    begins_.push_back(total_);
    total_ += piece.count * item;
  }
}

size_t PackedRange::Find(size_t position) const {
  return static_cast<size_t>(std::upper_bound(begins_.begin(), begins_.end(), position) - begins_.begin()) -
         1;
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

void ReduceSlice(const Combine& combine, const PackedRange& range, Slice slice,
                 std::span<const char* const> sources) {
  std::vector<const void*> at(sources.size());
  Exchange x;
  Reduction& r = x.reduce;
  r.dtype = combine.dtype;
  r.op = combine.op;
  r.prescale = combine.prescale;
  r.scale = combine.scale;
  r.divisor = combine.divisor;
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
    ActiveKernels().exchange(x);
  });
}

void PackSlice(const Combine& combine, const PackedRange& range, Slice slice, char* to) {
  range.ForEach(slice, [&](const PackedRange::Part& part) {
    if (combine.prescale == 1.0) {
      std::memcpy(to + part.in_slice, part.in, part.bytes);
      return;
    }
    Exchange x;
    x.reduce.dtype = combine.dtype;
    x.reduce.prescale = combine.prescale;
    x.pack_from = part.in;
    x.pack_to = to + part.in_slice;
    x.pack_bytes = part.bytes;
    ActiveKernels().exchange(x);
  });
}

void ReduceAlone(const FusedRange& range) {
  const bool identity = range.prescale == 1.0 && range.postscale == 1.0;
  const PackedRange view(range);
  const Slice all{0, view.total()};
  if (!identity) {
    const char* const own = nullptr;
    ReduceSlice(Combine::Of(range, 1), view, all, {&own, 1});
    return;
  }
  view.ForEach(all, [](const PackedRange::Part& part) {
    if (part.in != part.out) std::memcpy(part.out, part.in, part.bytes);
  });
}

bool NeedsOnePlace(DType dtype, Op op) {
  return dtype != DType::kInt64 && PartialOf(dtype, op) == DType::kInt64;
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
