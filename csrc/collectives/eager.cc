#include "collectives/eager.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "collectives/combine.h"

namespace kolovod {

char* EagerSlots::Claim(uint64_t tag) {
  uint64_t& until = in_use_until_[EagerIndexOf(tag)];
  if (until == kPending) return nullptr;
  if (executed_by_all_ < until) {
    executed_by_all_ = UINT64_MAX;
    for (int r = 0; r < segment_.layout().size; ++r) {
      executed_by_all_ =
          std::min(executed_by_all_, segment_.rank(r).executed.load(std::memory_order_acquire));
    }
    if (executed_by_all_ < until) return nullptr;
  }
  until = kPending;
  return At(rank_, tag).data;
}

std::optional<std::vector<const char*>> EagerSlots::Find(uint64_t tag, int root) const {
  std::vector<const char*> given(static_cast<size_t>(segment_.layout().size), nullptr);
  for (int r = 0; r < segment_.layout().size; ++r) {
    if (root >= 0 && r != root) continue;
    EagerSlot& slot = At(r, tag);
    if (slot.tag.load(std::memory_order_acquire) != tag) return std::nullopt;
    given[static_cast<size_t>(r)] = slot.data;
  }
  return given;
}

char* EagerBackend::Copy(const void* in, size_t count, DType dtype, double prescale, char* to) {
  const size_t bytes = count * SizeOf(dtype);
  CopyScaled(dtype, prescale, static_cast<const char*>(in), to, bytes);
  return to + PlaceBytes(bytes);
}

void EagerBackend::Reduce(const FusedRange& range, size_t begin, size_t count, void* out) const {
  if (count == 0) return;
  const auto size = static_cast<int>(given_.size());
  std::vector<const void*> sources;
  for (const char* from : given_) sources.push_back(from + begin * SizeOf(range.dtype));
  Exchange x;
  x.reduce = Combine::Of(range, size).ToReduction();
  x.reduce.sources = sources.data();
  x.reduce.source_count = size;
  x.reduce.out = out;
  x.reduce.count = count;
  ActiveKernels().exchange(x);
}

Status EagerBackend::Allreduce(const FusedRange& range) {
  for (const Piece& piece : range.pieces) {
    Reduce(range, 0, piece.count, piece.out);
    for (const char*& from : given_) from += PlaceBytes(piece.count * SizeOf(range.dtype));
  }
  return Status();
}

Status EagerBackend::Reducescatter(const FusedRange& range, const std::vector<size_t>& counts) {
  const auto self = counts.begin() + rank_;
  const Piece& piece = range.pieces.front();
  Reduce(range, std::accumulate(counts.begin(), self, size_t{0}), *self, piece.out);
  for (const char*& from : given_) from += PlaceBytes(piece.count * SizeOf(range.dtype));
  return Status();
}

Status EagerBackend::Broadcast(const Piece& piece, DType dtype, int root, const std::string&) {
  const char*& from = given_[static_cast<size_t>(root)];
  const size_t bytes = piece.count * SizeOf(dtype);
  const bool there = rank_ == root && piece.in == piece.out;
  if (bytes > 0 && !there) std::memcpy(piece.out, from, bytes);
  from += PlaceBytes(bytes);
  return Status();
}

Status EagerBackend::Allgather(const void*, char* out, const std::vector<size_t>& bytes) {
  for (size_t r = 0; r < bytes.size(); ++r) {
    if (bytes[r] > 0) std::memcpy(out, given_[r], bytes[r]);
    out += bytes[r];
    given_[r] += PlaceBytes(bytes[r]);
  }
  return Status();
}

// There is one tensor, so nothing follows.
Status EagerBackend::Alltoall(const char*, char* out, const Splits& rows, size_t row_bytes) {
  for (int r = 0; r < rows.size(); ++r) {
    size_t before = 0;
    for (int to = 0; to < rank_; ++to) before += static_cast<size_t>(rows.sent(r, to)) * row_bytes;
    const size_t n = static_cast<size_t>(rows.sent(r, rank_)) * row_bytes;
    if (n > 0) std::memcpy(out, given_[static_cast<size_t>(r)] + before, n);
    out += n;
  }
  return Status();
}

}  // namespace kolovod
