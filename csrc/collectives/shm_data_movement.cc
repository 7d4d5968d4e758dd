// The verbs that only move bytes. Large ones are read from the memory of the rank that has them, if the
// system allows it (transport/peer_memory.h); the others go through staging, from where a reader copies whole
// chunks: large copies do not first read the lines that they overwrite.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>

#include "collectives/shm.h"

namespace kolovod {
namespace {

constexpr size_t kReadPiece = 4 << 20;  // between two looks at the revoke word
constexpr int kDeathPatienceMs = 1000;
constexpr size_t kBroadcastParts = 8;  // so many times as large as a part that is read

}  // namespace

// Whoever reads it does so from another core. Where cores share no cache, bypassing it takes a quarter of the
// time; where they share a large one, a third more: `streaming` is what trials have shown.
void ShmBackend::StageCopy(char* slot, const char* src, size_t bytes, bool streaming) {
  if (streaming && bytes >= kStreamedMove) {
    kernels_.copy_streaming(slot, src, bytes);
    kernels_.fence();
  } else {
    std::memcpy(slot, src, bytes);
  }
}

// A large result is out of the cache before it is used: stores that bypass the cache do not read each line
// that they overwrite. `total`: the bytes of the whole result. The caller fences before the result is given
// out.
void ShmBackend::TakeCopy(char* out, const char* from, size_t bytes, size_t total) {
  if (total >= kStreamedResult) {
    kernels_.copy_streaming(out, from, bytes);
  } else {
    std::memcpy(out, from, bytes);
  }
}

// Memory that the system lets nobody read (of a device, say) makes all ranks take the other way.
void ShmBackend::Offer(const void* in, size_t bytes) {
  peers_->Offer(in, bytes);
  Post({{&RankBlock::packed, ++chunk_}});
}

Status ShmBackend::AwaitOffers(bool* readable) {
  KV_RETURN_IF_ERROR(WaitForAll(&RankBlock::packed, chunk_));
  *readable = true;
  for (int r = 0; r < size_; ++r) *readable = *readable && peers_->Offered(r) != 0;
  return *readable ? Status() : FinishReading();  // nobody offers anew before all have seen it
}

Status ShmBackend::ReadPeer(int peer, size_t offset, char* to, size_t bytes) {
  const uint64_t address = peers_->Offered(peer) + offset;
  for (size_t at = 0; at < bytes; at += kReadPiece) {
    const int error = peers_->Read(peer, address + at, to + at, std::min(kReadPiece, bytes - at));
    if (error != 0) return ReadFailed(peer, error);
    if (waiter_.MustStop()) return waiter_.Stopped();
  }
  return Status();
}

// Most likely the peer has died, and will be found dead at once: that is the better reason.
Status ShmBackend::ReadFailed(int peer, int error) {
  for (int i = 0; i < kDeathPatienceMs && !waiter_.MustStop(); ++i) {
    KV_RETURN_IF_ERROR(waiter_.Periodic(/*in_bucket=*/true));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (waiter_.MustStop()) return waiter_.Stopped();
  segment_.Revoke(Code::kInternal, "rank " + std::to_string(rank_) +
                                       " of this host cannot read the memory of rank " +
                                       std::to_string(peer) + ": " + std::strerror(error) +
                                       "; KOLOVOD_PEER_READ_BYTES=0 does without");
  return segment_.RevokedStatus();
}

Status ShmBackend::CheckRead() { return waiter_.CheckPeers() ? segment_.RevokedStatus() : Status(); }

Status ShmBackend::FinishReading() {
  KV_RETURN_IF_ERROR(CheckRead());
  Post({{&RankBlock::done, chunk_}});
  return WaitForAll(&RankBlock::done, chunk_);
}

// One stages while the others copy, which takes no longer than to read its memory: only where ranks wait for
// a core one after another is much of it read.
Status ShmBackend::Broadcast(const Piece& piece, DType dtype, int root, const std::string&) {
  const size_t total = piece.count * SizeOf(dtype);
  const bool reads = size_ > 1 && crowded_ && Reads(total / kBroadcastParts);
  if (reads && rank_ == root) Offer(piece.in, total);
  if (size_ > 1 && !reads) return StagedBroadcast(piece, total, root);
  if (rank_ == root && piece.in != piece.out && total > 0) std::memcpy(piece.out, piece.in, total);
  if (size_ == 1) return Status();
  if (rank_ != root) KV_RETURN_IF_ERROR(WaitFor(root, &RankBlock::packed, ++chunk_));
  if (peers_->Offered(root) == 0) {
    KV_RETURN_IF_ERROR(FinishReading());  // all have seen it
    return StagedBroadcast(rank_ == root ? Piece{piece.out, piece.out, piece.count} : piece, total, root);
  }
  if (rank_ == root) return FinishReading();
  KV_RETURN_IF_ERROR(ReadPeer(root, 0, static_cast<char*>(piece.out), total));
  KV_RETURN_IF_ERROR(CheckRead());
  Post({{&RankBlock::done, chunk_}});
  return Status();
}

Status ShmBackend::StagedBroadcast(const Piece& piece, size_t total, int root) {
  StreamingTrial trial(moves_, (total + chunk_bytes_ - 1) / chunk_bytes_);
  for (size_t begin = 0; begin < total; begin += chunk_bytes_) {
    const uint64_t chunk = ++chunk_;
    const size_t bytes = std::min(chunk_bytes_, total - begin);
    char* out = static_cast<char*>(piece.out) + begin;
    if (rank_ == root) {
      KV_RETURN_IF_ERROR(WaitForSlot(chunk));
      const char* in = static_cast<const char*>(piece.in) + begin;
      StageCopy(segment_.staging(rank_, chunk), in, bytes, trial.Use(begin / chunk_bytes_));
      Post({{&RankBlock::packed, chunk}});
      if (out != in) TakeCopy(out, in, bytes, total);  // read just now
    } else {
      KV_RETURN_IF_ERROR(WaitFor(root, &RankBlock::packed, chunk));
      TakeCopy(out, segment_.staging(root, chunk), bytes, total);
    }
    Post({{&RankBlock::done, chunk}});
    trial.StepEnds(begin / chunk_bytes_);
  }
  kernels_.fence();
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
  char* own_out = out + at[static_cast<size_t>(rank_)];
  if (own == 0 || own_out == in) own_out = nullptr;
  if (size_ > 1 && longest > 0 && !Reads(longest)) return StagedAllgather(in, own_out, out, bytes, at);
  if (size_ > 1 && longest > 0) Offer(in, own);
  if (own_out != nullptr) TakeCopy(own_out, static_cast<const char*>(in), own, sum);
  kernels_.fence();
  if (size_ == 1 || longest == 0) return Status();
  bool readable = false;
  KV_RETURN_IF_ERROR(AwaitOffers(&readable));
  if (!readable) return StagedAllgather(in, nullptr, out, bytes, at);
  for (int distance = 1; distance < size_; ++distance) {
    const int peer = (rank_ + distance) % size_;
    const auto p = static_cast<size_t>(peer);
    KV_RETURN_IF_ERROR(ReadPeer(peer, 0, out + at[p], bytes[p]));
  }
  return FinishReading();
}

// `own_out`: where this rank's part goes, null if it is there.
Status ShmBackend::StagedAllgather(const void* in, char* own_out, char* out, const std::vector<size_t>& bytes,
                                   const std::vector<size_t>& at) {
  const size_t own = bytes[static_cast<size_t>(rank_)];
  const size_t longest = *std::max_element(bytes.begin(), bytes.end());
  const size_t total = at.back() + bytes.back();
  const size_t chunks = (longest + chunk_bytes_ - 1) / chunk_bytes_;
  const uint64_t first = chunk_ + 1;
  chunk_ += chunks;
  const auto part = [&](size_t c, size_t length) {
    return c * chunk_bytes_ < length ? std::min(chunk_bytes_, length - c * chunk_bytes_) : 0;
  };
  StreamingTrial trial(moves_, chunks);
  for (size_t step = 0; step < chunks + 1; ++step) {
    if (step < chunks) {
      KV_RETURN_IF_ERROR(WaitForSlot(first + step));
      const size_t n = part(step, own);
      const char* src = static_cast<const char*>(in) + step * chunk_bytes_;
      if (n > 0) StageCopy(segment_.staging(rank_, first + step), src, n, trial.Use(step));
      Post({{&RankBlock::packed, first + step}});
      if (n > 0 && own_out != nullptr)
        TakeCopy(own_out + step * chunk_bytes_, src, n, total);  // read just now
    }
    if (step == 0) continue;
    const size_t c = step - 1;
    for (int distance = 1; distance < size_; ++distance) {
      const int peer = (rank_ + distance) % size_;
      KV_RETURN_IF_ERROR(WaitFor(peer, &RankBlock::packed, first + c));
      const auto p = static_cast<size_t>(peer);
      const size_t n = part(c, bytes[p]);
      if (n > 0) TakeCopy(out + at[p] + c * chunk_bytes_, segment_.staging(peer, first + c), n, total);
    }
    Post({{&RankBlock::done, first + c}});
    trial.StepEnds(step);
  }
  kernels_.fence();
  return Status();
}

Status ShmBackend::Alltoall(const char* in, char* out, const Splits& rows, size_t row_bytes) {
  const auto size = static_cast<size_t>(size_);
  const auto self = static_cast<size_t>(rank_);
  const auto bytes = [&](size_t from, size_t to) {
    return static_cast<size_t>(rows.sent(static_cast<int>(from), static_cast<int>(to))) * row_bytes;
  };
  std::vector<size_t> in_at(size);   // of others' parts in the input
  std::vector<size_t> out_at(size);  // of others' parts in the output
  size_t given = 0;
  for (size_t r = 0, taken = 0; r < size; ++r) {
    in_at[r] = given;
    out_at[r] = taken;
    given += bytes(self, r);
    taken += bytes(r, self);
  }
  size_t longest = 0;  // that one rank has for another
  for (size_t s = 0; s < size; ++s) {
    for (size_t d = 0; d < size; ++d) longest = std::max(longest, s == d ? 0 : bytes(s, d));
  }
  const bool reads = longest > 0 && Reads(longest);
  if (reads) Offer(in, given);
  const size_t total = out_at.back() + bytes(size - 1, self);
  if (const size_t own = bytes(self, self); own > 0)
    TakeCopy(out + out_at[self], in + in_at[self], own, total);
  kernels_.fence();
  if (longest == 0) return Status();
  bool readable = false;
  if (reads) KV_RETURN_IF_ERROR(AwaitOffers(&readable));
  if (!readable) return StagedAlltoall(in, out, rows, row_bytes, in_at, out_at);
  for (size_t distance = 1; distance < size; ++distance) {
    const size_t peer = (self + distance) % size;
    size_t offset = 0;  // of the part for this rank in the peer's input
    for (size_t r = 0; r < self; ++r) offset += bytes(peer, r);
    const int from = static_cast<int>(peer);
    KV_RETURN_IF_ERROR(ReadPeer(from, offset, out + out_at[peer], bytes(peer, self)));
  }
  return FinishReading();
}

// Every rank stages what it has for others in one stream, beginning with its right neighbour's part, so that
// at any time the ranks read from different peers.
Status ShmBackend::StagedAlltoall(const char* in, char* out, const Splits& rows, size_t row_bytes,
                                  const std::vector<size_t>& in_at, const std::vector<size_t>& out_at) {
  const auto size = static_cast<size_t>(size_);
  const auto self = static_cast<size_t>(rank_);
  const auto bytes = [&](size_t from, size_t to) {
    return static_cast<size_t>(rows.sent(static_cast<int>(from), static_cast<int>(to))) * row_bytes;
  };
  // Where a rank's stream has the part for another, from its begin; [begin, begin + bytes(from, to)).
  const auto begin_of = [&](size_t from, size_t to) {
    size_t at = 0;
    for (size_t r = (from + 1) % size; r != to; r = (r + 1) % size) at += bytes(from, r);
    return at;
  };
  size_t longest = 0;
  std::vector<size_t> begins(size);  // of this rank's part in others' streams
  for (size_t r = 0; r < size; ++r) {
    longest = std::max(longest, begin_of(r, r));
    if (r != self) begins[r] = begin_of(r, self);
  }
  const size_t total = out_at.back() + bytes(size - 1, self);
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
  StreamingTrial trial(moves_, chunks);
  for (uint64_t step = 0; step < chunks + 1; ++step) {
    if (step < chunks) {
      KV_RETURN_IF_ERROR(WaitForSlot(first + step));
      char* slot = segment_.staging(rank_, first + step);
      size_t begin = 0;
      for (size_t r = (self + 1) % size; r != self; r = (r + 1) % size) {
        const size_t length = bytes(self, r);
        const Overlap part = overlap(step, begin, length);
        const char* src = in + in_at[r] + part.in_part;
        if (part.bytes > 0) StageCopy(slot + part.in_chunk, src, part.bytes, trial.Use(step));
        begin += length;
      }
      Post({{&RankBlock::packed, first + step}});
    }
    if (step == 0) continue;
    const uint64_t c = step - 1;
    for (size_t distance = 1; distance < size; ++distance) {
      const size_t r = (self + size - distance) % size;
      const Overlap part = overlap(c, begins[r], bytes(r, self));
      if (part.bytes == 0) continue;
      const int peer = static_cast<int>(r);
      KV_RETURN_IF_ERROR(WaitFor(peer, &RankBlock::packed, first + c));
      TakeCopy(out + out_at[r] + part.in_part, segment_.staging(peer, first + c) + part.in_chunk, part.bytes,
               total);
    }
    Post({{&RankBlock::done, first + c}});
    trial.StepEnds(step);
  }
  kernels_.fence();
  return Status();
}

}  // namespace kolovod
