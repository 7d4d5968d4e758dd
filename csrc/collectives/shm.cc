#include "collectives/shm.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

namespace kolovod {

ShmBackend::ShmBackend(Segment& segment, int rank, const Config& config, Waiter& waiter,
                       std::function<void()> before_post, bool streaming, std::unique_ptr<PeerMemory> peers,
                       const Kernels& kernels)
    : segment_(segment),
      rank_(rank),
      size_(segment.layout().size),
      crowded_(config.cores < size_),
      chunk_bytes_(ChunkBytes(segment, config, crowded_)),
      one_shot_bytes_(OneShotLimit(config, size_, chunk_bytes_, /*converts=*/false)),
      one_shot_converted_bytes_(OneShotLimit(config, size_, chunk_bytes_, /*converts=*/true)),
      slots_(segment.layout().chunk_slots),
      waiter_(waiter),
      peer_read_bytes_(static_cast<size_t>(config.peer_read_bytes)),
      peers_(std::move(peers)),
      before_post_(std::move(before_post)),
      kernels_(kernels),
      allreduce_(streaming),
      reducescatter_(!crowded_),
      moves_(streaming) {}

// With a core for every rank the second-level caches decide, else the switches of processes that every chunk
// costs (docs/design/allreduce.md).
size_t ShmBackend::ChunkBytes(const Segment& segment, const Config& config, bool crowded) {
  const size_t most = segment.layout().chunk_bytes;
  return config.chunk_bytes > 0 || crowded ? most : std::min<size_t>(most, 64 << 10);
}

size_t ShmBackend::OneShotLimit(const Config& config, int size, size_t chunk_bytes, bool converts) {
  // One exchange moves (size-1)*bytes to each rank, two exchanges 2*(size-1)/size*bytes; measured
  // crossovers are in docs/design/allreduce.md.
  size_t limit = 32 << 10;
  if (size > 4) limit = 16 << 10;
  if (size > 16) limit = 4 << 10;
  if (converts) limit /= 4;  // twice the elements to a byte, and each is converted to and fro
  if (config.one_shot_bytes > 0) limit = static_cast<size_t>(config.one_shot_bytes);
  return std::min(limit, chunk_bytes);
}

void ShmBackend::Post(std::initializer_list<std::pair<Flag, uint64_t>> flags) {
  if (before_post_) before_post_();
  RankBlock& self = segment_.rank(rank_);
  for (const auto& [flag, value] : flags) (self.*flag).store(value, std::memory_order_seq_cst);
  segment_.WakeDataWaiting();
}

Status ShmBackend::WaitFor(int peer, Flag flag, uint64_t value) {
  const DataWait wait{peer, flag == &RankBlock::done, value};
  const auto ready = [&] { return segment_.Reached(rank_, wait); };
  // Peers have announced this operation, but no thread of theirs may be driving.
  const auto wake = [&] {
    for (int r = 0; r < size_; ++r) {
      if (r == rank_ || (peer != r && peer != DataWait::kAll)) continue;
      if (!segment_.Reached(rank_, {r, wait.done, value})) segment_.WakeUndriven(r);
    }
  };
  return waiter_.Wait(ready, wake, /*in_bucket=*/true, wait);
}

Status ShmBackend::WaitForAll(Flag flag, uint64_t value) { return WaitFor(DataWait::kAll, flag, value); }

Status ShmBackend::WaitForSlot(uint64_t chunk) {
  return chunk > slots_ ? WaitForAll(&RankBlock::done, chunk - slots_) : Status();
}

// A chunk of the range, or some of its slices; positions are relative to the chunk.
struct ShmBackend::Walk {
  bool done() const { return cursor.done(); }

  PackedRange::Cursor cursor{};
  uint64_t chunk = 0;
};

// The tasks of one pipeline step; the kernels do them side by side.
struct ShmBackend::Tasks {
  Walk pack{};
  Walk reduce{};
  Walk out{};
  bool pack_streaming = false;
  bool reduce_streaming = false;
  bool out_streaming = false;
  bool publish = true;  // reduced slices go back into the staging that they came from
};

void ShmBackend::Run(const FusedRange& range, Tasks& t) {
  const void* sources[kMaxSources];
  void* copies[kMaxSources];
  Exchange x;
  Reduction& r = x.reduce = Combine::Of(range, size_).ToReduction();
  r.sources = sources;
  r.source_count = size_;
  r.own_source = rank_;
  r.copies = copies;
  r.copy_count = t.publish ? size_ - 1 : 0;
  r.streaming = t.reduce_streaming;
  x.pack_streaming = t.pack_streaming;
  x.out_streaming = t.out_streaming;
  x.weight = size_ - 1;
  const auto weight = static_cast<size_t>(x.weight);
  const size_t item = SizeOf(range.dtype);
  while (!t.pack.done() || !t.reduce.done() || !t.out.done()) {
    // As far as no task crosses an edge, counted in bytes of the reduction and in whole cache lines.
    size_t level = SIZE_MAX;
    const auto limit = [&](const Walk& walk, size_t w) {
      if (!walk.done()) level = std::min(level, RoundUp((walk.cursor.part().bytes + w - 1) / w, kLine));
    };
    limit(t.pack, weight);
    limit(t.reduce, 1);
    limit(t.out, weight);
    const auto take = [&](Walk& walk, size_t w) {
      PackedRange::Part part = walk.cursor.part();
      part.bytes = std::min(part.bytes, level * w);
      walk.cursor.Take(part.bytes);
      return part;
    };
    x.pack_bytes = x.out_bytes = r.count = 0;
    if (!t.pack.done()) {
      const PackedRange::Part part = take(t.pack, weight);
      x.pack_from = part.in;
      x.pack_to = segment_.staging(rank_, t.pack.chunk) + part.in_slice;
      x.pack_bytes = part.bytes;
    }
    if (!t.reduce.done()) {
      const PackedRange::Part part = take(t.reduce, 1);
      int copy = 0;
      for (int s = 0; s < size_; ++s) {
        char* staged = segment_.staging(s, t.reduce.chunk) + part.in_slice;
        sources[s] = s == rank_ ? part.in : staged;
        if (s != rank_) copies[copy++] = staged;
      }
      r.out = part.out;
      r.count = part.bytes / item;
    }
    if (!t.out.done()) {
      const PackedRange::Part part = take(t.out, weight);
      x.out_from = segment_.staging(rank_, t.out.chunk) + part.in_slice;
      x.out_to = part.out;
      x.out_bytes = part.bytes;
    }
    kernels_.exchange(x);
  }
}

Status ShmBackend::Allreduce(const FusedRange& range) {
  if (size_ == 1) {
    ReduceAlone(range, kernels_);
    return Status();
  }
  const PackedRange view(range, kLine);
  if (view.total() == 0) return Status();
  return view.total() <= (TraitsOf(range.dtype).converts() ? one_shot_converted_bytes_ : one_shot_bytes_)
             ? OneShot(view)
             : Sliced(view, PlanChunks(view.total(), chunk_bytes_, size_), /*gathers=*/true);
}

Status ShmBackend::OneShot(const PackedRange& view) {
  const uint64_t chunk = ++chunk_;
  KV_RETURN_IF_ERROR(WaitForSlot(chunk));
  // One slice, which is everybody's own: all of the range.
  const Walk all{PackedRange::Cursor(view, 0, 0, Slice{0, view.total()}), chunk};
  Tasks pack{.pack = all, .publish = false};
  pack.pack_streaming = allreduce_.streaming() && view.total() >= kStreamingFloor;
  Run(view.range(), pack);
  if (pack.pack_streaming) kernels_.fence();
  Post({{&RankBlock::packed, chunk}});
  KV_RETURN_IF_ERROR(WaitForAll(&RankBlock::packed, chunk));
  Tasks reduce{.reduce = all, .publish = false};
  Run(view.range(), reduce);
  Post({{&RankBlock::done, chunk}});
  return Status();
}

Status ShmBackend::Sliced(const PackedRange& view, const ChunkPlan& plan, bool gathers) {
  const uint64_t first = chunk_ + 1;
  chunk_ += plan.count;
  StreamingTrial trial(gathers ? allreduce_ : reducescatter_, plan.count);
  for (size_t step = 0; step < plan.count + (gathers ? 2 : 1); ++step) {
    KV_RETURN_IF_ERROR(Step(view, plan, gathers, trial, first, step));
    trial.StepEnds(step);
  }
  return Status();
}

Status ShmBackend::Step(const PackedRange& view, const ChunkPlan& plan, bool gathers,
                        const StreamingTrial& trial, uint64_t first, size_t step) {
  // Of chunk step - lag, or nothing before the first and after the last: the own slice, or (`others`) the
  // rest.
  const auto walk = [&](size_t lag, bool others) {
    if (step < lag || step - lag >= plan.count) return Walk();
    const size_t begin = (step - lag) * plan.chunk_bytes;
    const size_t length = std::min(plan.chunk_bytes, view.total() - begin);
    const Slice own = SliceOf(length, size_, rank_);
    // Beginning behind the own slice, so that ranks do not all read from the same peer.
    const Slice behind{begin + own.end, begin + length}, before{begin, begin + own.begin};
    const Slice mine{begin + own.begin, begin + own.end};
    const size_t slice_bytes = std::max(SliceOf(length, size_, 0).end, kLine);
    return Walk{others ? PackedRange::Cursor(view, begin, slice_bytes, behind, before)
                       : PackedRange::Cursor(view, begin, slice_bytes, mine),
                first + step - lag};
  };
  const uint64_t chunk = first + step;
  const bool packs = step < plan.count;
  const bool reduces = step >= 1 && step - 1 < plan.count;
  const bool copies = gathers && step >= 2;
  Tasks tasks{.pack = walk(0, true), .reduce = walk(1, false), .out = copies ? walk(2, true) : Walk()};
  tasks.publish = gathers;
  if (packs) KV_RETURN_IF_ERROR(WaitForSlot(chunk));
  if (reduces) KV_RETURN_IF_ERROR(WaitForAll(&RankBlock::packed, chunk - 1));
  if (copies) KV_RETURN_IF_ERROR(WaitForAll(&RankBlock::done, chunk - 2));
  tasks.pack_streaming = packs && trial.Use(step);
  tasks.reduce_streaming = reduces && trial.Use(step - 1);
  tasks.out_streaming = copies && trial.Use(step - 2);
  Run(view.range(), tasks);
  if (tasks.pack_streaming || tasks.reduce_streaming) kernels_.fence();
  if (packs) Post({{&RankBlock::packed, chunk}});
  if (reduces) Post({{&RankBlock::done, chunk - 1}});
  return Status();
}

// An allreduce that stops before the results are gathered. Its chunk is made of equal portions, one of every
// rank's part, so that the slices of the chunk are what their owners keep.
Status ShmBackend::Reducescatter(const FusedRange& range, const std::vector<size_t>& counts) {
  if (size_ == 1) {
    ReduceAlone(range, kernels_);
    return Status();
  }
  const auto size = static_cast<size_t>(size_);
  const size_t item = SizeOf(range.dtype);
  const size_t longest = *std::max_element(counts.begin(), counts.end()) * item;
  if (longest == 0) return Status();
  const size_t portion = PlanChunks(longest * size, chunk_bytes_, size_).chunk_bytes / size;
  const ChunkPlan plan{(longest + portion - 1) / portion, portion * size};
  FusedRange parts{range.dtype, range.op, range.prescale, range.postscale, {}, range.name};
  std::vector<size_t> begins;
  for (size_t c = 0; c < plan.count; ++c) {
    const char* part = static_cast<const char*>(range.pieces.front().in);
    for (size_t r = 0; r < size; ++r) {
      const size_t begin = std::min(c * portion, counts[r] * item);
      const size_t end = std::min(begin + portion, counts[r] * item);
      const bool own = r == static_cast<size_t>(rank_);
      char* out = own ? static_cast<char*>(range.pieces.front().out) + begin : nullptr;
      parts.pieces.push_back(Piece{part + begin, out, (end - begin) / item});
      begins.push_back((c * size + r) * portion);
      part += counts[r] * item;
    }
  }
  const PackedRange view(parts, std::move(begins), plan.count * plan.chunk_bytes);
  return Sliced(view, plan, /*gathers=*/false);
}

}  // namespace kolovod
