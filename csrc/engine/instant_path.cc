#include "engine/instant_path.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/memory_facts.h"
#include "engine/validate.h"

namespace kolovod {

namespace {

constexpr uint64_t kNotSmall = 0;  // no signature is

// 64 bits that differ where ranks have not submitted the same. `has_rows`: first dimensions and splits may
// differ, for each rank says its own.
uint64_t SignatureOf(const Request& request, bool has_rows) {
  struct Numbers {
    uint64_t verb, op, root, tensors;
    double prescale, postscale;
  };
  const Numbers numbers{static_cast<uint64_t>(request.verb),
                        static_cast<uint64_t>(request.op),
                        static_cast<uint64_t>(request.root),
                        request.tensors.size(),
                        request.prescale,
                        request.postscale};
  uint64_t hash = HashMemory(&numbers, sizeof(numbers), HashMemory(request.name.data(), request.name.size()));
  for (const TensorMeta& tensor : request.tensors) {
    const uint64_t kind = static_cast<uint64_t>(tensor.dtype) << 8 |
                          static_cast<uint64_t>(tensor.codec) << 16 | (has_rows ? 1 : 0);
    const size_t first = has_rows ? 1 : 0;
    hash =
        HashMemory(tensor.shape.data() + first, (tensor.shape.size() - first) * sizeof(int64_t), hash ^ kind);
  }
  return HashMemory(request.called_from.data(), request.called_from.size(), hash) | 1;
}

}  // namespace

std::unique_ptr<InstantPath> InstantPath::Make(const Membership& membership, Registry& registry,
                                               Announcer& announcer, Executor& executor,
                                               LastOperations& last_operations, std::function<bool()> over) {
  const bool crowded = membership.config.cores < membership.topology.local_size();
  if (crowded || membership.config.spin_us <= 0 || membership.size == 1) return nullptr;
  return std::unique_ptr<InstantPath>(
      new InstantPath(membership, registry, announcer, executor, last_operations, std::move(over)));
}

InstantPath::InstantPath(const Membership& membership, Registry& registry, Announcer& announcer,
                         Executor& executor, LastOperations& last_operations, std::function<bool()> over)
    : membership_(membership),
      registry_(registry),
      announcer_(announcer),
      executor_(executor),
      last_operations_(last_operations),
      over_(std::move(over)),
      patience_ns_(membership.config.spin_us * 1000),
      slots_(*membership.segment, membership.topology.local_rank) {}

bool InstantPath::Begin(const Operation& op) {
  const Request& request = op.request;
  const VerbTraits& verb = TraitsOf(request.verb);
  const bool is_small = executor_.FitsSlot(op) && OwnRows(request).size() <= kSlotRows;
  const bool never = request.device() != Device::kHost || request.verb == Verb::kJoin || verb.is_transfer ||
                     (!is_small && verb.rows_differ == RowsDiffer::kNo);
  // Exact times are asked for by timelines, which tell ranks' operations together by their buckets.
  if (never || op_ != nullptr || !announcer_.pending().empty() || last_operations_.keeps_exact_times()) {
    return false;
  }
  if (membership_.faults != nullptr && membership_.faults->drop[static_cast<size_t>(membership_.rank)] > 0) {
    return false;
  }
  tag_ = slots_.Begin(announcer_.passed());
  if (tag_ == 0) return false;
  if (!is_small) {  // it may be on the others, who need not wait to learn that
    slots_.Announce(tag_, kNotSmall);
    slots_.End(tag_, /*met=*/false);
    return false;
  }
  begun_ns_ = last_operations_.Now(op.bytes);
  op_ = &op;
  return true;
}

void InstantPath::Announce(const Operation& op) {
  const Request& request = op.request;
  InstantSlot& slot = slots_.Own(tag_);
  if (!TraitsOf(request.verb).has_root || request.root == membership_.rank) {
    Executor::CopyInto(op, slot.data);
  }
  const std::vector<int64_t> rows = OwnRows(request);
  std::copy(rows.begin(), rows.end(), slot.rows);
  slots_.Announce(tag_, SignatureOf(request, !rows.empty()));
}

bool InstantPath::Execute(Operation& op) const {
  const size_t rows = OwnRows(op.request).size();
  std::vector<const char*> given;
  std::vector<std::vector<int64_t>> by_rank;
  for (int r = 0; r < membership_.size; ++r) {
    const InstantSlot& slot = slots_.Of(r, tag_);
    given.push_back(slot.data);
    if (rows > 0) by_rank.emplace_back(slot.rows, slot.rows + rows);
  }
  if (rows > 0) {
    SetRows(op.request.verb, by_rank, &op.rows, &op.splits);
    if (!announcer_.RowsAreSound(op)) {  // on all ranks: rank 0 says what is wrong
      op.rows.clear();
      op.splits.reset();
      return false;
    }
  }
  // It may say in op.status already that results do not fit the memory given.
  if (Status status = executor_.ExecuteFrom(std::move(given), op); !status.ok()) op.status = status;
  return true;
}

bool InstantPath::Exchange(Operation& op) {
  if (membership_.faults != nullptr) membership_.faults->Pause(membership_.rank);
  Announce(op);
  if (membership_.faults != nullptr) membership_.faults->Shuffle();
  const bool met = slots_.Meet(tag_, patience_ns_, over_);
  if (membership_.faults != nullptr) membership_.faults->Shuffle();
  met_ns_ = last_operations_.Now(op.bytes);
  return met && Execute(op);
}

void InstantPath::End(const OperationPtr& op, bool met) {
  slots_.End(tag_, met);
  op_ = nullptr;
  if (!met) return;
  announcer_.CountInstant(*op);
  last_operations_.Carried(*op, begun_ns_, met_ns_);
  registry_.Count(*op);
  registry_.CountBucket(op->status.ok() && op->bytes > 0, /*by_engine_thread=*/false);
  registry_.Finish(op);
}

}  // namespace kolovod
