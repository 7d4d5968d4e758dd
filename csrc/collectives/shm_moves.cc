// The verbs that only move bytes. A reader copies whole chunks: large copies do not first read the lines
// that they overwrite.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "collectives/shm.h"

namespace kolovod {

void ShmBackend::StageCopy(char* slot, const char* src, size_t bytes) {
  if (chooser_.streaming() && bytes >= kStreamingFloor) {
    kernels_.copy_streaming(slot, src, bytes);
    StreamingFence();
  } else {
    std::memcpy(slot, src, bytes);
  }
}

Status ShmBackend::Broadcast(const Piece& piece, DType dtype, int root, const std::string&) {
  const size_t total = piece.count * SizeOf(dtype);
  if (rank_ == root && piece.in != piece.out && total > 0) std::memcpy(piece.out, piece.in, total);
  if (size_ == 1) return Status();
  for (size_t begin = 0; begin < total; begin += chunk_bytes_) {
    const uint64_t chunk = ++chunk_;
    const size_t bytes = std::min(chunk_bytes_, total - begin);
    if (rank_ == root) {
      KV_RETURN_IF_ERROR(WaitForSlot(chunk));
      StageCopy(segment_.staging(rank_, chunk), static_cast<const char*>(piece.in) + begin, bytes);
      Post({{&RankBlock::packed, chunk}});
    } else {
      KV_RETURN_IF_ERROR(WaitFor(root, &RankBlock::packed, chunk));
      std::memcpy(static_cast<char*>(piece.out) + begin, segment_.staging(root, chunk), bytes);
    }
    Post({{&RankBlock::done, chunk}});
  }
  return Status();
}

Status ShmBackend::Allgather(const void* in, char* out, const std::vector<size_t>& bytes) {
  std::vector<size_t> at(bytes.size());
  size_t longest = 0;
  size_t sum = 0;
  for (size_t r = 0; r < bytes.size(); ++r) {
    at[r] = sum;
    sum += bytes[r];
    longest = std::max(longest, bytes[r]);
  }
  const size_t own = bytes[static_cast<size_t>(rank_)];
  char* const own_out = out + at[static_cast<size_t>(rank_)];
  if (own > 0 && own_out != in) std::memcpy(own_out, in, own);
  if (size_ == 1 || longest == 0) return Status();
  const size_t chunks = (longest + chunk_bytes_ - 1) / chunk_bytes_;
  const uint64_t first = chunk_ + 1;
  chunk_ += chunks;
  const auto part = [&](size_t c, size_t total) {
    return c * chunk_bytes_ < total ? std::min(chunk_bytes_, total - c * chunk_bytes_) : 0;
  };
  for (size_t step = 0; step < chunks + 1; ++step) {
    if (step < chunks) {
      KV_RETURN_IF_ERROR(WaitForSlot(first + step));
      const size_t n = part(step, own);
      const char* src = static_cast<const char*>(in) + step * chunk_bytes_;
      if (n > 0) StageCopy(segment_.staging(rank_, first + step), src, n);
      Post({{&RankBlock::packed, first + step}});
    }
    if (step == 0) continue;
    const size_t c = step - 1;
    for (int distance = 1; distance < size_; ++distance) {
      const int peer = (rank_ + distance) % size_;
      KV_RETURN_IF_ERROR(WaitFor(peer, &RankBlock::packed, first + c));
      const auto p = static_cast<size_t>(peer);
      const size_t n = part(c, bytes[p]);
      if (n > 0) std::memcpy(out + at[p] + c * chunk_bytes_, segment_.staging(peer, first + c), n);
    }
    Post({{&RankBlock::done, first + c}});
  }
  return Status();
}

// Every rank stages what it has for others in one stream, beginning with its right neighbour's part, so that
// at any time the ranks read from different peers.
Status ShmBackend::Alltoall(const char* in, char* out, const std::vector<size_t>& bytes) {
  const auto size = static_cast<size_t>(size_);
  const auto self = static_cast<size_t>(rank_);
  // Where a rank's stream has the part for another, from its begin; [begin, begin + bytes[from][to]).
  const auto begin_of = [&](size_t from, size_t to) {
    size_t at = 0;
    for (size_t r = (from + 1) % size; r != to; r = (r + 1) % size) at += bytes[from * size + r];
    return at;
  };
  size_t longest = 0;
  std::vector<size_t> begins(size);  // of this rank's part in others' streams
  std::vector<size_t> in_at(size);   // of others' parts in the input
  std::vector<size_t> out_at(size);  // of others' parts in the output
  for (size_t r = 0, to = 0, from = 0; r < size; ++r) {
    longest = std::max(longest, begin_of(r, r));
    if (r != self) begins[r] = begin_of(r, self);
    in_at[r] = to;
    out_at[r] = from;
    to += bytes[self * size + r];
    from += bytes[r * size + self];
  }
  if (const size_t own = bytes[self * size + self]; own > 0)
    std::memcpy(out + out_at[self], in + in_at[self], own);
  if (size_ == 1 || longest == 0) return Status();
  const uint64_t chunks = (longest + chunk_bytes_ - 1) / chunk_bytes_;
  const uint64_t first = chunk_ + 1;
  chunk_ += chunks;
  // What of [begin, begin + length) lies in chunk c.
  struct Overlap {
    size_t in_part, in_chunk, bytes;
  };
  const auto overlap = [&](uint64_t c, size_t begin, size_t length) {
    const size_t low = std::max<size_t>(begin, c * chunk_bytes_);
    const size_t high = std::min<size_t>(begin + length, (c + 1) * chunk_bytes_);
    return low < high ? Overlap{low - begin, low - c * chunk_bytes_, high - low} : Overlap{0, 0, 0};
  };
  for (uint64_t step = 0; step < chunks + 1; ++step) {
    if (step < chunks) {
      KV_RETURN_IF_ERROR(WaitForSlot(first + step));
      char* slot = segment_.staging(rank_, first + step);
      size_t begin = 0;
      for (size_t r = (self + 1) % size; r != self; r = (r + 1) % size) {
        const size_t length = bytes[self * size + r];
        const Overlap part = overlap(step, begin, length);
        if (part.bytes > 0) StageCopy(slot + part.in_chunk, in + in_at[r] + part.in_part, part.bytes);
        begin += length;
      }
      Post({{&RankBlock::packed, first + step}});
    }
    if (step == 0) continue;
    const uint64_t c = step - 1;
    for (size_t distance = 1; distance < size; ++distance) {
      const size_t r = (self + size - distance) % size;
      const Overlap part = overlap(c, begins[r], bytes[r * size + self]);
      if (part.bytes == 0) continue;
      const int peer = static_cast<int>(r);
      KV_RETURN_IF_ERROR(WaitFor(peer, &RankBlock::packed, first + c));
      std::memcpy(out + out_at[r] + part.in_part, segment_.staging(peer, first + c) + part.in_chunk,
                  part.bytes);
    }
    Post({{&RankBlock::done, first + c}});
  }
  return Status();
}

}  // namespace kolovod
