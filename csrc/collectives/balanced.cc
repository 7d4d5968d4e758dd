#include "collectives/balanced.h"

#include <algorithm>
#include <bit>

#include "collectives/reduce.h"

namespace kolovod {
namespace {

// What a member has of the sums so far: its own tensors at first, then partial results in scratch, each byte
// of the range at `ratio` times its position.
class Partials {
 public:
  Partials(const PackedRange& range, const Combine& combine, char* at)
      : range_(range),
        combine_(combine),
        ratio_(SizeOf(AccumulatorOf(combine.dtype, combine.op)) / SizeOf(combine.dtype)),
        at_(at) {}

  static size_t Bytes(const PackedRange& range, const Combine& combine) {
    return range.total() * SizeOf(AccumulatorOf(combine.dtype, combine.op)) / SizeOf(combine.dtype);
  }
  size_t ratio() const { return ratio_; }
  char* Place(size_t position) const { return at_ + position * ratio_; }

  // The inputs of a slice as they are to be sent to somebody who adds inputs too.
  void Pack(Slice slice) { PackSlice(combine_, range_, slice, Place(slice.begin)); }
  // The inputs of a slice as partial results.
  void Widen(Slice slice) {
    Exchange x = Reducing();
    x.reduce.to_partials = true;
    x.reduce.own_source = 0;
    range_.ForEach(slice, [&](const PackedRange::Part& part) {
      const void* const source = part.in;
      Run(x, {&source, 1}, Place(slice.begin + part.in_slice), part);
    });
  }

  // Adds what the other side of this step has of a slice. `raw`: both sides have inputs only. `last`: the
  // result goes to the outputs.
  void Add(Slice slice, const char* received, bool own_first, bool raw, bool last) {
    Exchange x = Reducing();
    x.reduce.from_partials = !raw;
    x.reduce.to_partials = !last;
    if (raw) x.reduce.own_source = own_first ? 0 : 1;
    if (last) {
      x.reduce.scale = combine_.scale;
      x.reduce.divisor = combine_.divisor;
    }
    range_.ForEach(slice, [&](const PackedRange::Part& part) {
      char* const place = Place(slice.begin + part.in_slice);
      const void* const own = raw ? part.in : place;
      const void* const other = received + part.in_slice * (raw ? 1 : ratio_);
      const void* const sources[] = {own_first ? own : other, own_first ? other : own};
      Run(x, sources, last ? part.out : place, part);
    });
  }

 private:
  Exchange Reducing() const {
    Exchange x;
    x.reduce.dtype = combine_.dtype;
    x.reduce.op = combine_.op;
    x.reduce.prescale = combine_.prescale;
    return x;
  }
  void Run(Exchange& x, std::span<const void* const> sources, char* out,
           const PackedRange::Part& part) const {
    x.reduce.sources = sources.data();
    x.reduce.source_count = static_cast<int>(sources.size());
    x.reduce.out = out;
    x.reduce.count = part.bytes / SizeOf(combine_.dtype);
    ActiveKernels().exchange(x);
  }

  const PackedRange& range_;
  const Combine combine_;
  const size_t ratio_;
  char* const at_;
};

Slice LowerHalf(Slice slice) {
  return Slice{slice.begin, std::min(slice.begin + RoundUp((slice.end - slice.begin) / 2, kLine), slice.end)};
}
Slice UpperHalf(Slice slice) { return Slice{LowerHalf(slice).end, slice.end}; }

class Doubling {
 public:
  Doubling(MeshGroup& group, PackedRange& range, const Combine& combine, char* scratch)
      : group_(group),
        range_(range),
        // Many tensors are gathered once instead of by every system call.
        packs_(combine.prescale != 1.0 || !range.single()),
        partials_(range, combine, scratch),
        received_(scratch + RoundUp(Partials::Bytes(range, combine), kLine)) {}

  Status Run() {
    const BalancedGroups groups(group_.size());
    const int index = group_.index(), own = groups.GroupOf(index);
    const int place = groups.IsPair(own) ? index % 2 : 0;
    if (groups.IsPair(own)) {
      KV_RETURN_IF_ERROR(Step(index ^ 1, {index ^ 1}, place == 0, /*raw=*/true, groups.levels == 0));
    }
    for (int level = 0; level < groups.levels; ++level) {
      const int other = own ^ (1 << level);
      const int from = groups.Member(other, place);
      std::vector<int> to;
      if (groups.IsPair(own) && groups.IsPair(other)) {
        to = {from};
      } else if (groups.IsPair(other)) {  // both need what only this member has
        to = {groups.Member(other, 0), groups.Member(other, 1)};
      } else if (place == 0) {  // the second of a pair has nothing that the first does not send
        to = {from};
      }
      const bool raw = level == 0 && !groups.IsPair(own) && !groups.IsPair(other);
      KV_RETURN_IF_ERROR(Step(from, to, own < other, raw, level + 1 == groups.levels));
    }
    return Status();
  }

 private:
  Status Step(int from, const std::vector<int>& to, bool own_first, bool raw, bool last) {
    const Slice all{0, range_.total()};
    if (raw && packs_) partials_.Pack(all);
    if (!raw && !widened_) partials_.Widen(all);
    widened_ = true;
    const size_t bytes = all.end * (raw ? 1 : partials_.ratio());
    const uint64_t received = group_.Receive(from, received_, bytes);
    std::vector<uint64_t> sent;
    for (const int peer : to) {
      sent.push_back(raw && !packs_ ? group_.Send(peer, range_.Inputs(all))
                                    : group_.Send(peer, partials_.Place(0), bytes));
    }
    KV_RETURN_IF_ERROR(group_.WaitReceived(from, received));
    // The sum replaces what is being sent.
    for (size_t i = 0; i < to.size(); ++i) KV_RETURN_IF_ERROR(group_.WaitSent(to[i], sent[i]));
    partials_.Add(all, received_, own_first, raw, last);
    return Status();
  }

  MeshGroup& group_;
  PackedRange& range_;
  const bool packs_;
  Partials partials_;
  char* const received_;
  bool widened_ = false;
};

class Halving {
 public:
  Halving(MeshGroup& group, PackedRange& range, const Combine& combine, size_t portion_bytes)
      : group_(group),
        range_(range),
        combine_(combine),
        packs_(combine.prescale != 1.0),
        portion_bytes_(std::min(portion_bytes, RoundUp(range.total(), kLine))) {
    Plan();
  }

  Status Run(Scratch& scratch) {
    const size_t ratio = SizeOf(AccumulatorOf(combine_.dtype, combine_.op)) / SizeOf(combine_.dtype);
    const size_t partial_bytes = RoundUp(Partials::Bytes(range_, combine_), kLine);
    KV_RETURN_IF_ERROR(scratch.Reserve(partial_bytes + kWindow * portion_bytes_ * ratio));
    Partials partials(range_, combine_, scratch.data());
    window_ = scratch.data() + partial_bytes;
    for (size_t i = 0; i < steps_.size(); ++i) {
      KV_RETURN_IF_ERROR(Reduce(partials, steps_[i], i == 0, i + 1 == steps_.size()));
    }
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) KV_RETURN_IF_ERROR(Gather(*step));
    return group_.mesh().WaitAll();
  }

 private:
  // Places for what arrives before it is needed.
  static constexpr size_t kWindow = 4;

  struct Swap {
    int peer;
    Slice gives, keeps;
  };
  struct Step {
    std::vector<Swap> swaps;
    bool own_first;
    bool raw;
  };
  struct Portion {
    const Swap* swap;
    Slice slice;
    uint64_t position = 0;
  };

  // The range is cut into the halves that the two of a pair have; who is alone swaps parts of both with both.
  void Plan() {
    const BalancedGroups groups(group_.size());
    const int index = group_.index(), own = groups.GroupOf(index);
    const bool in_pair = groups.IsPair(own);
    const Slice all{0, range_.total()};
    std::vector<std::pair<int, Slice>> parts;  // half, what this member has of it
    if (groups.pairs == 0) {
      parts = {{0, all}};
    } else {
      parts = {{0, LowerHalf(all)}, {1, UpperHalf(all)}};
    }
    if (in_pair) {
      const int place = index % 2;
      steps_.push_back(Step{{Swap{index ^ 1, parts[static_cast<size_t>(1 - place)].second,
                                  parts[static_cast<size_t>(place)].second}},
                            place == 0,
                            true});
      parts = {parts[static_cast<size_t>(place)]};
    }
    for (int level = 0; level < groups.levels; ++level) {
      const int other = own ^ (1 << level);
      Step step{{}, own < other, level == 0 && !in_pair && !groups.IsPair(other)};
      for (auto& [half, part] : parts) {
        const Slice lower = LowerHalf(part), upper = UpperHalf(part);
        part = step.own_first ? lower : upper;
        step.swaps.push_back(Swap{groups.Member(other, half), step.own_first ? upper : lower, part});
      }
      steps_.push_back(std::move(step));
    }
  }

  std::vector<Slice> Cut(Slice slice) const {
    std::vector<Slice> portions;
    for (size_t begin = slice.begin; begin < slice.end; begin += portion_bytes_) {
      portions.push_back(Slice{begin, std::min(begin + portion_bytes_, slice.end)});
    }
    return portions;
  }

  // The portions of all swaps in turn, so that no peer waits for another.
  std::vector<Portion> Expected(const Step& step) const {
    std::vector<std::vector<Slice>> kept;
    size_t most = 0;
    for (const Swap& swap : step.swaps) {
      kept.push_back(Cut(swap.keeps));
      most = std::max(most, kept.back().size());
    }
    std::vector<Portion> portions;
    for (size_t i = 0; i < most; ++i) {
      for (size_t s = 0; s < kept.size(); ++s) {
        if (i < kept[s].size()) portions.push_back(Portion{&step.swaps[s], kept[s][i]});
      }
    }
    return portions;
  }

  void SendPart(Partials& partials, const Swap& swap, bool raw) {
    if (raw && packs_) partials.Pack(swap.gives);
    for (const Slice& portion : Cut(swap.gives)) {
      if (raw && !packs_) {
        group_.Send(swap.peer, range_.Inputs(portion));
      } else if (raw) {
        const char* packed = partials.Place(swap.gives.begin) + (portion.begin - swap.gives.begin);
        group_.Send(swap.peer, packed, portion.end - portion.begin);
      } else {
        group_.Send(swap.peer, partials.Place(portion.begin),
                    (portion.end - portion.begin) * partials.ratio());
      }
    }
  }

  Status Reduce(Partials& partials, const Step& step, bool first, bool last) {
    const size_t ratio = step.raw ? 1 : partials.ratio();
    if (first && !step.raw) partials.Widen(Slice{0, range_.total()});
    std::vector<Portion> portions = Expected(step);
    const auto place = [&](size_t k) { return window_ + k % kWindow * portion_bytes_ * partials.ratio(); };
    const auto post = [&](size_t k) {
      Portion& portion = portions[k];
      portion.position =
          group_.Receive(portion.swap->peer, place(k), (portion.slice.end - portion.slice.begin) * ratio);
    };
    for (size_t k = 0; k < std::min(kWindow, portions.size()); ++k) post(k);
    for (const Swap& swap : step.swaps) SendPart(partials, swap, step.raw);
    for (size_t k = 0; k < portions.size(); ++k) {
      KV_RETURN_IF_ERROR(group_.WaitReceived(portions[k].swap->peer, portions[k].position));
      partials.Add(portions[k].slice, place(k), step.own_first, step.raw, last);
      if (k + kWindow < portions.size()) post(k + kWindow);
    }
    return Status();
  }

  // What a step has parted comes together again. Whatever is overwritten has reached its receiver: the result
  // contains it.
  Status Gather(const Step& step) {
    std::vector<uint64_t> positions;
    for (const Swap& swap : step.swaps) {
      positions.push_back(group_.Receive(swap.peer, range_.Outputs(swap.gives)));
      group_.Send(swap.peer, range_.Outputs(swap.keeps));
    }
    for (size_t s = 0; s < positions.size(); ++s) {
      KV_RETURN_IF_ERROR(group_.WaitReceived(step.swaps[s].peer, positions[s]));
    }
    return Status();
  }

  MeshGroup& group_;
  PackedRange& range_;
  const Combine combine_;
  const bool packs_;
  const size_t portion_bytes_;
  std::vector<Step> steps_;
  char* window_ = nullptr;
};

}  // namespace

BalancedGroups::BalancedGroups(int members)
    : groups(static_cast<int>(std::bit_floor(static_cast<unsigned>(members)))),
      pairs(members - groups),
      levels(std::countr_zero(static_cast<unsigned>(groups))) {}

Status DoublingAllreduce(MeshGroup& group, PackedRange& range, const Combine& combine, Scratch& scratch) {
  if (range.total() == 0) return Status();
  KV_RETURN_IF_ERROR(scratch.Reserve(2 * RoundUp(Partials::Bytes(range, combine), kLine)));
  return Doubling(group, range, combine, scratch.data()).Run();
}

Status HalvingAllreduce(MeshGroup& group, PackedRange& range, const Combine& combine, size_t portion_bytes,
                        Scratch& scratch) {
  if (range.total() == 0) return Status();
  return Halving(group, range, combine, portion_bytes).Run(scratch);
}

}  // namespace kolovod
