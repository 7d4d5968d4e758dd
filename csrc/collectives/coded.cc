#include "collectives/coded.h"

namespace kolovod {
namespace {

// Lines, so that members do not write to the same.
size_t PlaceBytes(Codec codec, size_t blocks) { return RoundUp(blocks * EncodedBlockBytes(codec), kLine); }

size_t MostOwned(size_t blocks, int members) {
  const auto n = static_cast<size_t>(members);
  return (blocks + n - 1) / n;
}

}  // namespace

Slice BlocksOf(size_t blocks, int members, int index) {
  const auto n = static_cast<size_t>(members), i = static_cast<size_t>(index);
  return Slice{blocks * i / n, blocks * (i + 1) / n};
}

CodedExchange::CodedExchange(MeshGroup& group, Codec codec, const Combine& combine, float* values,
                             size_t blocks, char* scratch)
    : group_(group),
      codec_(codec),
      combine_(combine),
      values_(values),
      blocks_(blocks),
      parts_(scratch),
      results_(parts_ + PlaceBytes(codec, blocks)),
      received_(results_ + PlaceBytes(codec, blocks)),
      contributed_(static_cast<size_t>(group.size())),
      gathered_(contributed_),
      sent_(contributed_) {}

size_t CodedExchange::ScratchBytes(Codec codec, size_t blocks, int members) {
  const size_t places = static_cast<size_t>(members) * PlaceBytes(codec, MostOwned(blocks, members));
  return 2 * PlaceBytes(codec, blocks) + places;
}

char* CodedExchange::Received(int member) const {
  return received_ + static_cast<size_t>(member) * PlaceBytes(codec_, MostOwned(blocks_, group_.size()));
}

Status CodedExchange::Contribute() {
  const Slice own = OwnedBy(group_.index());
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int from = group_.Before(distance);
    contributed_[static_cast<size_t>(from)] =
        group_.Receive(from, Received(from), Encoded(own.end - own.begin));
  }
  // Its own last: the others wait for theirs.
  for (int distance = 1; distance <= group_.size(); ++distance) {
    const int to = group_.Behind(distance);
    const Slice slice = OwnedBy(to);
    char* const part = parts_ + Encoded(slice.begin);
    ActiveKernels().encode(codec_, values_ + slice.begin * kCodecBlock, slice.end - slice.begin, part);
    if (to == group_.index()) break;
    sent_[static_cast<size_t>(to)] = group_.Send(to, part, Encoded(slice.end - slice.begin));
  }
  return Status();
}

Status CodedExchange::Reduce() {
  const Kernels& kernels = ActiveKernels();
  const Slice own = OwnedBy(group_.index());
  const size_t blocks = own.end - own.begin;
  float* const sum = values_ + own.begin * kCodecBlock;
  for (int from = 0; from < group_.size(); ++from) {
    const char* part = parts_ + Encoded(own.begin);
    if (from != group_.index()) {
      KV_RETURN_IF_ERROR(group_.WaitReceived(from, contributed_[static_cast<size_t>(from)]));
      part = Received(from);
    }
    (from == 0 ? kernels.decode : kernels.decode_add)(codec_, part, blocks, sum);
  }
  if (combine_.divisor != 1 || combine_.scale != 1.0) {
    const void* const source = sum;
    Exchange x;
    x.reduce = combine_.ToReduction();
    x.reduce.dtype = DType::kFloat32;
    x.reduce.sources = &source;
    x.reduce.source_count = 1;
    x.reduce.out = sum;
    x.reduce.count = blocks * kCodecBlock;
    kernels.exchange(x);
  }
  char* const result = results_ + Encoded(own.begin);
  kernels.encode(codec_, sum, blocks, result);
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int from = group_.Before(distance);
    const int to = group_.Behind(distance);
    const Slice theirs = OwnedBy(from);
    sent_[static_cast<size_t>(to)] = group_.Send(to, result, Encoded(blocks));
    gathered_[static_cast<size_t>(from)] =
        group_.Receive(from, results_ + Encoded(theirs.begin), Encoded(theirs.end - theirs.begin));
  }
  kernels.decode(codec_, result, blocks, sum);
  return Status();
}

Status CodedExchange::Collect() {
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int from = group_.Before(distance);
    const int to = group_.Behind(distance);
    const Slice theirs = OwnedBy(from);
    KV_RETURN_IF_ERROR(group_.WaitReceived(from, gathered_[static_cast<size_t>(from)]));
    ActiveKernels().decode(codec_, results_ + Encoded(theirs.begin), theirs.end - theirs.begin,
                           values_ + theirs.begin * kCodecBlock);
    KV_RETURN_IF_ERROR(group_.WaitSent(to, sent_[static_cast<size_t>(to)]));
  }
  return Status();
}

}  // namespace kolovod
