#include "engine/executor.h"

#include <algorithm>
#include <optional>
#include <string>

#include "collectives/adasum.h"
#include "collectives/codec.h"
#include "collectives/shm.h"
#include "control/fusion.h"

namespace kolovod {

namespace {
// The other ranks' outputs may fit, so the data has moved; this rank's result is an error.
void NoteMisfits(Operation* op) {
  for (size_t t = 0; t < op->buffers.size(); ++t) {
    if (op->out_bytes[t] == 0 || op->out_bytes[t] == op->buffers[t].bytes) continue;
    op->status = Status(Code::kInvalidArgument,
                        std::string(NameOf(op->request.verb)) + " '" + op->request.name + "': output " +
                            std::to_string(t) + " has " + std::to_string(op->out_bytes[t]) +
                            " bytes, but the result has " + std::to_string(op->buffers[t].bytes));
    return;
  }
}

// One index of the first dimension.
size_t RowBytes(const TensorMeta& meta) {
  size_t bytes = SizeOf(meta.dtype);
  for (size_t d = 1; d < meta.shape.size(); ++d) bytes *= static_cast<size_t>(meta.shape[d]);
  return bytes;
}
}  // namespace

Executor::Executor(const Membership& membership, std::unique_ptr<Backend> backend, bool has_slots)
    : membership_(membership),
      backend_(std::move(backend)),
      slots_(has_slots ? std::make_unique<EagerSlots>(*membership.segment, membership.topology.local_rank)
                       : nullptr) {}

bool Executor::FitsSlot(const Operation& op) const {
  const Request& request = op.request;
  size_t limit = kEagerBytes;
  size_t bytes = 0;
  for (size_t t = 0; t < op.counts.size(); ++t) {
    const DType dtype = request.tensors[t].dtype;
    bytes += EagerBackend::PlaceBytes(op.counts[t] * SizeOf(dtype));
    if (!TraitsOf(request.verb).reduces) continue;
    if (request.op == Op::kAdasum) return false;
    limit = std::min(limit, ShmBackend::OneShotLimit(membership_.config, membership_.size, kEagerBytes,
                                                     TraitsOf(dtype).converts()));
  }
  return bytes <= limit;
}

bool Executor::CopyEagerly(Operation& op) {
  const Request& request = op.request;
  if (membership_.size == 1 || request.device() != Device::kHost) return false;
  const bool unnamed = (op.tag & kUnnamedTag) != 0;
  const bool gives = (!TraitsOf(request.verb).has_root || request.root == membership_.rank) && FitsSlot(op);
  const bool announces = unnamed && OwnRows(request).size() <= kSlotRows;
  if (!gives && !announces) return false;
  char* slot = slots_->Claim(op.tag);
  if (slot == nullptr) return false;
  op.claimed = op.tag;
  if (!gives) return announces;
  CopyInto(op, slot);
  slots_->Publish(op.tag);
  return announces;
}

void Executor::CopyInto(const Operation& op, char* slot) {
  const Request& request = op.request;
  for (size_t t = 0; t < op.counts.size(); ++t) {
    slot = EagerBackend::Copy(op.inputs[t], op.counts[t], request.tensors[t].dtype, request.prescale, slot);
  }
}

Status Executor::ExecuteEager(Operation& op, bool* done) {
  const int root = TraitsOf(op.request.verb).has_root ? op.request.root : -1;
  std::optional<std::vector<const char*>> given = slots_->Find(op.tag, root);
  if (!given) return Status();
  *done = true;
  return ExecuteFrom(std::move(*given), op);
}

Status Executor::ExecuteFrom(std::vector<const char*> given, Operation& op) {
  const Request& request = op.request;
  EagerBackend by(membership_.topology.local_rank, std::move(given));
  op.was_eager = true;
  if (!TraitsOf(request.verb).fuses) return ExecuteAlone(op, by);
  for (size_t t = 0; t < op.inputs.size(); ++t) {
    const FusedRange range{request.tensors[t].dtype,
                           request.op,
                           1.0,
                           request.postscale,
                           {Piece{op.inputs[t], op.outputs[t], op.counts[t]}},
                           &request.name};
    KV_RETURN_IF_ERROR(by.Allreduce(range));
  }
  return Status();
}

Status Executor::Execute(const std::vector<OperationPtr>& all) {
  std::vector<OperationPtr> ops;  // those whose data are not there yet
  ops.reserve(all.size());
  for (const OperationPtr& op : all) {
    bool done = !op->status.ok();
    if (!done && op->tag != 0 && slots_ != nullptr) KV_RETURN_IF_ERROR(ExecuteEager(*op, &done));
    if (!done) ops.push_back(op);
  }
  KV_RETURN_IF_ERROR(ExecuteFused(ops));
  for (const OperationPtr& op : ops) KV_RETURN_IF_ERROR(ExecuteAlone(*op, *backend_));
  return Status();
}

Status Executor::ExecuteAlone(Operation& op, Backend& by) {
  const bool makes_outputs = TraitsOf(op.request.verb).makes_outputs;
  if (makes_outputs) op.buffers.resize(op.inputs.size());
  switch (op.request.verb) {
    case Verb::kBroadcast:
      KV_RETURN_IF_ERROR(Broadcast(op, by));
      break;
    case Verb::kAllgather:
      KV_RETURN_IF_ERROR(Allgather(op, by));
      break;
    case Verb::kAlltoall:
      KV_RETURN_IF_ERROR(Alltoall(op, by));
      break;
    case Verb::kReducescatter:
      KV_RETURN_IF_ERROR(Reducescatter(op, by));
      break;
    default:  // fused, or without data
      break;
  }
  if (makes_outputs) NoteMisfits(&op);
  return Status();
}

Status Executor::Broadcast(Operation& op, Backend& by) {
  const Request& request = op.request;
  for (size_t t = 0; t < op.inputs.size(); ++t) {
    KV_RETURN_IF_ERROR(by.Broadcast(Piece{op.inputs[t], op.outputs[t], op.counts[t]},
                                    request.tensors[t].dtype, request.root, request.name));
  }
  return Status();
}

Status Executor::ExecuteFused(const std::vector<OperationPtr>& ops) {
  std::vector<FusionKey> keys;
  std::vector<Piece> pieces;
  std::vector<const std::string*> names;
  for (const OperationPtr& op : ops) {
    const Request& request = op->request;
    if (!TraitsOf(request.verb).fuses) continue;
    for (size_t t = 0; t < op->inputs.size(); ++t) {
      if (op->counts[t] == 0) continue;
      const TensorMeta& meta = request.tensors[t];
      const Codec codec = CodecOf(meta.codec, meta.dtype, op->counts[t]);
      keys.push_back({meta.dtype, request.op, request.prescale, request.postscale, codec});
      pieces.push_back({op->inputs[t], op->outputs[t], op->counts[t]});
      names.push_back(&request.name);
    }
  }
  for (const std::vector<size_t>& group : GroupByKey(keys)) {
    const FusionKey& key = keys[group.front()];
    FusedRange range{key.dtype, key.op, key.prescale, key.postscale, {}, names[group.front()], key.codec};
    range.pieces.reserve(group.size());
    for (size_t i : group) range.pieces.push_back(pieces[i]);
    if (range.op == Op::kAdasum) {
      Status status = Adasum(*backend_, range, membership_.rank, membership_.size);
      if (status.code() == Code::kInternal) membership_.segment->Revoke(status.code(), status.message());
      KV_RETURN_IF_ERROR(status);
    } else {
      KV_RETURN_IF_ERROR(backend_->Allreduce(range));
    }
  }
  return Status();
}

Status Executor::OutputFor(Operation& op, size_t t, size_t bytes, char** out) {
  OutputBuffer& buffer = op.buffers[t];
  buffer.bytes = bytes;
  if (op.request.device() != Device::kHost) {
    *out = reinterpret_cast<char*>(&buffer);
    return Status();
  }
  if (op.out_bytes[t] == bytes && bytes > 0) {
    *out = static_cast<char*>(op.outputs[t]);
    return Status();
  }
  buffer.data = AllocateOutput(bytes);
  *out = buffer.data.get();
  if (buffer.data != nullptr) return Status();
  const Status status(Code::kInternal, membership_.Describe(membership_.rank) + " has no memory for " +
                                           std::to_string(bytes) + " bytes of " + NameOf(op.request.verb) +
                                           " '" + op.request.name + "'");
  membership_.segment->Revoke(status.code(), status.message());
  return status;
}

Status Executor::Allgather(Operation& op, Backend& by) {
  for (size_t t = 0; t < op.inputs.size(); ++t) {
    const size_t row_bytes = RowBytes(op.request.tensors[t]);
    std::vector<size_t> bytes;
    size_t total = 0;
    for (int64_t rows : op.rows[t]) {
      bytes.push_back(static_cast<size_t>(rows) * row_bytes);
      total += bytes.back();
    }
    char* out = nullptr;
    KV_RETURN_IF_ERROR(OutputFor(op, t, total, &out));
    KV_RETURN_IF_ERROR(by.Allgather(op.inputs[t], out, bytes));
  }
  return Status();
}

Status Executor::Alltoall(Operation& op, Backend& by) {
  const size_t row_bytes = RowBytes(op.request.tensors[0]);
  std::vector<int64_t> received;
  size_t total = 0;
  for (int s = 0; s < membership_.size; ++s) {
    received.push_back(op.splits->received(s, membership_.rank));
    total += static_cast<size_t>(received.back()) * row_bytes;
  }
  char* out = nullptr;
  KV_RETURN_IF_ERROR(OutputFor(op, 0, total, &out));
  KV_RETURN_IF_ERROR(by.Alltoall(static_cast<const char*>(op.inputs[0]), out, *op.splits, row_bytes));
  op.splits.reset();
  op.rows = {std::move(received)};
  return Status();
}

Status Executor::Reducescatter(Operation& op, Backend& by) {
  const Request& request = op.request;
  for (size_t t = 0; t < op.inputs.size(); ++t) {
    const TensorMeta& meta = request.tensors[t];
    const auto rows = static_cast<size_t>(meta.shape[0]);
    const size_t row_elements = RowBytes(meta) / SizeOf(meta.dtype);
    std::vector<size_t> counts;
    for (int r = 0; r < membership_.size; ++r)
      counts.push_back(PartOf(rows, membership_.size, r) * row_elements);
    char* out = nullptr;
    KV_RETURN_IF_ERROR(
        OutputFor(op, t, counts[static_cast<size_t>(membership_.rank)] * SizeOf(meta.dtype), &out));
    if (op.counts[t] == 0) continue;
    const FusedRange range{meta.dtype,
                           request.op,
                           request.prescale,
                           request.postscale,
                           {Piece{op.inputs[t], out, op.counts[t]}},
                           &request.name};
    KV_RETURN_IF_ERROR(by.Reducescatter(range, counts));
  }
  return Status();
}

}  // namespace kolovod
