#include "engine/driver.h"

#include <chrono>
#include <thread>

#include "control/fusion.h"

namespace kolovod {

namespace {
constexpr int64_t kCallerYieldNs = 200'000;
constexpr int64_t kCrowdedYieldNs = 1'000'000;
constexpr int64_t kThreadYieldNs = 20'000;
constexpr int64_t kCrowdedPatienceNs = 200'000;
constexpr int64_t kNewsNs = 300'000'000;
constexpr size_t kOverlapBytes = 1 << 20;

std::string HasLeft(const std::string& who) { return who + " has left the world (it shut down)"; }

// With a core for every engine thread beside every computing one, communication overlaps the backward pass.
// Without, it would take the core that computes, and pay for the switching: then it waits until somebody
// waits (docs/design/engine.md).
size_t KickBytes(const Config& config, int local_size) {
  if (config.kick_bytes > 0) return static_cast<size_t>(config.kick_bytes);
  return config.cores >= 2 * local_size ? kOverlapBytes : SIZE_MAX;
}
}  // namespace

Driver::Driver(const DriverParts& parts)
    : membership_(parts.membership),
      registry_(parts.registry),
      lease_(parts.lease),
      waiter_(parts.waiter),
      control_(parts.control),
      transfers_(parts.transfers),
      executor_(parts.executor),
      last_operations_(parts.last_operations),
      links_(parts.links),
      lane_(parts.lane),
      completion_(registry_, control_.announcer(), last_operations_),
      stop_(parts.stop),
      kick_bytes_(KickBytes(membership_.config, membership_.topology.local_size())),
      told_left_(static_cast<size_t>(membership_.topology.local_size())) {}

bool Driver::TryTakeLease(bool background, std::function<bool()> interrupted) {
  if (!lease_.TryTake(background)) return false;
  const bool crowded = membership_.config.cores < membership_.topology.local_size();
  WaitBudget budget;
  if (background) {
    budget.yield_ns = kThreadYieldNs;  // the core belongs to whoever computes gradients
  } else {
    budget.spin_ns = crowded ? 0 : membership_.config.spin_us * 1000;
    budget.yield_ns = crowded ? kCrowdedYieldNs : kCallerYieldNs;
    budget.patience_ns = crowded ? kCrowdedPatienceNs : 0;
  }
  // A yield gives the rest of the turn away: with gradients being computed on its core the thread came late,
  // and a link of 1 Gbit/s idled for a third of the time.
  if (links_ != nullptr) links_->mesh().set_budget(background ? WaitBudget{} : budget);
  waiter_.Configure(budget, std::move(interrupted), /*pauses=*/true);
  waiter_.NoteCore();
  return true;
}

void Driver::ReleaseLease() {
  const bool is_wanted = lease_.Release([this] {
    AssumeHeld(kLease);
    // A peer that saw nobody drive and went to sleep is served by our thread. With nothing pending here no
    // operation of others can go on, and what they have announced waits for the next. Once the world is over
    // there is only what is pending to be failed.
    const bool over = waiter_.MustStop();
    const bool pending = membership_.self().pending.load(std::memory_order_seq_cst) != 0;
    Lease::Left left;
    left.more = over ? pending : MustDrive() || SeesLeavers() || (pending && HasWork());
    // What this look has read of the control link nobody else will be told of.
    left.unread = !over && control_.HasUnread();
    // A caller comes again soon; and waking the reading thread at every small operation would cost more than
    // they do.
    if (lease_.background()) control_.LookAway();
    return left;
  });
  if (!is_wanted) return;
  OperationsLock lock(registry_.mutex());
  registry_.WakeCallers();
}

bool Driver::CanExecute() const {
  const bool holds = lane_ != nullptr && !lane_->held().empty();
  if (ready_.empty() && !holds) return false;
  // A bucket without entries only begins what the lane holds.
  if (control_.MayCloseBucket() && (!ready_.empty() || lane_->idle())) return true;
  return control_.EndOf(bucket_, executed_).has_value();
}

bool Driver::SeesLeavers() const {
  return leavers_seen_.load(std::memory_order_relaxed) !=
         membership_.segment->header().left_count.load(std::memory_order_seq_cst);
}

bool Driver::HasWork() {
  return CanExecute() || control_.HasInput() || transfers_.HasWork() || SeesLeavers();
}

Status Driver::Drive(const Operation* until, int64_t deadline_ns) {
  const bool background = lease_.background();
  const auto is_late = [&] { return deadline_ns != 0 && NowNs() >= deadline_ns; };
  const auto done = [&] { return until != nullptr && until->done.load(std::memory_order_acquire); };
  const auto lets_go = [&] { return background && lease_.wanted(); };
  const auto idle = [&] { return until == nullptr && !MustDrive(); };
  const auto wakes = [&] {
    AssumeHeld(kLease);
    return done() || HasWork() || lets_go() || is_late() || idle();
  };
  const auto lag = [&] {
    AssumeHeld(kLease);
    control_.WakeLagging();
  };
  while (!done()) {
    bool progressed = false;
    Status status = Step(&progressed);
    if (status.ok() && !progressed) {
      if (idle()) return Status();
      status = waiter_.Wait(wakes, lag, /*in_bucket=*/false, {}, deadline_ns);
    }
    if (!status.ok()) {
      // Interrupted before anything had started: only the caller gives up.
      if (status.code() == Code::kInterrupted && !membership_.segment->revoked()) return status;
      return EndBy(status);
    }
    if (lets_go() || is_late() || waiter_.TakePause()) return Status();
  }
  return Status();
}

Status Driver::Step(bool* progressed) {
  if (waiter_.MustStop()) return waiter_.Stopped();
  if (control_.HasInput()) {
    KV_RETURN_IF_ERROR(control_.Pump());
    KV_RETURN_IF_ERROR(control_.ReadLog(&ready_));
  }
  if (SeesLeavers()) {
    NoticeLeavers();
    *progressed = true;
  }
  KV_RETURN_IF_ERROR(StepTransfers(progressed));
  return ExecuteBucket(progressed);
}

BucketEnd Driver::FindBucketEnd() {
  std::vector<size_t> bytes;
  bytes.reserve(ready_.size());
  for (const OperationPtr& op : ready_) bytes.push_back(op == nullptr ? 0 : op->bytes);
  const size_t taken = EntriesForBucket(bytes, static_cast<size_t>(membership_.config.fusion_bytes));
  return {executed_ + taken, lane_ != nullptr && lane_->ShouldBegin(ready_, taken)};
}

Status Driver::AwaitBucketEnd(BucketEnd* end) {
  const std::optional<BucketEnd> decided = control_.EndOf(bucket_, executed_);
  *end = decided ? *decided : control_.CloseBucket(bucket_, executed_, FindBucketEnd());
  const auto has_input = [&] {
    AssumeHeld(kLease);
    return control_.HasInput();
  };
  const auto lag = [&] {
    AssumeHeld(kLease);
    control_.WakeLagging();
  };
  while (control_.position() < end->position) {
    // The rank that closed the bucket saw entries that this one has not read yet: they are in the log.
    KV_RETURN_IF_ERROR(control_.Pump());
    KV_RETURN_IF_ERROR(control_.ReadLog(&ready_));
    if (control_.position() >= end->position) break;
    KV_RETURN_IF_ERROR(waiter_.Wait(has_input, lag, /*in_bucket=*/true));
  }
  return Status();
}

std::vector<OperationPtr> Driver::TakeReady(uint64_t end) {
  std::vector<OperationPtr> ops;
  for (; executed_ < end; ++executed_) {
    OperationPtr op = std::move(ready_.front());
    ready_.pop_front();
    if (op == nullptr) continue;
    if (lane_ != nullptr && DeviceLane::Takes(*op)) {
      lane_->Hold(std::move(op));
    } else if (!op->links) {
      ops.push_back(std::move(op));
    } else if (links_ != nullptr) {
      links_->Use(*op->links);
      links_->CountRevision();
    }
  }
  return ops;
}

Status Driver::ExecuteBucket(bool* progressed) {
  if (!CanExecute()) return Status();
  BucketEnd end;
  KV_RETURN_IF_ERROR(AwaitBucketEnd(&end));
  const std::vector<OperationPtr> ops = TakeReady(end.position);
  begun_.store(++bucket_, std::memory_order_relaxed);
  if (lane_ != nullptr && end.starts_device && !lane_->held().empty()) {
    last_operations_.Started(lane_->held(), bucket_);
    lane_->Begin();
    // Those who take part on their device, and would look for it by themselves much later.
    for (int r = 0; r < membership_.topology.local_size(); ++r) membership_.segment->WakeUndriven(r);
  }
  *progressed = true;
  ready_bytes_.store(0, std::memory_order_relaxed);
  if (links_ != nullptr) links_->mesh().BeginOperation(static_cast<uint32_t>(bucket_));
  last_operations_.Started(ops, bucket_);
  Status status = executor_.Execute(ops);
  if (!status.ok()) {
    if (status.code() == Code::kRankLost) status = EndForAll(status);
    {
      OperationsLock lock(registry_.mutex());
      for (const OperationPtr& op : ops) Fail(op, status);
    }
    registry_.RunCallbacks();
    return status;
  }
  executor_.Executed(executed_);
  if (links_ != nullptr && membership_.topology.is_root()) {
    if (const std::optional<LinkCost> cost = links_->Revise()) control_.TellLinks(*cost);
  }
  Complete(ops);
  return Status();
}

void Driver::Complete(const std::vector<OperationPtr>& ops) {
  {
    OperationsLock lock(registry_.mutex());
    for (const OperationPtr& op : ops) executor_.Release(*op, executed_);
    completion_.Complete(ops, lease_.background());
  }
  registry_.RunCallbacks();
}

Status Driver::StepTransfers(bool* progressed) {
  if (!transfers_.HasWork()) return Status();
  *progressed = true;
  const Status status = transfers_.Progress();
  const std::vector<OperationPtr> done = transfers_.TakeDone();
  if (!done.empty()) CompleteTransfers(done);
  return status.code() == Code::kRankLost && !membership_.segment->revoked() ? EndForAll(status) : status;
}

void Driver::CompleteTransfers(const std::vector<OperationPtr>& ops) {
  {
    OperationsLock lock(registry_.mutex());
    last_operations_.Ended(ops);
    for (const OperationPtr& op : ops) {
      Erase(*op);
      registry_.Count(*op);
      registry_.Finish(op);
    }
    registry_.WakeCallers();
  }
  registry_.RunCallbacks();
}

void Driver::MoveTransfers() {
  bool progressed = false;
  const Status status = waiter_.MustStop() ? waiter_.Stopped() : StepTransfers(&progressed);
  if (!status.ok()) (void)EndBy(status);
}

void Driver::Erase(const Operation& op) {
  if (!TraitsOf(op.request.verb).is_transfer) return control_.announcer().Erase(op.request.name);
  transfers_.Erase(op);
  control_.announcer().CountBeside(transfers_.pending().size());
}

void Driver::NoticeLeavers() {
  Segment& segment = *membership_.segment;
  const Topology& topology = membership_.topology;
  leavers_seen_.store(segment.header().left_count.load(std::memory_order_seq_cst));
  if (segment.revoked()) return;  // it left work behind and has said so: that is the better reason
  std::string who;
  for (int r = 0; r < membership_.size; ++r) {
    if (r == membership_.rank || !membership_.has_left(r)) continue;
    if (who.empty()) who = membership_.Describe(r);
    transfers_.Left(r, Status(Code::kRankLeft, HasLeft(membership_.Describe(r))));
  }
  for (int r = 1; r < topology.local_size() && control_.forwarder() != nullptr; ++r) {
    const int rank = topology.local_ranks[static_cast<size_t>(r)];
    if (told_left_[static_cast<size_t>(r)] || !membership_.has_left(rank)) continue;
    told_left_[static_cast<size_t>(r)] = true;
    control_.forwarder()->TellLeft(rank);
  }
  if (who.empty()) return;
  // The leaver had nothing pending, so all it ever announced is in the log by now.
  if (Status status = control_.ReadLog(&ready_); !status.ok()) return;
  const Status status(Code::kRankLeft, HasLeft(who));
  {
    OperationsLock lock(registry_.mutex());
    std::vector<OperationPtr> lost;
    for (const auto& [name, op] : control_.announcer().pending()) {
      if (!op->in_log) lost.push_back(op);
    }
    for (const OperationPtr& op : lost) Fail(op, status);
    registry_.WakeCallers();
  }
  registry_.RunCallbacks();
}

void Driver::Break(const Status& status) {
  if (lane_ != nullptr) lane_->Stop();  // what fails below may be freed at once
  {
    OperationsLock lock(registry_.mutex());
    if (registry_.broken().ok()) {
      registry_.Break(status.code() == Code::kShutDown ? status : last_operations_.WithFile(status));
    }
    std::vector<OperationPtr> lost;
    for (const auto& [name, op] : control_.announcer().pending()) lost.push_back(op);
    for (const auto& [number, op] : transfers_.pending()) lost.push_back(op);
    for (const OperationPtr& op : lost) Fail(op, registry_.broken());
    ready_.clear();
    registry_.WakeCallers();
  }
  transfers_.Drop();
  registry_.RunCallbacks();
}

void Driver::Fail(const OperationPtr& op, const Status& status) {
  if (op->done.load(std::memory_order_acquire)) return;
  op->status = Status(status.code(), status.message() + "; pending here: " + NameOf(op->request.verb) + " '" +
                                         op->request.name + "'");
  if (status.code() == Code::kShutDown) abandoned_.push_back(op->request.name);
  Erase(*op);
  last_operations_.Ended({op});
  registry_.Finish(op);
}

Status Driver::EndBy(const Status& status) {
  // A defect here is the end for all: the others would wait for this rank.
  if (status.code() == Code::kInternal) membership_.segment->Revoke(status.code(), status.message());
  Break(status);
  OperationsLock lock(registry_.mutex());
  return registry_.broken();
}

// The others of this host wait for what the connection should have brought. The other end may have closed it
// because of what it was told; that comes here within moments, too, and names the first cause.
Status Driver::EndForAll(const Status& broken) {
  Segment& segment = *membership_.segment;
  const int64_t end_ns = NowNs() + kNewsNs;
  while (!segment.revoked() && !stop_.load() && NowNs() < end_ns) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  segment.Revoke(broken.code(), broken.message());
  return segment.RevokedStatus();
}

size_t Driver::CountPending() const {
  return control_.announcer().pending().size() + transfers_.pending().size();
}

std::string Driver::DescribeUnfinished() const {
  // The driving thread may have seen `stop_` first, and failed them already.
  const size_t count = CountPending() + abandoned_.size();
  if (count == 0) return "";
  const std::string& one = !abandoned_.empty() ? abandoned_.front()
                           : !control_.announcer().pending().empty()
                               ? control_.announcer().pending().begin()->first
                               : transfers_.pending().begin()->second->request.name;
  return std::to_string(count) + " operation(s) pending there, among them '" + one + "'";
}

}  // namespace kolovod
