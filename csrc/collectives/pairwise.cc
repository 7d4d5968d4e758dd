#include "collectives/pairwise.h"

#include <algorithm>
#include <utility>

namespace kolovod {

Pairwise::Pairwise(MeshGroup& group, PackedRange& range, const Combine& combine, std::vector<Slice> owned,
                   bool gathers, size_t portion_bytes, size_t lead)
    : group_(group),
      range_(range),
      combine_(combine),
      owned_(std::move(owned)),
      gathers_(gathers),
      packs_(combine.prescale != 1.0),
      lead_(lead),
      slots_(lead + 1),
      portion_bytes_(portion_bytes) {
  size_t longest = 0;
  for (const Slice& slice : owned_) longest = std::max(longest, slice.end - slice.begin);
  portion_bytes_ = std::min(portion_bytes_, std::max(RoundUp(longest, kLine), kLine));
  steps_ = (longest + portion_bytes_ - 1) / portion_bytes_;
  const auto size = static_cast<size_t>(group.size());
  contributed_.resize(slots_, std::vector<uint64_t>(size));
  packed_sent_ = contributed_;
  sent_.resize(size);
  gathered_.resize(size);
}

std::vector<Slice> Pairwise::EqualSlices(size_t total, int size) {
  std::vector<Slice> slices;
  for (int r = 0; r < size; ++r) slices.push_back(SliceOf(total, size, r));
  return slices;
}

size_t Pairwise::ScratchBytes() const {
  return slots_ * static_cast<size_t>(group_.size()) * portion_bytes_ * (packs_ ? 2 : 1);
}

Slice Pairwise::Portion(int member, size_t step) const {
  const Slice& slice = owned_[static_cast<size_t>(member)];
  const size_t begin = std::min(slice.begin + step * portion_bytes_, slice.end);
  return Slice{begin, std::min(begin + portion_bytes_, slice.end)};
}

char* Pairwise::Received(int member, size_t step) const {
  const auto size = static_cast<size_t>(group_.size());
  return scratch_ + (step % slots_ * size + static_cast<size_t>(member)) * portion_bytes_;
}

char* Pairwise::Packed(int member, size_t step) const {
  return Received(member, step) + slots_ * static_cast<size_t>(group_.size()) * portion_bytes_;
}

Status Pairwise::Contribute(size_t step) {
  const Slice own = Portion(group_.index(), step);
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int from = group_.Before(distance);
    const auto f = static_cast<size_t>(from);
    contributed_[step % slots_][f] = group_.Receive(from, Received(from, step), own.end - own.begin);
  }
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int to = group_.Behind(distance);
    const auto t = static_cast<size_t>(to);
    const Slice slice = Portion(to, step);
    if (packs_) {
      KV_RETURN_IF_ERROR(group_.WaitSent(to, packed_sent_[step % slots_][t]));
      PackSlice(combine_, range_, slice, Packed(to, step));
      sent_[t] = group_.Send(to, Packed(to, step), slice.end - slice.begin);
      packed_sent_[step % slots_][t] = sent_[t];
    } else {
      sent_[t] = group_.Send(to, range_.Inputs(slice));
    }
  }
  return Status();
}

Status Pairwise::Reduce(size_t step) {
  const Slice own = Portion(group_.index(), step);
  std::vector<const char*> sources(static_cast<size_t>(group_.size()), nullptr);
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int from = group_.Before(distance);
    const auto f = static_cast<size_t>(from);
    KV_RETURN_IF_ERROR(group_.WaitReceived(from, contributed_[step % slots_][f]));
    sources[f] = Received(from, step);
  }
  ReduceSlice(combine_, range_, own, sources);
  if (!gathers_) return Status();
  // A result comes only after its owner has received this rank's part of it: nothing that is still to be sent
  // is overwritten.
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int from = group_.Before(distance);
    const int to = group_.Behind(distance);
    sent_[static_cast<size_t>(to)] = group_.Send(to, range_.Outputs(own));
    gathered_[static_cast<size_t>(from)] = group_.Receive(from, range_.Outputs(Portion(from, step)));
  }
  return Status();
}

Status Pairwise::Collect() {
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int from = group_.Before(distance);
    const int to = group_.Behind(distance);
    KV_RETURN_IF_ERROR(group_.WaitReceived(from, gathered_[static_cast<size_t>(from)]));
    KV_RETURN_IF_ERROR(group_.WaitSent(to, sent_[static_cast<size_t>(to)]));
  }
  return Status();
}

Status Pairwise::Run(char* scratch) {
  Begin(scratch);
  for (size_t step = 0; step < steps_ + lead_; ++step) {
    if (step < steps_) KV_RETURN_IF_ERROR(Contribute(step));
    if (step >= lead_) KV_RETURN_IF_ERROR(Reduce(step - lead_));
  }
  return Collect();
}

}  // namespace kolovod
