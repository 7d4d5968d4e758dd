// The driving half of the engine: everything here runs under the lease.
#include <chrono>
#include <thread>

#include "engine/engine.h"

namespace kolovod {

namespace {
constexpr int64_t kCallerYieldNs = 200'000;
constexpr int64_t kCrowdedYieldNs = 1'000'000;
constexpr int64_t kThreadYieldNs = 20'000;
constexpr int64_t kCrowdedPatienceNs = 200'000;
constexpr int64_t kNewsNs = 300'000'000;

std::string HasLeft(const std::string& who) { return who + " has left the world (it shut down)"; }
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
  const uint32_t bell = self().idle_bell.load(std::memory_order_seq_cst);
  // Read before letting go; a peer that saw `driving` and went to sleep is served by our thread. With nothing
  // pending here no operation of others can go on, and what they have announced waits for the next. Once the
  // world is over there is only what is pending to be failed.
  const bool over = waiter_->MustStop();
  const bool pending = self().pending.load(std::memory_order_seq_cst) != 0;
  const bool more = over ? pending : MustDrive() || SeesLeavers() || (pending && HasWork());
  const bool was_background = background_;
  // What this look has read of the uplink nobody else will be told of.
  const bool unread = !over && uplink_ != nullptr && uplink_->HasData();
  // A caller comes again soon; and waking that thread at every small operation would cost more than they do.
  if (uplink_ != nullptr && was_background) uplink_->LookAway();
  if (faults_ != nullptr) faults_->Shuffle();
  lease_.store(false, std::memory_order_seq_cst);
  // Who rang after that look found the lease taken.
  const bool rung = self().idle_bell.load(std::memory_order_seq_cst) != bell;
  const bool wanted = lease_wanted_.load(std::memory_order_seq_cst) > 0;
  // Our thread itself, too: what was announced after its last step, while it was driving, nobody rang for.
  if (unread || ((more || rung) && !(was_background && wanted))) segment_->RingIdle(topology_.local_rank);
  if (wanted) {
    std::lock_guard lock(mutex_);
    changed_.notify_all();
  }
}

bool Engine::CanExecute() {
  return !ready_.empty() && (control_->MaySeal() || control_->SealedEnd(bucket_, executed_).has_value());
}

bool Engine::SeesLeavers() {
  return leavers_seen_.load(std::memory_order_relaxed) !=
         segment_->header().left_count.load(std::memory_order_seq_cst);
}

bool Engine::HasWork() {
  return CanExecute() || control_->HasInput() || transfers_->HasWork() || SeesLeavers();
}

bool Engine::MustDrive() {
  return driven_.load(std::memory_order_seq_cst) > 0 || transfers_->WaitsElsewhere();
}

Status Engine::Drive(const Operation* until, int64_t deadline_ns) {
  const auto is_late = [&] { return deadline_ns != 0 && NowNs() >= deadline_ns; };
  const auto done = [&] { return until != nullptr && until->done.load(std::memory_order_acquire); };
  const auto lets_go = [&] { return background_ && lease_wanted_.load(std::memory_order_seq_cst) > 0; };
  const auto idle = [&] { return until == nullptr && !MustDrive(); };
  while (!done()) {
    bool progressed = false;
    Status status = Step(&progressed);
    if (status.ok() && !progressed) {
      if (idle()) return Status();
      status = waiter_->Wait([&] { return done() || HasWork() || lets_go() || is_late() || idle(); },
                             [&] { control_->RingLagging(); }, /*in_bucket=*/false, {}, deadline_ns);
    }
    if (!status.ok()) {
      // Interrupted before anything had started: only the caller gives up.
      if (status.code() == Code::kInterrupted && !segment_->revoked()) return status;
      return EndBy(status);
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
  if (SeesLeavers()) {
    NoticeLeavers();
    *progressed = true;
  }
  KV_RETURN_IF_ERROR(StepTransfers(progressed));
  return ExecuteBucket(progressed);
}

void Engine::Complete(const std::vector<OperationPtr>& ops) {
  {
    std::lock_guard lock(mutex_);
    bool data = false;
    KeepEnd(ops);
    for (const OperationPtr& op : ops) {
      if (op->claimed != 0) eager_->Release(op->claimed, executed_);
      if (op->request.verb == Verb::kJoin) {
        joined_ = false;
        joins_.fetch_add(1);
        next_unnamed_.store(1);  // nothing is pending anywhere, and the ranks have numbered unequally many
      }
      control_->Erase(op->request.name);
      if (op->status.ok()) {
        ++stats_.operations;
        if (op->was_staged) ++stats_.staged;
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

void Engine::EraseLocked(const Operation& op) {
  if (!TraitsOf(op.request.verb).is_transfer) return control_->Erase(op.request.name);
  transfers_->Erase(op);
  control_->CountBeside(transfers_->pending().size());
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
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || segment_->left(r).load(std::memory_order_seq_cst) == 0) continue;
    transfers_->Left(r, Status(Code::kRankLeft, HasLeft(liveness_->Describe(r))));
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
  const Status status(Code::kRankLeft, HasLeft(who));
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
    for (const auto& [number, op] : transfers_->pending()) lost.push_back(op);
    for (const OperationPtr& op : lost) FailLocked(op, broken_);
    ready_.clear();
    changed_.notify_all();
  }
  transfers_->Drop();
  RunCallbacks();
}

Status Engine::EndBy(const Status& status) {
  // A defect here is the end for all: the others would wait for this rank.
  if (status.code() == Code::kInternal) segment_->Revoke(status.code(), status.message());
  Break(status);
  return BrokenStatus();
}

// The others of this host wait for what the connection should have brought. The other end may have closed it
// because of what it was told; that comes here within moments, too, and names the first cause.
Status Engine::EndForAll(const Status& broken) {
  const int64_t end_ns = NowNs() + kNewsNs;
  while (!segment_->revoked() && !stop_.load() && NowNs() < end_ns) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  segment_->Revoke(broken.code(), broken.message());
  return segment_->RevokedStatus();
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
  EraseLocked(*op);
  KeepEnd({op});
  FinishLocked(op);
}

}  // namespace kolovod
