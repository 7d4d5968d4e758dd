// Buckets of operations that all ranks have agreed on, carried out by the backend. Runs under the lease.
#include "collectives/adasum.h"
#include "control/fusion.h"
#include "engine/engine.h"

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

Status Engine::ExecuteBucket(bool* progressed) {
  if (!CanExecute()) return Status();
  std::optional<uint64_t> end = control_->SealedEnd(bucket_, executed_);
  if (!end) {
    std::vector<size_t> bytes;
    bytes.reserve(ready_.size());
    for (const OperationPtr& op : ready_) bytes.push_back(op == nullptr ? 0 : op->bytes);
    const size_t taken = EntriesForBucket(bytes, static_cast<size_t>(config_.fusion_bytes));
    end = control_->Seal(bucket_, executed_, executed_ + taken);
  }
  while (control_->position() < *end) {
    // The sealing rank saw entries that this one has not read yet: they are in the log.
    KV_RETURN_IF_ERROR(control_->Pump());
    KV_RETURN_IF_ERROR(control_->ReadLog(&ready_));
    if (control_->position() >= *end) break;
    KV_RETURN_IF_ERROR(waiter_->Wait([&] { return control_->HasInput(); }, [&] { control_->RingLagging(); },
                                     /*in_bucket=*/true));
  }
  std::vector<OperationPtr> ops;
  while (executed_ < *end) {
    if (ready_.front() != nullptr && ready_.front()->links) {
      UseLinks(*ready_.front()->links);
      link_revisions_.fetch_add(1, std::memory_order_relaxed);
    } else if (ready_.front() != nullptr) {
      ops.push_back(std::move(ready_.front()));
    }
    ready_.pop_front();
    ++executed_;
  }
  ++bucket_;
  *progressed = true;
  ready_bytes_.store(0, std::memory_order_relaxed);
  if (mesh_ != nullptr) mesh_->BeginOperation(static_cast<uint32_t>(bucket_));
  KeepStart(ops);
  Status status = Execute(ops);
  if (!status.ok()) {
    if (status.code() == Code::kRankLost) status = EndForAll(status);
    {
      std::lock_guard lock(mutex_);
      for (const OperationPtr& op : ops) FailLocked(op, status);
    }
    RunCallbacks();
    return status;
  }
  if (eager_ != nullptr) eager_->Executed(executed_);
  if (hierarchical_ != nullptr && topology_.is_root()) {
    if (const std::optional<LinkCost> cost = hierarchical_->Revise()) control_->TellLinks(*cost);
  }
  Complete(ops);
  return Status();
}

Status Engine::Execute(const std::vector<OperationPtr>& all) {
  std::vector<OperationPtr> ops;  // those whose data are not there yet
  ops.reserve(all.size());
  for (const OperationPtr& op : all) {
    bool done = !op->status.ok();
    if (!done && op->tag != 0 && eager_ != nullptr) KV_RETURN_IF_ERROR(ExecuteStaged(*op, &done));
    if (!done) ops.push_back(op);
  }
  KV_RETURN_IF_ERROR(ExecuteReductions(ops));
  for (const OperationPtr& op : ops) KV_RETURN_IF_ERROR(ExecuteMove(*op, *backend_));
  return Status();
}

Status Engine::ExecuteMove(Operation& op, Backend& by) {
  const Request& request = op.request;
  if (TraitsOf(request.verb).makes_outputs) op.buffers.resize(op.inputs.size());
  if (request.verb == Verb::kAllgather) KV_RETURN_IF_ERROR(ExecuteAllgather(op, by));
  if (request.verb == Verb::kAlltoall) KV_RETURN_IF_ERROR(ExecuteAlltoall(op, by));
  if (request.verb == Verb::kReducescatter) KV_RETURN_IF_ERROR(ExecuteReducescatter(op, by));
  if (TraitsOf(request.verb).makes_outputs) NoteMisfits(&op);
  if (request.verb != Verb::kBroadcast) return Status();
  for (size_t t = 0; t < op.inputs.size(); ++t) {
    KV_RETURN_IF_ERROR(by.Broadcast(Piece{op.inputs[t], op.outputs[t], op.counts[t]},
                                    request.tensors[t].dtype, request.root, request.name));
  }
  return Status();
}

Status Engine::ExecuteReductions(const std::vector<OperationPtr>& ops) {
  std::vector<FusionKey> keys;
  std::vector<Piece> pieces;
  std::vector<const std::string*> names;
  for (const OperationPtr& op : ops) {
    const Request& request = op->request;
    if (!TraitsOf(request.verb).fuses) continue;
    for (size_t t = 0; t < op->inputs.size(); ++t) {
      if (op->counts[t] == 0) continue;
      keys.push_back({request.tensors[t].dtype, request.op, request.prescale, request.postscale});
      pieces.push_back({op->inputs[t], op->outputs[t], op->counts[t]});
      names.push_back(&request.name);
    }
  }
  for (const std::vector<size_t>& group : GroupByKey(keys)) {
    const FusionKey& key = keys[group.front()];
    FusedRange range{key.dtype, key.op, key.prescale, key.postscale, {}, names[group.front()]};
    range.pieces.reserve(group.size());
    for (size_t i : group) range.pieces.push_back(pieces[i]);
    if (range.op == Op::kAdasum) {
      Status status = Adasum(*backend_, range, rank_, size_);
      if (status.code() == Code::kInternal) segment_->Revoke(status.code(), status.message());
      KV_RETURN_IF_ERROR(status);
    } else {
      KV_RETURN_IF_ERROR(backend_->Allreduce(range));
    }
  }
  return Status();
}

Status Engine::OutputFor(Operation& op, size_t t, size_t bytes, char** out) {
  OutputBuffer& buffer = op.buffers[t];
  buffer.bytes = bytes;
  if (op.out_bytes[t] == bytes && bytes > 0) {
    *out = static_cast<char*>(op.outputs[t]);
    return Status();
  }
  buffer.data = AllocateOutput(bytes);
  *out = buffer.data.get();
  if (buffer.data != nullptr) return Status();
  const Status status(Code::kInternal, liveness_->Describe(rank_) + " has no memory for " +
                                           std::to_string(bytes) + " bytes of " + NameOf(op.request.verb) +
                                           " '" + op.request.name + "'");
  segment_->Revoke(status.code(), status.message());
  return status;
}

Status Engine::ExecuteAllgather(Operation& op, Backend& by) {
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

Status Engine::ExecuteAlltoall(Operation& op, Backend& by) {
  const size_t row_bytes = RowBytes(op.request.tensors[0]);
  std::vector<int64_t> received;
  size_t total = 0;
  for (int s = 0; s < size_; ++s) {
    received.push_back(op.splits->received(s, rank_));
    total += static_cast<size_t>(received.back()) * row_bytes;
  }
  char* out = nullptr;
  KV_RETURN_IF_ERROR(OutputFor(op, 0, total, &out));
  KV_RETURN_IF_ERROR(by.Alltoall(static_cast<const char*>(op.inputs[0]), out, *op.splits, row_bytes));
  op.splits.reset();
  op.rows = {std::move(received)};
  return Status();
}

Status Engine::ExecuteReducescatter(Operation& op, Backend& by) {
  const Request& request = op.request;
  for (size_t t = 0; t < op.inputs.size(); ++t) {
    const TensorMeta& meta = request.tensors[t];
    const auto rows = static_cast<size_t>(meta.shape[0]);
    const size_t row_elements = RowBytes(meta) / SizeOf(meta.dtype);
    std::vector<size_t> counts;
    for (int r = 0; r < size_; ++r) counts.push_back(PartOf(rows, size_, r) * row_elements);
    char* out = nullptr;
    KV_RETURN_IF_ERROR(OutputFor(op, t, counts[static_cast<size_t>(rank_)] * SizeOf(meta.dtype), &out));
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
