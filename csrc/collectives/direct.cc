#include "collectives/direct.h"

#include <algorithm>

namespace kolovod {
namespace {

class Direct {
 public:
  Direct(MeshGroup& group, PackedRange& range, const Combine& combine, size_t block_bytes)
      : group_(group),
        range_(range),
        combine_(combine),
        // Many tensors are gathered once instead of by every system call.
        packs_(combine.prescale != 1.0 || !range.single()),
        block_bytes_(std::min(block_bytes, RoundUp(range.total(), kLine))),
        blocks_((range.total() + block_bytes_ - 1) / block_bytes_) {
    for (size_t slot = 0; slot < kSlots; ++slot) {
      received_[slot].resize(static_cast<size_t>(group.size()));
      sent_[slot].resize(static_cast<size_t>(group.size()));
    }
  }

  Status Run(Scratch& scratch) {
    KV_RETURN_IF_ERROR(scratch.Reserve(kSlots * static_cast<size_t>(group_.size()) * block_bytes_));
    scratch_ = scratch.data();
    for (size_t step = 0; step < blocks_ + kSlots - 1; ++step) {
      if (step < blocks_) Exchange(step);
      if (step >= kSlots - 1) KV_RETURN_IF_ERROR(Reduce(step - (kSlots - 1)));
    }
    return Status();
  }

 private:
  static constexpr size_t kSlots = 3;

  Slice Block(size_t step) const {
    return Slice{step * block_bytes_, std::min((step + 1) * block_bytes_, range_.total())};
  }
  char* Slot(int member, size_t step) const {
    const auto size = static_cast<size_t>(group_.size());
    return scratch_ + (step % kSlots * size + static_cast<size_t>(member)) * block_bytes_;
  }

  void Exchange(size_t step) {
    const Slice block = Block(step);
    const size_t bytes = block.end - block.begin;
    char* own = Slot(group_.index(), step);
    if (packs_) PackSlice(combine_, range_, block, own);
    for (int distance = 1; distance < group_.size(); ++distance) {
      const int from = group_.Before(distance);
      received_[step % kSlots][static_cast<size_t>(from)] = group_.Receive(from, Slot(from, step), bytes);
    }
    for (int distance = 1; distance < group_.size(); ++distance) {
      const int to = group_.Behind(distance);
      sent_[step % kSlots][static_cast<size_t>(to)] =
          packs_ ? group_.Send(to, own, bytes) : group_.Send(to, range_.Inputs(block));
    }
  }

  Status Reduce(size_t step) {
    std::vector<const char*> sources(static_cast<size_t>(group_.size()), nullptr);
    if (packs_) sources[static_cast<size_t>(group_.index())] = Slot(group_.index(), step);
    for (int distance = 1; distance < group_.size(); ++distance) {
      const int from = group_.Before(distance);
      const int to = group_.Behind(distance);
      KV_RETURN_IF_ERROR(group_.WaitReceived(from, received_[step % kSlots][static_cast<size_t>(from)]));
      // The result may be about to replace what is still on its way.
      KV_RETURN_IF_ERROR(group_.WaitSent(to, sent_[step % kSlots][static_cast<size_t>(to)]));
      sources[static_cast<size_t>(from)] = Slot(from, step);
    }
    ReduceSlice(combine_, range_, Block(step), sources);
    return Status();
  }

  MeshGroup& group_;
  PackedRange& range_;
  const Combine combine_;
  const bool packs_;
  const size_t block_bytes_;
  const size_t blocks_;
  char* scratch_ = nullptr;
  std::vector<uint64_t> received_[kSlots], sent_[kSlots];  // by member: positions
};

}  // namespace

Status DirectAllreduce(MeshGroup& group, PackedRange& range, const Combine& combine, size_t block_bytes,
                       Scratch& scratch) {
  if (range.total() == 0) return Status();
  return Direct(group, range, combine, block_bytes).Run(scratch);
}

Status TreeAllreduce(MeshGroup& group, PackedRange& range, const Combine& combine, Scratch& scratch) {
  const size_t total = range.total();
  if (total == 0) return Status();
  const auto size = static_cast<size_t>(group.size());
  KV_RETURN_IF_ERROR(scratch.Reserve(size * total));
  // Place d holds the data of the member d places before this one.
  char* const places = scratch.data();
  PackSlice(combine, range, Slice{0, total}, places);
  for (size_t held = 1; held < size; held *= 2) {
    const size_t more = std::min(held, size - held);
    const int from = group.Before(static_cast<int>(held));
    const uint64_t received = group.Receive(from, places + held * total, more * total);
    group.Send(group.Behind(static_cast<int>(held)), places, more * total);
    KV_RETURN_IF_ERROR(group.WaitReceived(from, received));
  }
  std::vector<const char*> sources(size);
  for (size_t d = 0; d < size; ++d) {
    sources[static_cast<size_t>(group.Before(static_cast<int>(d)))] = places + d * total;
  }
  ReduceSlice(combine, range, Slice{0, total}, sources);
  return group.mesh().WaitAll();
}

}  // namespace kolovod
