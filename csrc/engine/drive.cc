// The driving half of the engine: everything here runs under the lease.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "collectives/adasum.h"
#include "control/fusion.h"
#include "engine/engine.h"

namespace kolovod {

namespace {
constexpr int64_t kCallerYieldNs = 200'000;
constexpr int64_t kCrowdedYieldNs = 1'000'000;
constexpr int64_t kThreadYieldNs = 20'000;
constexpr int64_t kCrowdedPatienceNs = 200'000;
constexpr int64_t kNewsNs = 300'000'000;

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

// A connection for data broke: the world is over, since the others of this host wait for what it should have
// brought. The other end may have closed it because of what it was told; that comes here within moments, too,
// and names the first cause.
Status EndForAll(Segment& segment, const std::atomic<bool>& stop, const Status& broken) {
  const int64_t end_ns = NowNs() + kNewsNs;
  while (!segment.revoked() && !stop.load() && NowNs() < end_ns) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  segment.Revoke(broken.code(), broken.message());
  return segment.RevokedStatus();
}

// One index of the first dimension.
size_t RowBytes(const TensorMeta& meta) {
  size_t bytes = SizeOf(meta.dtype);
  for (size_t d = 1; d < meta.shape.size(); ++d) bytes *= static_cast<size_t>(meta.shape[d]);
  return bytes;
}
}  // namespace

bool Engine::TryLease(bool background, std::function<bool()> interrupted) {
  if (lease_.load(std::memory_order_relaxed) || lease_.exchange(true, std::memory_order_acquire)) {
    return false;
  }
  self().driving.store(1, std::memory_order_seq_cst);
  background_ = background;
  const bool crowded = config_.cores < topology_.local_size();
  WaitBudget budget;
  if (background) {
    budget.yield_ns = kThreadYieldNs;  // the core belongs to whoever computes gradients
  } else {
    budget.spin_ns = crowded ? 0 : config_.spin_us * 1000;
    budget.yield_ns = crowded ? kCrowdedYieldNs : kCallerYieldNs;
    budget.patience_ns = crowded ? kCrowdedPatienceNs : 0;
  }
  // A yield gives the rest of the turn away: with gradients being computed on its core the thread came late,
  // and a link of 1 Gbit/s idled for a third of the time.
  if (mesh_ != nullptr) mesh_->set_budget(background ? WaitBudget{} : budget);
  waiter_->Configure(budget, std::move(interrupted));
  waiter_->NoteCore();
  return true;
}

void Engine::ReleaseLease() {
  self().driving.store(0, std::memory_order_seq_cst);
  // Read before letting go; a peer that saw `driving` and went to sleep is served by our thread.
  const bool more = HasWork() || driven_.load() > 0;
  const bool was_background = background_;
  // What this look has read of the uplink nobody else will be told of.
  const bool unread = uplink_ != nullptr && uplink_->HasData();
  // A caller comes again soon; and waking that thread at every small operation would cost more than they do.
  if (uplink_ != nullptr && was_background) uplink_->LookAway();
  lease_.store(false, std::memory_order_seq_cst);
  if (unread || (more && !was_background)) segment_->RingIdle(topology_.local_rank);
  if (lease_wanted_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
}

bool Engine::CanExecute() {
  return !ready_.empty() && (control_->MaySeal() || control_->SealedEnd(bucket_, executed_).has_value());
}

bool Engine::HasWork() {
  return CanExecute() || control_->HasInput() ||
         leavers_seen_.load(std::memory_order_relaxed) !=
             segment_->header().left_count.load(std::memory_order_seq_cst);
}

Status Engine::Drive(const Operation* until, int64_t deadline_ns) {
  const auto is_late = [&] { return deadline_ns != 0 && NowNs() >= deadline_ns; };
  const auto done = [&] { return until != nullptr && until->done.load(std::memory_order_acquire); };
  const auto lets_go = [&] { return background_ && lease_wanted_.load(std::memory_order_seq_cst) > 0; };
  while (!done()) {
    bool progressed = false;
    Status status = Step(&progressed);
    if (status.ok() && !progressed) {
      if (until == nullptr && driven_.load() == 0) return Status();
      status = waiter_->Wait([&] { return done() || HasWork() || lets_go() || is_late(); },
                             [&] { control_->RingLagging(); }, /*in_bucket=*/false);
    }
    if (!status.ok()) {
      // Interrupted before anything had started: only the caller gives up.
      if (status.code() == Code::kInterrupted && !segment_->revoked()) return status;
      // A defect here is the end for all: the others would wait for this rank.
      if (status.code() == Code::kInternal) segment_->Revoke(status.code(), status.message());
      Break(status);
      return BrokenStatus();
    }
    if (lets_go() || is_late()) return Status();
  }
  return Status();
}

Status Engine::Step(bool* progressed) {
  if (waiter_->MustStop()) return waiter_->Stopped();
  if (control_->HasInput()) {
    KV_RETURN_IF_ERROR(control_->Pump());
    KV_RETURN_IF_ERROR(control_->ReadLog(&ready_));
  }
  if (leavers_seen_.load(std::memory_order_relaxed) !=
      segment_->header().left_count.load(std::memory_order_seq_cst)) {
    NoticeLeavers();
    *progressed = true;
  }
  return ExecuteBucket(progressed);
}

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
    if (ready_.front() != nullptr) ops.push_back(std::move(ready_.front()));
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
    if (status.code() == Code::kRankLost) status = EndForAll(*segment_, stop_, status);
    {
      std::lock_guard lock(mutex_);
      for (const OperationPtr& op : ops) FailLocked(op, status);
    }
    RunCallbacks();
    return status;
  }
  Complete(ops);
  return Status();
}

Status Engine::Execute(const std::vector<OperationPtr>& ops) {
  KV_RETURN_IF_ERROR(ExecuteReductions(ops));
  for (const OperationPtr& op : ops) {
    if (!op->status.ok()) continue;
    if (MakesOutputs(op->request.verb)) op->buffers.resize(op->inputs.size());
    if (op->request.verb == Verb::kAllgather) KV_RETURN_IF_ERROR(ExecuteAllgather(*op));
    if (op->request.verb == Verb::kAlltoall) KV_RETURN_IF_ERROR(ExecuteAlltoall(*op));
    if (op->request.verb == Verb::kReducescatter) KV_RETURN_IF_ERROR(ExecuteReducescatter(*op));
    if (MakesOutputs(op->request.verb)) NoteMisfits(op.get());
    if (op->request.verb != Verb::kBroadcast) continue;
    for (size_t t = 0; t < op->inputs.size(); ++t) {
      KV_RETURN_IF_ERROR(backend_->Broadcast(Piece{op->inputs[t], op->outputs[t], op->counts[t]},
                                             op->request.tensors[t].dtype, op->request.root,
                                             op->request.name));
    }
  }
  return Status();
}

Status Engine::ExecuteReductions(const std::vector<OperationPtr>& ops) {
  std::vector<FusionKey> keys;
  std::vector<Piece> pieces;
  std::vector<const std::string*> names;
  for (const OperationPtr& op : ops) {
    const Request& request = op->request;
    if (request.verb != Verb::kAllreduce || !op->status.ok()) continue;
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

Status Engine::ExecuteAllgather(Operation& op) {
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
    KV_RETURN_IF_ERROR(backend_->Allgather(op.inputs[t], out, bytes));
  }
  return Status();
}

Status Engine::ExecuteAlltoall(Operation& op) {
  const size_t row_bytes = RowBytes(op.request.tensors[0]);
  const auto size = static_cast<size_t>(size_);
  std::vector<size_t> bytes;
  for (int64_t rows : op.rows[0]) bytes.push_back(static_cast<size_t>(rows) * row_bytes);
  std::vector<int64_t> received;
  size_t total = 0;
  for (size_t s = 0; s < size; ++s) {
    const size_t at = s * size + static_cast<size_t>(rank_);
    received.push_back(op.rows[0][at]);
    total += bytes[at];
  }
  char* out = nullptr;
  KV_RETURN_IF_ERROR(OutputFor(op, 0, total, &out));
  KV_RETURN_IF_ERROR(backend_->Alltoall(static_cast<const char*>(op.inputs[0]), out, bytes));
  op.rows = {std::move(received)};
  return Status();
}

Status Engine::ExecuteReducescatter(Operation& op) {
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
    KV_RETURN_IF_ERROR(backend_->Reducescatter(range, counts));
  }
  return Status();
}

void Engine::Complete(const std::vector<OperationPtr>& ops) {
  {
    std::lock_guard lock(mutex_);
    bool data = false;
    KeepEnd(ops);
    for (const OperationPtr& op : ops) {
      if (op->request.verb == Verb::kJoin) {
        joined_ = false;
        next_unnamed_.store(1);  // nothing is pending anywhere, and the ranks have numbered unequally many
      }
      control_->Erase(op->request.name);
      if (op->status.ok()) {
        ++stats_.operations;
        stats_.bytes += op->bytes;
        data = data || op->bytes > 0;
      }
      FinishLocked(op);
    }
    if (data) ++stats_.buckets;
    ++(background_ ? stats_.drives_thread : stats_.drives_caller);
    if (sleeping_callers_ > 0) changed_.notify_all();
  }
  RunCallbacks();
}

void Engine::FinishLocked(const OperationPtr& op) {
  if (op->on_done != nullptr) {
    driven_.fetch_sub(1);
    finished_.push_back(op);
  }
  op->done.store(true, std::memory_order_release);
}

void Engine::RunCallbacks() {
  std::vector<OperationPtr> finished;
  {
    std::lock_guard lock(mutex_);
    finished.swap(finished_);
  }
  if (finished.empty()) return;
  calling_back_.store(std::this_thread::get_id());
  for (const OperationPtr& op : finished) {
    op->on_done(*op);
    op->on_done = nullptr;  // what it holds on to goes with it, though a handle may keep the operation
  }
  calling_back_.store(std::thread::id());
}

void Engine::NoticeLeavers() {
  leavers_seen_.store(segment_->header().left_count.load(std::memory_order_seq_cst));
  if (segment_->revoked()) return;  // it left work behind and has said so: that is the better reason
  std::string who;
  for (int r = 0; r < size_ && who.empty(); ++r) {
    if (r != rank_ && segment_->left(r).load(std::memory_order_seq_cst) != 0) who = liveness_->Describe(r);
  }
  for (int r = 1; r < topology_.local_size() && topology_.leads(); ++r) {
    const int rank = topology_.local_ranks[static_cast<size_t>(r)];
    if (told_left_[static_cast<size_t>(r)] || segment_->left(rank).load() == 0) continue;
    told_left_[static_cast<size_t>(r)] = true;
    control_->TellLeft(rank);
  }
  if (who.empty()) return;
  // The leaver had nothing pending, so all it ever announced is in the log by now.
  if (Status status = control_->ReadLog(&ready_); !status.ok()) return;
  const Status status(Code::kRankLeft, who + " has left the world (it shut down)");
  {
    std::lock_guard lock(mutex_);
    std::vector<OperationPtr> lost;
    for (const auto& [name, op] : control_->pending()) {
      if (!op->in_log) lost.push_back(op);
    }
    for (const OperationPtr& op : lost) FailLocked(op, status);
    changed_.notify_all();
  }
  RunCallbacks();
}

void Engine::Break(const Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (broken_.ok()) broken_ = status.code() == Code::kShutDown ? status : WithLastOperations(status);
    std::vector<OperationPtr> lost;
    for (const auto& [name, op] : control_->pending()) lost.push_back(op);
    for (const OperationPtr& op : lost) FailLocked(op, broken_);
    ready_.clear();
    changed_.notify_all();
  }
  RunCallbacks();
}

Status Engine::BrokenStatus() {
  std::lock_guard lock(mutex_);
  return broken_;
}

void Engine::FailLocked(const OperationPtr& op, const Status& status) {
  if (op->done.load(std::memory_order_acquire)) return;
  op->status = Status(status.code(), status.message() + "; pending here: " + NameOf(op->request.verb) + " '" +
                                         op->request.name + "'");
  if (status.code() == Code::kShutDown) abandoned_.push_back(op->request.name);
  control_->Erase(op->request.name);
  KeepEnd({op});
  FinishLocked(op);
}

}  // namespace kolovod
