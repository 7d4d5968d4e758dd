#include "collectives/ring.h"

#include <algorithm>

namespace kolovod {
namespace {

class Ring {
 public:
  Ring(MeshGroup& group, PackedRange& range, const std::vector<Slice>& slices, size_t portion_bytes)
      : group_(group),
        range_(range),
        slices_(slices),
        size_(static_cast<size_t>(group.size())),
        left_(group.Before(1)),
        right_(group.Behind(1)) {
    size_t longest = 0;
    for (const Slice& slice : slices_) longest = std::max(longest, slice.end - slice.begin);
    portion_bytes_ = std::min(portion_bytes, std::max(RoundUp(longest, kLine), kLine));
    portions_ = (longest + portion_bytes_ - 1) / portion_bytes_;
  }

  // Hops are counted in portions: hop k is portion k % portions_ of the (k / portions_)-th slice that passes.
  // In the first half slice i - 1 arrives first at member i, and i + 1 last, where it is completed.
  Status ReduceScatter(const Combine& combine, Scratch& scratch) {
    const size_t own_bytes = slices_[Index()].end - slices_[Index()].begin;
    KV_RETURN_IF_ERROR(scratch.Reserve(kWindow * portion_bytes_ + own_bytes));
    window_ = scratch.data();
    hops_ = (size_ - 1) * portions_;
    positions_.resize(hops_);
    SendOwn(combine, window_ + kWindow * portion_bytes_);
    for (size_t k = 0; k < std::min(kWindow, hops_); ++k) PostHop(k);
    for (size_t k = 0; k < hops_; ++k) {
      KV_RETURN_IF_ERROR(group_.WaitReceived(left_, positions_[k]));
      AddHop(combine, k);
      if (k + kWindow < hops_) PostHop(k + kWindow);
    }
    return Status();
  }

  // The slice that this member has complete, `behind` places behind its own, begins the second round.
  Status Gather(size_t behind) {
    const size_t hops = (size_ - 1) * portions_;
    std::vector<uint64_t> positions(hops);
    const auto passing = [&](size_t k) { return Portion(Index() + behind + size_ - 1 - k / portions_, k); };
    for (size_t k = 0; k < hops; ++k) positions[k] = group_.Receive(left_, range_.Outputs(passing(k)));
    for (size_t k = 0; k + portions_ < hops; ++k) {
      KV_RETURN_IF_ERROR(group_.WaitReceived(left_, positions[k]));
      group_.Send(right_, range_.Outputs(passing(k)));
    }
    return group_.mesh().WaitAll();
  }

  void SendComplete(size_t behind) {
    for (size_t p = 0; p < portions_; ++p) group_.Send(right_, range_.Outputs(Portion(Index() + behind, p)));
  }

 private:
  // Places for what the left neighbour sends before it is needed.
  static constexpr size_t kWindow = 4;

  size_t Index() const { return static_cast<size_t>(group_.index()); }
  Slice Portion(size_t slice_number, size_t k) const {
    const Slice& slice = slices_[slice_number % size_];
    const size_t begin = std::min(slice.begin + k % portions_ * portion_bytes_, slice.end);
    return Slice{begin, std::min(begin + portion_bytes_, slice.end)};
  }
  Slice Passing(size_t k) const { return Portion(Index() + size_ - 1 - k / portions_, k); }
  char* Place(size_t k) const { return window_ + k % kWindow * portion_bytes_; }

  void SendOwn(const Combine& combine, char* packed) {
    const Slice own = slices_[Index()];
    if (combine.prescale != 1.0) PackSlice(combine, range_, own, packed);
    for (size_t p = 0; p < portions_; ++p) {
      const Slice portion = Portion(Index(), p);
      if (combine.prescale != 1.0) {
        group_.Send(right_, packed + (portion.begin - own.begin), portion.end - portion.begin);
      } else {
        group_.Send(right_, range_.Inputs(portion));
      }
    }
  }

  void PostHop(size_t k) {
    const Slice portion = Passing(k);
    positions_[k] = group_.Receive(left_, Place(k), portion.end - portion.begin);
  }

  void AddHop(const Combine& combine, size_t k) {
    Combine step = combine;
    if (k / portions_ + 2 < size_) {  // not the last hop
      step.scale = 1.0;
      step.divisor = 1;
    }
    const char* const sources[] = {Place(k), nullptr};
    const Slice portion = Passing(k);
    ReduceSlice(step, range_, portion, sources);
    group_.Send(right_, range_.Outputs(portion));
  }

  MeshGroup& group_;
  PackedRange& range_;
  const std::vector<Slice> slices_;
  const size_t size_;
  const int left_, right_;
  size_t portion_bytes_ = 0;
  size_t portions_ = 0;
  size_t hops_ = 0;
  char* window_ = nullptr;
  std::vector<uint64_t> positions_;  // by hop of the first round
};

}  // namespace

Status RingAllreduce(MeshGroup& group, PackedRange& range, const Combine& combine, size_t portion_bytes,
                     Scratch& scratch) {
  if (range.total() == 0) return Status();
  std::vector<Slice> slices;
  for (int m = 0; m < group.size(); ++m) slices.push_back(SliceOf(range.total(), group.size(), m));
  Ring ring(group, range, slices, portion_bytes);
  KV_RETURN_IF_ERROR(ring.ReduceScatter(combine, scratch));
  return ring.Gather(1);
}

Status RingAllgather(MeshGroup& group, PackedRange& range, const std::vector<Slice>& slices,
                     size_t portion_bytes) {
  if (range.total() == 0) return Status();
  Ring ring(group, range, slices, portion_bytes);
  ring.SendComplete(0);
  return ring.Gather(0);
}

}  // namespace kolovod
