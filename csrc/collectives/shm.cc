#include "collectives/shm.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

namespace kolovod {

namespace {
// Below this, stores that bypass the cache cost more than the line transfers they save.
constexpr size_t kStreamingFloor = 32 << 10;
// Bytes of each task that a step handles in turn, once a range is so long that it streams from main
// memory. Shorter ranges are in some cache, where one large copy per task is faster.
constexpr size_t kStride = 1 << 10;
constexpr size_t kInterleavedChunks = 64;
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

void ShmBackend::Post(std::initializer_list<std::pair<Flag, uint64_t>> flags) {
  if (faults_ != nullptr) {
    const int delay_us = faults_->delay_us[static_cast<size_t>(rank_)].load();
    if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  }
  RankBlock& self = segment_.rank(rank_);
  for (const auto& [flag, value] : flags) (self.*flag).store(value, std::memory_order_seq_cst);
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

// Walks over one or two spans of a chunk, in parts that cross neither a tensor's nor a slice's edge.
class ShmBackend::Walk {
 public:
  Walk() = default;  // nothing to do
  // The chunk is [begin, begin + length) of the view's range; spans are relative to it. Own slice only, or
  // (`others`) the rest, beginning behind the own slice so that ranks do not all read from the same peer.
  Walk(const View& view, uint64_t chunk, size_t begin, size_t length, int size, int rank, bool others)
      : view_(&view),
        chunk_(chunk),
        begin_(begin),
        slice_bytes_(std::max(SliceOf(length, size, 0).end, kLine)) {
    const Slice own = SliceOf(length, size, rank);
    if (others) {
      spans_[0] = Slice{own.end, length};
      spans_[1] = Slice{0, own.begin};
    } else {
      spans_[0] = own;
    }
    Enter(0);
  }

  bool done() const { return span_ == 2; }
  const View& view() const { return *view_; }
  uint64_t chunk() const { return chunk_; }
  int owner(size_t in_chunk) const { return static_cast<int>(in_chunk / slice_bytes_); }

  // visit(piece, byte offset within it, byte offset within the chunk, bytes), up to `limit` bytes in all.
  template <class Visit>
  void Advance(size_t limit, Visit visit) {
    while (limit > 0 && span_ < 2) {
      const Piece& piece = view_->range->pieces[index_];
      const size_t piece_begin = view_->offset[index_];
      const size_t in_chunk = at_ - begin_;
      const size_t slice_end = begin_ + (in_chunk / slice_bytes_ + 1) * slice_bytes_;
      const size_t edge =
          std::min({begin_ + spans_[span_].end, slice_end, piece_begin + piece.count * view_->item});
      const size_t to = edge > at_ && limit < edge - at_ ? at_ + limit : edge;
      if (at_ < to) {
        visit(piece, at_ - piece_begin, in_chunk, to - at_);
        limit -= to - at_;
        at_ = to;
      }
      if (at_ >= begin_ + spans_[span_].end) {
        Enter(span_ + 1);
      } else if (at_ >= piece_begin + piece.count * view_->item) {
        // Over the padding to the next tensor.
        at_ = ++index_ < view_->offset.size() ? view_->offset[index_] : SIZE_MAX;
        if (at_ >= begin_ + spans_[span_].end) Enter(span_ + 1);
      }
    }
  }

 private:
  void Enter(size_t span) {
    while (span < 2 && spans_[span].begin >= spans_[span].end) ++span;
    span_ = span;
    if (span_ == 2) return;
    at_ = begin_ + spans_[span_].begin;
    const auto next = std::upper_bound(view_->offset.begin(), view_->offset.end(), at_);
    index_ = static_cast<size_t>(next - view_->offset.begin()) - 1;
  }

  const View* view_ = nullptr;
  uint64_t chunk_ = 0;
  size_t begin_ = 0;
  size_t slice_bytes_ = kLine;
  Slice spans_[2] = {};
  size_t span_ = 2;
  size_t at_ = 0;
  size_t index_ = 0;
};

void ShmBackend::Pack(Walk& walk, size_t limit, bool streaming) {
  if (walk.done()) return;
  const FusedRange& range = *walk.view().range;
  char* slot = segment_.staging(rank_, walk.chunk());
  walk.Advance(limit, [&](const Piece& piece, size_t in_piece, size_t in_chunk, size_t bytes) {
    const char* src = static_cast<const char*>(piece.in) + in_piece;
    if (range.prescale != 1.0) {
      kernels_.scale(range.dtype, range.prescale, src, slot + in_chunk, bytes / SizeOf(range.dtype));
    } else if (streaming) {
      kernels_.copy_streaming(slot + in_chunk, src, bytes);
    } else {
      std::memcpy(slot + in_chunk, src, bytes);
    }
  });
}

void ShmBackend::Reduce(Walk& walk, size_t limit, bool publish, bool streaming) {
  if (walk.done()) return;
  const FusedRange& range = *walk.view().range;
  const void* sources[kMaxSources];
  Reduction r;
  r.dtype = range.dtype;
  r.op = range.op;
  r.sources = sources;
  r.source_count = size_;
  r.scaled_source = rank_;
  r.prescale = range.prescale;
  r.scale = range.postscale;
  r.divisor = r.op == Op::kAverage ? size_ : 1;
  r.streaming = streaming;
  walk.Advance(limit, [&](const Piece& piece, size_t in_piece, size_t in_chunk, size_t bytes) {
    for (int s = 0; s < size_; ++s) sources[s] = segment_.staging(s, walk.chunk()) + in_chunk;
    sources[rank_] = static_cast<const char*>(piece.in) + in_piece;
    r.out = static_cast<char*>(piece.out) + in_piece;
    r.copy = publish ? segment_.staging(rank_, walk.chunk()) + in_chunk : nullptr;
    r.count = bytes / SizeOf(range.dtype);
    kernels_.reduce(r);
  });
}

void ShmBackend::CopyOut(Walk& walk, size_t limit) {
  walk.Advance(limit, [&](const Piece& piece, size_t in_piece, size_t in_chunk, size_t bytes) {
    std::memcpy(static_cast<char*>(piece.out) + in_piece,
                segment_.staging(walk.owner(in_chunk), walk.chunk()) + in_chunk, bytes);
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
  // One slice, which is everybody's own: all of the range.
  Walk pack(view, chunk, 0, view.total, /*size=*/1, /*rank=*/0, /*others=*/false);
  Walk reduce = pack;
  Pack(pack, SIZE_MAX, streaming);
  if (streaming) StreamingFence();
  Post({{&RankBlock::packed, chunk}});
  KV_RETURN_IF_ERROR(WaitForAll(&RankBlock::packed, chunk));
  Reduce(reduce, SIZE_MAX, /*publish=*/false, /*streaming=*/false);
  Post({{&RankBlock::done, chunk}});
  return Status();
}

Status ShmBackend::TwoShot(const View& view) {
  const ChunkPlan plan = PlanChunks(view.total, chunk_bytes_, size_);
  const uint64_t first = chunk_ + 1;
  chunk_ += plan.count;
  chooser_.BeginRange(plan.count);
  int64_t begin_ns = chooser_.trial() ? NowNs() : 0;
  for (size_t step = 0; step < plan.count + 2; ++step) {
    KV_RETURN_IF_ERROR(Step(view, plan, first, step));
    if (chooser_.trial() && step < plan.count) {
      const int64_t now_ns = NowNs();
      chooser_.Record(step, now_ns - begin_ns);
      begin_ns = now_ns;
    }
  }
  chooser_.EndRange();
  return Status();
}

Status ShmBackend::Step(const View& view, const ChunkPlan& plan, uint64_t first, size_t step) {
  // Chunk step - lag, or nothing before the first and after the last.
  const auto walk = [&](size_t lag, bool others) {
    if (step < lag || step - lag >= plan.count) return Walk();
    const size_t begin = (step - lag) * plan.chunk_bytes;
    return Walk(view, first + step - lag, begin, std::min(plan.chunk_bytes, view.total - begin), size_, rank_,
                others);
  };
  Walk pack = walk(0, true);
  Walk reduce = walk(1, false);
  Walk copy_out = walk(2, true);
  const uint64_t chunk = first + step;
  const bool packs = step < plan.count;
  const bool reduces = step >= 1 && step - 1 < plan.count;
  const bool copies = step >= 2;
  if (packs) KV_RETURN_IF_ERROR(WaitForSlot(chunk));
  if (reduces) KV_RETURN_IF_ERROR(WaitForAll(&RankBlock::packed, chunk - 1));
  if (copies) KV_RETURN_IF_ERROR(WaitForAll(&RankBlock::reduced, chunk - 2));
  const bool pack_streaming = packs && chooser_.Use(step);
  const bool reduce_streaming = reduces && chooser_.Use(step - 1);
  const size_t own = plan.count >= kInterleavedChunks ? kStride : chunk_bytes_;
  const size_t others = own * static_cast<size_t>(size_ - 1);
  while (!pack.done() || !reduce.done() || !copy_out.done()) {
    Pack(pack, others, pack_streaming);
    Reduce(reduce, own, /*publish=*/true, reduce_streaming);
    CopyOut(copy_out, others);
  }
  if (pack_streaming || reduce_streaming) StreamingFence();
  if (packs) Post({{&RankBlock::packed, chunk}});
  if (reduces) Post({{&RankBlock::reduced, chunk - 1}});
  if (copies) Post({{&RankBlock::done, chunk - 2}});
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

}  // namespace kolovod
