// Operations that take a slot (collectives/eager.h): which ones, and what a rank gives. What goes into the
// slots, and the order of addition, are those of ShmBackend's one exchange: the bits of a result do not
// depend on the way.
#include "engine/engine.h"

namespace kolovod {

bool Engine::FitsSlot(const Operation& op) const {
  const Request& request = op.request;
  size_t limit = kEagerBytes;
  size_t bytes = 0;
  for (size_t t = 0; t < op.counts.size(); ++t) {
    const DType dtype = request.tensors[t].dtype;
    bytes += StagedBackend::PlaceBytes(op.counts[t] * SizeOf(dtype));
    if (!TraitsOf(request.verb).reduces) continue;
    if (request.op == Op::kAdasum) return false;
    limit =
        std::min(limit, ShmBackend::OneShotLimit(config_, size_, kEagerBytes, TraitsOf(dtype).converts()));
  }
  return bytes <= limit;
}

bool Engine::Stage(Operation& op) {
  const Request& request = op.request;
  if (size_ == 1) return false;
  const bool unnamed = (op.tag & kUnnamedTag) != 0;
  const bool gives = (!TraitsOf(request.verb).has_root || request.root == rank_) && FitsSlot(op);
  const bool announces = unnamed && OwnRows(request).size() <= kSlotRows;
  if (!gives && !announces) return false;
  char* slot = eager_->Claim(op.tag);
  if (slot == nullptr) return false;
  op.claimed = op.tag;
  if (!gives) return announces;
  for (size_t t = 0; t < op.counts.size(); ++t) {
    slot = StagedBackend::Stage(op.inputs[t], op.counts[t], request.tensors[t].dtype, request.prescale, slot);
  }
  eager_->Publish(op.tag);
  return announces;
}

Status Engine::ExecuteStaged(Operation& op, bool* done) {
  const Request& request = op.request;
  const int root = TraitsOf(request.verb).has_root ? request.root : -1;
  std::optional<StagedBackend> by = eager_->Find(op.tag, root);
  if (!by) return Status();
  *done = true;
  op.was_staged = true;
  if (!TraitsOf(request.verb).fuses) return ExecuteMove(op, *by);
  for (size_t t = 0; t < op.inputs.size(); ++t) {
    const FusedRange range{request.tensors[t].dtype,
                           request.op,
                           1.0,
                           request.postscale,
                           {Piece{op.inputs[t], op.outputs[t], op.counts[t]}},
                           &request.name};
    KV_RETURN_IF_ERROR(by->Allreduce(range));
  }
  return Status();
}

}  // namespace kolovod
