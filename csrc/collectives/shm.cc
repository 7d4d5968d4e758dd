#include "collectives/shm.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "control/fusion.h"

namespace kolovod {

namespace {
// Below this, stores that bypass the cache cost more than the line transfers they save.
constexpr size_t kStreamingFloor = 32 << 10;
}  // namespace

ShmBackend::ShmBackend(Segment& segment, int rank, const Config& config, Waiter& waiter,
                       LoopbackFaults* faults, bool streaming)
    : segment_(segment),
      rank_(rank),
      size_(segment.layout().size),
      chunk_bytes_(segment.layout().chunk_bytes),
      one_shot_bytes_(OneShotLimit(config, segment.layout().size, segment.layout().chunk_bytes)),
      slots_(segment.layout().chunk_slots),
      waiter_(waiter),
      faults_(faults),
      kernels_(ActiveKernels()),
      chooser_(streaming) {}

size_t ShmBackend::OneShotLimit(const Config& config, int size, size_t chunk_bytes) {
  // One exchange moves (size-1)*bytes to each rank, two exchanges 2*(size-1)/size*bytes; measured
  // crossovers are in docs/decisions/0004-allreduce-on-one-host.md.
  size_t limit = 256 << 10;
  if (size > 2) limit = 64 << 10;
  if (size > 4) limit = 16 << 10;
  if (size > 16) limit = 4 << 10;
  if (config.one_shot_bytes > 0) limit = static_cast<size_t>(config.one_shot_bytes);
  return std::min(limit, chunk_bytes);
}

void ShmBackend::Post(Flag flag, uint64_t value) {
  if (faults_ != nullptr) {
    const int delay_us = faults_->delay_us[static_cast<size_t>(rank_)].load();
    if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  }
  (segment_.rank(rank_).*flag).store(value, std::memory_order_seq_cst);
  segment_.RingSleepers();
}

Status ShmBackend::WaitFor(int peer, Flag flag, uint64_t value) {
  RankBlock& block = segment_.rank(peer);
  const auto ready = [&] { return (block.*flag).load(std::memory_order_acquire) >= value; };
  const auto wake = [&] {
    // The peer has announced this operation, but no thread of it may be driving.
    if (block.driving.load(std::memory_order_seq_cst) == 0) segment_.RingIdle(peer);
  };
  return waiter_.Wait(ready, wake, /*in_bucket=*/true);
}

Status ShmBackend::WaitForAll(Flag flag, uint64_t value) {
  for (int step = 1; step < size_; ++step) {
    KV_RETURN_IF_ERROR(WaitFor((rank_ + step) % size_, flag, value));
  }
  return Status();
}

Status ShmBackend::WaitForSlot(uint64_t chunk) {
  return chunk > slots_ ? WaitForAll(&RankBlock::done, chunk - slots_) : Status();
}

ShmBackend::View ShmBackend::MakeView(const FusedRange& range) {
  View view{&range, {}, SizeOf(range.dtype), 0};
  view.offset.reserve(range.pieces.size());
  for (const Piece& piece : range.pieces) {
    view.offset.push_back(view.total);
    view.total += RoundUp(piece.count * view.item, kLine);
  }
  return view;
}

template <class Visit>
void ShmBackend::ForEachPart(const View& view, size_t begin, size_t end, Visit visit) {
  auto at = std::upper_bound(view.offset.begin(), view.offset.end(), begin);
  for (size_t i = static_cast<size_t>(at - view.offset.begin()) - 1; i < view.offset.size(); ++i) {
    const size_t piece_begin = view.offset[i];
    if (piece_begin >= end) break;
    const size_t from = std::max(begin, piece_begin);
    const size_t to = std::min(end, piece_begin + view.range->pieces[i].count * view.item);
    if (from < to) visit(i, from - piece_begin, from - begin, to - from);
  }
}

void ShmBackend::PackPart(const View& view, char* slot, size_t begin, size_t from, size_t to,
                          bool streaming) {
  ForEachPart(view, from, to, [&](size_t i, size_t in_piece, size_t in_part, size_t bytes) {
    const char* src = static_cast<const char*>(view.range->pieces[i].in) + in_piece;
    char* dst = slot + (from - begin) + in_part;
    if (view.range->prescale != 1.0) {
      kernels_.scale(view.range->dtype, view.range->prescale, src, dst, bytes / view.item);
    } else if (streaming) {
      kernels_.copy_streaming(dst, src, bytes);
    } else {
      std::memcpy(dst, src, bytes);
    }
  });
}

void ShmBackend::ReducePart(const View& view, uint64_t chunk, size_t begin, size_t from, size_t to,
                            bool publish, bool streaming) {
  const void* sources[kMaxSources];
  Reduction r;
  r.dtype = view.range->dtype;
  r.op = view.range->op;
  r.sources = sources;
  r.source_count = size_;
  r.scaled_source = rank_;
  r.prescale = view.range->prescale;
  r.scale = view.range->postscale;
  r.divisor = r.op == Op::kAverage ? size_ : 1;
  r.streaming = streaming;
  ForEachPart(view, from, to, [&](size_t i, size_t in_piece, size_t in_part, size_t bytes) {
    const Piece& piece = view.range->pieces[i];
    const size_t in_slot = from - begin + in_part;
    for (int s = 0; s < size_; ++s) sources[s] = segment_.staging(s, chunk) + in_slot;
    sources[rank_] = static_cast<const char*>(piece.in) + in_piece;
    r.out = static_cast<char*>(piece.out) + in_piece;
    r.copy = publish ? segment_.staging(rank_, chunk) + in_slot : nullptr;
    r.count = bytes / view.item;
    kernels_.reduce(r);
  });
}

void ShmBackend::StageCopy(char* slot, const char* src, size_t bytes) {
  if (chooser_.streaming() && bytes >= kStreamingFloor) {
    kernels_.copy_streaming(slot, src, bytes);
    StreamingFence();
  } else {
    std::memcpy(slot, src, bytes);
  }
}

void ShmBackend::ReduceAlone(const FusedRange& range) {
  for (const Piece& piece : range.pieces) {
    Reduction r;
    r.dtype = range.dtype;
    r.op = range.op;
    r.sources = &piece.in;
    r.source_count = 1;
    r.scaled_source = 0;
    r.prescale = range.prescale;
    r.scale = range.postscale;
    r.out = piece.out;
    r.count = piece.count;
    const bool identity = range.prescale == 1.0 && range.postscale == 1.0;
    if (!identity) {
      kernels_.reduce(r);
    } else if (piece.in != piece.out && piece.count > 0) {
      std::memcpy(piece.out, piece.in, piece.count * SizeOf(range.dtype));
    }
  }
}

Status ShmBackend::Allreduce(const FusedRange& range) {
  if (size_ == 1) {
    ReduceAlone(range);
    return Status();
  }
  const View view = MakeView(range);
  if (view.total == 0) return Status();
  return view.total <= one_shot_bytes_ ? OneShot(view) : TwoShot(view);
}

Status ShmBackend::OneShot(const View& view) {
  const uint64_t chunk = ++chunk_;
  KV_RETURN_IF_ERROR(WaitForSlot(chunk));
  const bool streaming = chooser_.streaming() && view.total >= kStreamingFloor;
  PackPart(view, segment_.staging(rank_, chunk), 0, 0, view.total, streaming);
  if (streaming) StreamingFence();
  Post(&RankBlock::packed, chunk);
  KV_RETURN_IF_ERROR(WaitForAll(&RankBlock::packed, chunk));
  ReducePart(view, chunk, 0, 0, view.total, /*publish=*/false, /*streaming=*/false);
  Post(&RankBlock::done, chunk);
  return Status();
}

Status ShmBackend::TwoShot(const View& view) {
  const ChunkPlan plan = PlanChunks(view.total, chunk_bytes_, size_);
  const uint64_t first = chunk_ + 1;
  chunk_ += plan.count;
  const auto length = [&](size_t c) { return std::min(plan.chunk_bytes, view.total - c * plan.chunk_bytes); };
  chooser_.BeginRange(plan.count);
  int64_t step_begin_ns = chooser_.trial() ? NowNs() : 0;
  for (size_t step = 0; step < plan.count + 2; ++step) {
    if (step < plan.count) {
      KV_RETURN_IF_ERROR(
          PackSlices(view, first + step, step * plan.chunk_bytes, length(step), chooser_.Use(step)));
    }
    if (const size_t c = step - 1; step >= 1 && c < plan.count) {
      KV_RETURN_IF_ERROR(ReduceSlice(view, first + c, c * plan.chunk_bytes, length(c), chooser_.Use(c)));
    }
    if (const size_t c = step - 2; step >= 2) {
      KV_RETURN_IF_ERROR(CopyOut(view, first + c, c * plan.chunk_bytes, length(c)));
    }
    if (chooser_.trial() && step < plan.count) {
      const int64_t now_ns = NowNs();
      chooser_.Record(step, now_ns - step_begin_ns);
      step_begin_ns = now_ns;
    }
  }
  chooser_.EndRange();
  return Status();
}

Status ShmBackend::PackSlices(const View& view, uint64_t chunk, size_t begin, size_t length, bool streaming) {
  KV_RETURN_IF_ERROR(WaitForSlot(chunk));
  const Slice own = SliceOf(length, size_, rank_);
  char* slot = segment_.staging(rank_, chunk);
  PackPart(view, slot, begin, begin, begin + own.begin, streaming);
  PackPart(view, slot, begin, begin + own.end, begin + length, streaming);
  if (streaming) StreamingFence();
  Post(&RankBlock::packed, chunk);
  return Status();
}

Status ShmBackend::ReduceSlice(const View& view, uint64_t chunk, size_t begin, size_t length,
                               bool streaming) {
  KV_RETURN_IF_ERROR(WaitForAll(&RankBlock::packed, chunk));
  const Slice own = SliceOf(length, size_, rank_);
  if (own.begin < own.end) {
    ReducePart(view, chunk, begin, begin + own.begin, begin + own.end, /*publish=*/true, streaming);
  }
  if (streaming) StreamingFence();
  Post(&RankBlock::reduced, chunk);
  return Status();
}

Status ShmBackend::CopyOut(const View& view, uint64_t chunk, size_t begin, size_t length) {
  for (int step = 1; step < size_; ++step) {
    const int owner = (rank_ + step) % size_;
    KV_RETURN_IF_ERROR(WaitFor(owner, &RankBlock::reduced, chunk));
    const Slice slice = SliceOf(length, size_, owner);
    const char* slot = segment_.staging(owner, chunk);
    ForEachPart(view, begin + slice.begin, begin + slice.end,
                [&](size_t i, size_t in_piece, size_t in_part, size_t bytes) {
                  std::memcpy(static_cast<char*>(view.range->pieces[i].out) + in_piece,
                              slot + slice.begin + in_part, bytes);
                });
  }
  Post(&RankBlock::done, chunk);
  return Status();
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
      Post(&RankBlock::packed, chunk);
    } else {
      KV_RETURN_IF_ERROR(WaitFor(root, &RankBlock::packed, chunk));
      std::memcpy(static_cast<char*>(piece.out) + begin, segment_.staging(root, chunk), bytes);
    }
    Post(&RankBlock::done, chunk);
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
  if (own > 0) std::memcpy(out + at[static_cast<size_t>(rank_)], in, own);
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
      Post(&RankBlock::packed, first + step);
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
    Post(&RankBlock::done, first + c);
  }
  return Status();
}

}  // namespace kolovod
