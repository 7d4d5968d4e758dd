#include "engine/engine.h"

#include <algorithm>
#include <chrono>

#include "engine/validate.h"

namespace kolovod {

namespace {

constexpr const char* kUnnamed = "unnamed.";
constexpr const char* kJoin = "unnamed.join";  // one name: ranks that join have submitted unequally much
constexpr int kFarewellMs = 500;               // for the last words to other hosts
constexpr std::chrono::milliseconds kSignalPeriod(100);

std::string NameOfTransfer(const Request& request, const std::vector<int>& ranks) {
  const std::string peer =
      request.root < 0 ? "any rank" : "rank " + std::to_string(ranks[static_cast<size_t>(request.root)]);
  return peer + ", tag " + std::to_string(request.splits.front());
}

Status NotComplete(const Operation& op, double after_s) {
  return Status(Code::kTimeout, std::string(NameOf(op.request.verb)) + " '" + op.request.name +
                                    "' is not complete after " + std::to_string(after_s) +
                                    " s; it is still pending and may be waited for again");
}

}  // namespace

Engine::~Engine() {
  // Without this, Attach had failed and there is no world to leave.
  if (transfers_ != nullptr && !forgotten_.load()) Shutdown();
  if (!forgotten_.load()) DropUnusedOutputs();
}

Status Engine::Submit(Request request, std::vector<SubmittedTensor> tensors, bool blocking, uint64_t* handle,
                      Callback on_done, int64_t drive_ns) {
  if (forgotten_.load()) return Status(Code::kShutDown, "this process was forked from a rank");
  if (request.name.starts_with(kUnnamed)) {
    return Status(Code::kInvalidArgument, "the name '" + request.name +
                                              "' is not to be had: names that begin with '" +
                                              std::string(kUnnamed) + "' are the engine's own");
  }
  const bool is_join = request.verb == Verb::kJoin;
  const bool is_transfer = TraitsOf(request.verb).is_transfer;
  auto op = std::make_shared<Operation>();
  if (is_join) {
    request.name = kJoin;
    request.cacheable = false;
  } else if (is_transfer) {
    request.cacheable = false;
  } else if (request.name.empty()) {
    // Before anything is refused, so that the ranks' numbers stay level.
    const uint64_t number = next_unnamed_.fetch_add(1);
    request.name = kUnnamed + std::to_string(number);
    request.cacheable = false;
    op->tag = UnnamedTag(joins_.load(), number);
  }
  KV_RETURN_IF_ERROR(Validate(request, tensors, ranks_));
  if (is_transfer) request.name = NameOfTransfer(request, ranks_);
  for (SubmittedTensor& tensor : tensors) {
    const size_t count = ElementsOf(tensor.meta);
    op->counts.push_back(count);
    op->inputs.push_back(tensor.in);
    op->outputs.push_back(tensor.out);
    op->out_bytes.push_back(tensor.out_bytes);
    op->bytes += count * SizeOf(tensor.meta.dtype);
    request.tensors.push_back(std::move(tensor.meta));
  }
  if (!TraitsOf(request.verb).reduces) {
    request.op = Op::kSum;
    request.prescale = request.postscale = 1.0;
  }
  op->request = std::move(request);
  op->on_done = std::move(on_done);
  const bool driven = op->on_done != nullptr;
  const bool drives = driven && drive_ns > 0 && driven_.load() == 0;
  bool appended;
  const auto r = static_cast<size_t>(rank_);
  {
    std::lock_guard lock(mutex_);
    if (!broken_.ok()) return broken_;
    if (Status status = WorldStatus(is_transfer); !status.ok()) {
      return segment_->revoked() ? WithLastOperations(status) : status;
    }
    if (joined_) {
      return Status(Code::kInvalidArgument, std::string(NameOf(op->request.verb)) + " '" + op->request.name +
                                                "': rank " + std::to_string(ranks_[r]) +
                                                " has joined and has no data until join returns");
    }
    if (!is_transfer && control_->pending().contains(op->request.name)) {
      return Status(Code::kDuplicateName, "'" + op->request.name + "' is already pending on rank " +
                                              std::to_string(ranks_[r]) +
                                              ": wait for it before submitting the same name again");
    }
    if (handle != nullptr) {
      *handle = next_handle_++;
      handles_[*handle] = op;
    }
    if (driven) driven_.fetch_add(1);
    // The caller will drive at once, so that nobody wakes the engine thread, which would take the lease from
    // it. If it is interrupted before, the engine thread's next look sets this right.
    if (blocking || drives) self().driving.store(1, std::memory_order_seq_cst);
    joined_ = is_join;
    // The time before, the rest after: others need not wait for it.
    const int64_t now_ns = RecordNs(op->bytes, ExactTimes());
    if (is_join) {
      control_->Join(op);
      appended = false;
    } else if (is_transfer) {
      transfers_->Submit(op);
      control_->CountBeside(transfers_->pending().size());
      appended = false;
    } else {
      appended = control_->Announce(op);
    }
    KeepRecord(*op, now_ns);
  }
  if (is_transfer && !blocking) StartTransfer();
  if (drives) {
    DriveFor(*op, drive_ns);
  } else if (driven) {
    segment_->RingIdle(topology_.local_rank);
  } else if (!blocking && appended && ready_bytes_.fetch_add(op->bytes) + op->bytes >= kick_bytes_) {
    ready_bytes_.store(0);
    segment_->RingIdle(topology_.local_rank);
  }
  return Status();
}

// A rank that leaves with work behind revokes first, so that reason is looked at last. What it has sent can
// still be received.
Status Engine::WorldStatus(bool for_transfer) {
  int leaver = -1;
  if (!for_transfer && segment_->header().left_count.load(std::memory_order_seq_cst) != 0) {
    for (int r = 0; r < size_; ++r) {
      if (r != rank_ && segment_->left(r).load(std::memory_order_seq_cst) != 0) leaver = r;
    }
  }
  if (segment_->revoked()) return segment_->RevokedStatus();
  if (leaver < 0) return Status();
  return Status(Code::kRankLeft, liveness_->Describe(leaver) + " has left the world (it shut down)");
}

OperationPtr Engine::Find(uint64_t handle) {
  std::lock_guard lock(mutex_);
  const auto found = handles_.find(handle);
  return found == handles_.end() ? nullptr : found->second;
}

Status Engine::Wait(uint64_t handle, double timeout_s, const std::function<bool()>& interrupted) {
  const OperationPtr op = Find(handle);
  if (op == nullptr) {
    return Status(Code::kInvalidArgument,
                  "handle " + std::to_string(handle) + " is unknown: never given out, or already waited for");
  }
  if (calling_back_.load() == std::this_thread::get_id() && !op->done.load(std::memory_order_acquire)) {
    return Status(Code::kInvalidArgument, "waiting for '" + op->request.name +
                                              "' inside a completion callback would never end: the thread "
                                              "that runs callbacks is the one that works");
  }
  if (timeout_s >= 0) {
    driven_.fetch_add(1);  // the engine thread drives as if the operation had a callback
    NudgeForAsync();
    const Status status = WaitAsleep(op, timeout_s, /*wants_lease=*/false, interrupted);
    if (driven_.fetch_sub(1) == 1) segment_->RingDriver(topology_.local_rank);  // it may stop
    return status.ok() ? op->status : status;
  }
  while (!op->done.load(std::memory_order_acquire)) {
    if (TryLease(/*background=*/false, interrupted)) {
      const Status status = Drive(op.get());
      ReleaseLease();
      if (!status.ok() && !op->done.load(std::memory_order_acquire)) return status;
    } else {
      // The engine thread drives: it hands the lease over between buckets.
      lease_wanted_.fetch_add(1);
      if (self().driver_sleeping.load(std::memory_order_seq_cst) != 0) {
        segment_->RingDriver(topology_.local_rank);
      }
      const Status status = WaitAsleep(op, 0.1, /*wants_lease=*/true, interrupted);
      lease_wanted_.fetch_sub(1);
      // It let go for this caller, which may not need the lease any more.
      if (op->done.load(std::memory_order_acquire) &&
          (MustDrive() || self().pending.load(std::memory_order_seq_cst) != 0)) {
        segment_->RingIdle(topology_.local_rank);
      }
      if (!status.ok() && status.code() != Code::kTimeout) return status;
    }
  }
  return op->status;
}

Status Engine::WaitDriving(uint64_t handle, double timeout_s, const std::function<bool()>& interrupted) {
  const int64_t deadline_ns = NowNs() + static_cast<int64_t>(std::min(timeout_s, 1e8) * 1e9);
  bool is_late = false;
  const Status status = Wait(handle, -1, [&] {
    is_late = NowNs() >= deadline_ns;
    return is_late || (interrupted && interrupted());
  });
  if (!is_late || status.code() != Code::kInterrupted || segment_->revoked()) return status;
  const OperationPtr op = Find(handle);
  return op == nullptr ? status : NotComplete(*op, timeout_s);
}

void Engine::DriveFor(const Operation& op, int64_t drive_ns) {
  if (!TryLease(/*background=*/false, nullptr)) return segment_->RingIdle(topology_.local_rank);
  (void)Drive(&op, NowNs() + drive_ns);  // an error of it is that of every pending operation
  ReleaseLease();
}

// Leaves the driving to the engine thread: a driver cannot give up in the middle of a bucket. Also
// returns early, with kTimeout, when the lease is free for a caller that wants it.
Status Engine::WaitAsleep(const OperationPtr& op, double timeout_s, bool wants_lease,
                          const std::function<bool()>& interrupted) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline =
      Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(std::min(timeout_s, 1e8) * 1e9));
  while (!op->done.load(std::memory_order_acquire)) {
    {
      std::unique_lock lock(mutex_);
      ++sleeping_callers_;
      changed_.wait_until(lock, std::min(deadline, Clock::now() + kSignalPeriod), [&] {
        return op->done.load(std::memory_order_acquire) || (wants_lease && !lease_.load());
      });
      --sleeping_callers_;
    }
    if (op->done.load(std::memory_order_acquire)) break;
    if (interrupted && interrupted()) {
      return Status(Code::kInterrupted,
                    liveness_->Describe(rank_) + " was interrupted (by a signal or its time limit)");
    }
    if ((wants_lease && !lease_.load()) || Clock::now() >= deadline) {
      return NotComplete(*op, timeout_s);
    }
  }
  return Status();
}

// Wakes the threads that could bring an operation forward while no caller drives.
void Engine::NudgeForAsync() {
  segment_->RingIdle(topology_.local_rank);
  if (!topology_.leads() && segment_->rank(0).driving.load() == 0) segment_->RingIdle(0);
}

Status Engine::Poll(uint64_t handle, bool* done) {
  const OperationPtr op = Find(handle);
  if (op == nullptr) {
    return Status(Code::kInvalidArgument, "handle " + std::to_string(handle) + " is unknown");
  }
  *done = op->done.load(std::memory_order_acquire);
  if (!*done) NudgeForAsync();
  return Status();
}

Status Engine::Release(uint64_t handle, bool* done) {
  std::lock_guard lock(mutex_);
  const auto found = handles_.find(handle);
  if (found == handles_.end()) {
    return Status(Code::kInvalidArgument, "handle " + std::to_string(handle) + " is unknown");
  }
  *done = found->second->done.load(std::memory_order_acquire);
  if (*done) handles_.erase(found);
  return Status();
}

size_t Engine::Pending() {
  std::lock_guard lock(mutex_);
  return control_->pending().size() + transfers_->pending().size();
}

void Engine::EngineThread() {
  while (!stop_.load()) {
    const uint32_t bell = self().idle_bell.load(std::memory_order_seq_cst);
    if (TryLease(/*background=*/true, nullptr)) {
      waiter_->CheckPeers();
      const Status status = Drive(nullptr);
      (void)status;  // Drive has failed every pending operation with it
      ReleaseLease();
    }
    SpreadRevocation();
    late_->Tick();
    if (stop_.load()) break;
    self().idle_sleeping.store(1, std::memory_order_seq_cst);
    FutexWait(&self().idle_bell, bell, idle_sleep_ns_);
    self().idle_sleeping.store(0, std::memory_order_seq_cst);
  }
}

void Engine::Abort(const std::string& message) {
  segment_->Revoke(Code::kInterrupted, liveness_->Describe(rank_) + " aborted: " + message);
}

void Engine::Shutdown() {
  std::lock_guard shutting(shutdown_mutex_);
  if (shut_down_ || forgotten_.load()) return;
  shut_down_ = true;
  const bool killed = faults_ != nullptr && faults_->killed[static_cast<size_t>(rank_)].load();
  stop_.store(true);   // first: whatever fails here fails with kShutDown
  SpreadRevocation();  // why, before that this rank leaves
  if (!killed) AnnounceLeave();
  segment_->RingDriver(topology_.local_rank);
  segment_->RingIdle(topology_.local_rank);
  if (thread_.joinable()) thread_.join();
  if (uplink_ != nullptr) {
    SpreadRevocation();
    uplink_->Stop(kFarewellMs);
  }
  if (switchboard_ != nullptr) switchboard_->Close();
  while (lease_.exchange(true)) std::this_thread::sleep_for(std::chrono::microseconds(50));
  if (mesh_ != nullptr && !killed) mesh_->Farewell(kFarewellMs);
  Break(Status(Code::kShutDown, "this rank was shut down"));
  lease_.store(false);
}

void Engine::AnnounceLeave() {
  std::string pending;
  {
    // The driving thread may have seen `stop_` first, and failed them already.
    std::lock_guard lock(mutex_);
    const size_t count = control_->pending().size() + transfers_->pending().size() + abandoned_.size();
    if (count > 0) {
      const std::string& one = !abandoned_.empty() ? abandoned_.front()
                               : !control_->pending().empty()
                                   ? control_->pending().begin()->first
                                   : transfers_->pending().begin()->second->request.name;
      pending = std::to_string(count) + " operation(s) pending there, among them '" + one + "'";
    }
  }
  if (!pending.empty() && size_ > 1) {
    segment_->Revoke(Code::kRankLeft, liveness_->Describe(rank_) + " shut down with " + pending);
  }
  segment_->left(rank_).store(1, std::memory_order_seq_cst);
  segment_->header().left_count.fetch_add(1, std::memory_order_seq_cst);
  for (int r = 0; r < topology_.local_size(); ++r) {
    segment_->RingDriver(r);
    segment_->RingIdle(r);
  }
  if (topology_.leads()) control_->TellLeft(rank_);
}

void Engine::SpreadRevocation() {
  if (uplink_ == nullptr || !segment_->revoked()) return;
  control_->TellRevoked(segment_->RevokedStatus());
}

void Engine::Forget() {
  forgotten_.store(true);
  stop_.store(true);
  // The thread object refers to a thread that exists only in the parent.
  if (thread_.joinable()) thread_.detach();
  if (uplink_ != nullptr) uplink_->Forget();
  if (mesh_ != nullptr) mesh_->Close();
  segment_->Forget();
}

std::vector<uint64_t> Engine::SentBytes() const {
  std::vector<uint64_t> bytes(static_cast<size_t>(size_));
  for (int r = 0; r < size_ && mesh_ != nullptr; ++r) bytes[static_cast<size_t>(r)] = mesh_->sent_bytes(r);
  return bytes;
}

EngineStats Engine::Stats() {
  std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  stats.control = control_->stats();
  stats.late_reports = late_->reports();
  stats.connections = mesh_ == nullptr ? 0 : static_cast<uint64_t>(mesh_->connections());
  if (hierarchical_ != nullptr) {
    stats.link_bytes_per_us = static_cast<uint64_t>(link_bytes_per_us_.load());
    stats.link_revisions = link_revisions_.load();
  }
  return stats;
}

}  // namespace kolovod
