#include "engine/engine.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/tree.h"
#include "collectives/shm.h"
#include "engine/formation.h"
#include "engine/output_memory.h"
#include "engine/validate.h"
#include "transport/cores.h"

namespace kolovod {

namespace {

constexpr const char* kUnnamed = "unnamed.";
constexpr const char* kJoin = "unnamed.join";  // one name: ranks that join have submitted unequally much
constexpr int kFarewellMs = 500;               // for the last words to other hosts
constexpr uint32_t kFarLineNs = 200;  // one way; 60 to 160 between cores that share a cache, 250 else
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

Status Interrupted(const Membership& membership) {
  return Status(Code::kInterrupted,
                membership.Describe(membership.rank) + " was interrupted (by a signal or its time limit)");
}

// Whose lease this thread holds. It runs signal handlers meanwhile only in the middle of a bucket.
thread_local const Engine* driving_here = nullptr;

Status InHandler(Verb verb, const std::string& name) {
  return Status(
      Code::kInvalidArgument,
      std::string(NameOf(verb)) + " '" + name +
          "' was called in a signal handler while this thread is in the middle of another operation, "
          "which has begun and cannot be left: note the signal in the handler, and act on it "
          "after that operation");
}

Membership MembershipOf(EngineOptions& options) {
  Membership membership;
  membership.rank = options.rank;
  membership.size = options.size;
  if (options.hosts.empty()) options.hosts.resize(static_cast<size_t>(options.size));
  membership.topology = Topology(options.rank, options.hosts);
  membership.numbers = std::move(options.ranks);
  if (membership.numbers.empty()) {
    for (int r = 0; r < options.size; ++r) membership.numbers.push_back(r);
  }
  membership.epoch = options.epoch;
  membership.config = options.config;
  membership.segment = std::move(options.segment);
  membership.liveness = std::move(options.liveness);
  membership.faults = std::move(options.faults);
  return membership;
}

std::unique_ptr<ControlLink> MakeControlLink(const Membership& membership, const EngineOptions& options) {
  const Topology& topology = membership.topology;
  if (topology.hosts() == 1 || !topology.leads()) return nullptr;
  std::vector<ControlLinkPeer> peers;
  for (const int host : Tree(topology.hosts(), topology.host()).neighbours) {
    const auto h = static_cast<size_t>(host);
    peers.push_back(
        {host, options.control_fds[h], options.control_keys.empty() ? nullptr : options.control_keys[h]});
  }
  return std::make_unique<ControlLink>(std::move(peers), options.epoch, options.config.host_lost_ms);
}

}  // namespace

Status Engine::Create(EngineOptions options, std::unique_ptr<Engine>* out,
                      const std::function<bool()>& interrupted) {
  const int on_host = options.segment->layout().size;
  if (on_host < 1 || on_host > kMaxSources || options.rank < 0 || options.rank >= options.size) {
    return Status(Code::kInvalidArgument, "rank " + std::to_string(options.rank) + " of size " +
                                              std::to_string(options.size) + ", " + std::to_string(on_host) +
                                              " of them on this host: need 0 <= rank < size, and at most " +
                                              std::to_string(kMaxSources) + " on one host");
  }
  std::unique_ptr<Engine> engine(new Engine(options));
  engine->waiter_->Configure(WaitBudget{}, interrupted);
  KV_RETURN_IF_ERROR(engine->Form(options));
  engine->thread_ = std::thread([e = engine.get()] {
    pthread_setname_np(pthread_self(), "kv-engine");
    AskForShortTurns();
    e->EngineThread();
  });
  *out = std::move(engine);
  return Status();
}

Engine::Engine(EngineOptions& options)
    : membership_(MembershipOf(options)),
      idle_sleep_ns_(options.idle_sleep_ns),
      lease_(membership_),
      broker_(std::move(options.broker)),
      control_link_(MakeControlLink(membership_, options)) {
  const auto r = static_cast<size_t>(membership_.rank);
  LoopbackFaults* const faults = membership_.faults.get();
  waiter_ = std::make_unique<Waiter>(*membership_.segment, membership_.topology, *membership_.liveness, stop_,
                                     faults == nullptr ? nullptr : &faults->killed[r]);
  waiter_->set_sleep_ns(options.driver_sleep_ns);
}

Status Engine::Form(EngineOptions& options) {
  Formation formation(membership_, *waiter_);
  KV_RETURN_IF_ERROR(formation.Attach());
  std::unique_ptr<PeerMemory> peers = formation.TakePeers();
  const bool reads_peers = peers != nullptr && peers->usable();
  LimitUnusedOutputs(static_cast<size_t>(membership_.config.unused_output_bytes));
  last_operations_ =
      std::make_unique<LastOperations>(membership_, *waiter_, std::move(options.last_operations_prefix));
  MakeStragglerWatch(std::move(options.stacks));
  control_ = std::make_unique<Control>(membership_, registry_.mutex(), control_link_.get());
  line_latency_ns_ = formation.MeasureLineLatencyNs();
  if (membership_.topology.hosts() > 1) {
    KV_RETURN_IF_ERROR(HostLinks::Create(membership_, *waiter_, broker_, &links_));
  }
  MakeExecutor(options.external, std::move(peers));
  PointToPointOptions transfers{membership_.topology, membership_.numbers, reads_peers,
                                links_ == nullptr ? nullptr : &links_->mesh(),
                                [this] { return waiter_->CheckPeers() || membership_.segment->revoked(); }};
  transfers_ = std::make_unique<PointToPoint>(*membership_.segment, registry_.mutex(), std::move(transfers));
  driver_ =
      std::make_unique<Driver>(DriverParts{membership_, registry_, lease_, *waiter_, *control_, *transfers_,
                                           *executor_, *last_operations_, links_.get(), lane_.get(), stop_});
  if (control_link_ != nullptr) StartControlLink();
  return links_ == nullptr ? Status() : MeasureLinks(options.believed_bytes_per_us);
}

void Engine::MakeExecutor(std::optional<Device> external, std::unique_ptr<PeerMemory> peers) {
  std::function<void()> before_post;
  if (membership_.faults != nullptr) before_post = [this] { membership_.faults->Pause(membership_.rank); };
  std::unique_ptr<Backend> backend = std::make_unique<ShmBackend>(
      *membership_.segment, membership_.topology.local_rank, membership_.config, *waiter_,
      std::move(before_post), line_latency_ns_ > kFarLineNs, std::move(peers));
  if (links_ != nullptr) backend = links_->MakeBackend(std::move(backend));
  if (external == Device::kHost) {
    auto look = [this] {
      return waiter_->MustStop() ? waiter_->Stopped() : waiter_->Periodic(/*in_bucket=*/true);
    };
    auto foreign = std::make_unique<ExternalBackend>(std::move(backend), membership_.rank,
                                                     *membership_.segment, look, stop_);
    external_ = foreign.get();
    backend = std::move(foreign);
  } else if (external == Device::kGpu) {
    lane_ = std::make_unique<DeviceLane>(
        membership_, Completion(registry_, control_->announcer(), *last_operations_), stop_);
    external_ = &lane_->external();
  }
  const bool has_slots = links_ == nullptr && external != Device::kHost;
  executor_ = std::make_unique<Executor>(membership_, std::move(backend), has_slots);
  if (!has_slots) return;
  instant_ = InstantPath::Make(membership_, registry_, control_->announcer(), *executor_, *last_operations_,
                               [this] { return waiter_->MustStop(); });
  control_->SetEagerCopy([executor = executor_.get()](Operation& op) {
    AssumeHeld(kOperations);
    return executor->CopyEagerly(op);
  });
}

void Engine::MakeStragglerWatch(std::shared_ptr<StackSource> stacks) {
  std::string where;
  if (membership_.segment->belongs()) {
    for (int rank : membership_.numbers)
      where += (where.empty() ? "process set [" : ", ") + std::to_string(rank);
    where += "]";
  }
  StragglerOptions options;
  options.topology = membership_.topology;
  options.names = {membership_.numbers, [this](int r) { return membership_.Describe(r); }};
  options.where = std::move(where);
  options.stacks = std::move(stacks);
  options.tell_leaders = [this](const Note& note) { control_->forwarder()->TellLeaders(note); };
  stragglers_ =
      std::make_unique<StragglerWatch>(*membership_.segment, membership_.config, std::move(options));
  waiter_->SetWatch([this] { stragglers_->Tick(); });
  waits_ = std::make_unique<WaitBoard>(*membership_.segment, membership_.topology, [this](const Note& note) {
    control_->forwarder()->TellLeaders(note);
  });
}

void Engine::StartControlLink() {
  ControlLink::Events events;
  Forwarder* const forwarder = control_->forwarder();
  forwarder->set_on_news([this](const Note& note) {
    note.kind == Note::Kind::kWaits ? waits_->Hear(note) : stragglers_->Hear(note);
  });
  events.read = [forwarder](const ControlLink::Frame& frame) { return forwarder->Forward(frame); };
  events.arrived = [this] {
    membership_.WakeDriver();
    if (membership_.self().driving.load(std::memory_order_seq_cst) == 0) membership_.WakeIdle();
  };
  events.lost = [this, forwarder](int host, const std::string& reason) {
    forwarder->Lost(host, reason,
                    membership_.Describe(membership_.topology.leaders[static_cast<size_t>(host)]));
  };
  control_link_->Start(std::move(events));
  waiter_->set_before_sleep([this] { control_link_->LookAway(); });
}

// When leaders listen to each other already: of a rank that fails here all are to hear.
Status Engine::MeasureLinks(double believed_bytes_per_us) {
  const Status measured = links_->Measure(membership_.config.start_timeout_ms, believed_bytes_per_us);
  if (measured.ok()) return measured;
  membership_.segment->Revoke(measured.code(), measured.message());
  SpreadRevocation();
  return membership_.segment->RevokedStatus();
}

Engine::~Engine() {
  // Without a driver there never was a world to leave.
  if (driver_ != nullptr && !forgotten_.load()) Shutdown();
  if (!forgotten_.load()) DropUnusedOutputs();
}

void Engine::Name(Request& request, Operation& op) {
  if (request.verb == Verb::kJoin) {
    request.name = kJoin;
  } else if (!TraitsOf(request.verb).is_transfer) {
    if (!request.name.empty()) return;
    const uint64_t number = registry_.NumberUnnamed();
    request.name = kUnnamed + std::to_string(number);
    op.tag = UnnamedTag(registry_.joins(), number);
  }
  request.cacheable = false;
}

Status Engine::Submit(Request request, std::vector<SubmittedTensor> tensors, bool blocking, uint64_t* handle,
                      Callback on_done, int64_t drive_ns) {
  return Start(std::move(request), std::move(tensors), blocking, handle, std::move(on_done), drive_ns,
               nullptr);
}

Status Engine::Run(Request request, std::vector<SubmittedTensor> tensors,
                   const std::function<bool()>& interrupted, uint64_t* handle) {
  OperationPtr complete;
  *handle = 0;
  KV_RETURN_IF_ERROR(
      Start(std::move(request), std::move(tensors), /*blocking=*/true, handle, nullptr, 0, &complete));
  return complete != nullptr ? complete->status : Wait(*handle, -1, interrupted);
}

Status Engine::Start(Request request, std::vector<SubmittedTensor> tensors, bool blocking, uint64_t* handle,
                     Callback on_done, int64_t drive_ns, OperationPtr* complete) {
  if (forgotten_.load()) return Status(Code::kShutDown, "this process was forked from a rank");
  if (blocking && driving_here == this) return InHandler(request.verb, request.name);
  if (request.name.starts_with(kUnnamed)) {
    return Status(Code::kInvalidArgument, "the name '" + request.name +
                                              "' is not to be had: names that begin with '" +
                                              std::string(kUnnamed) + "' are the engine's own");
  }
  const bool is_transfer = TraitsOf(request.verb).is_transfer;
  auto op = std::make_shared<Operation>();
  // Before anything is refused, so that the ranks' numbers stay level.
  Name(request, *op);
  KV_RETURN_IF_ERROR(Validate(request, tensors, membership_.numbers));
  if (is_transfer) request.name = NameOfTransfer(request, membership_.numbers);
  for (SubmittedTensor& tensor : tensors) {
    const size_t count = ElementsOf(tensor.meta);
    op->counts.push_back(count);
    op->inputs.push_back(tensor.in);
    op->outputs.push_back(tensor.out);
    op->out_bytes.push_back(tensor.out_bytes);
    op->bytes += count * SizeOf(tensor.meta.dtype);
    op->gpu = tensor.gpu;
    request.tensors.push_back(std::move(tensor.meta));
  }
  if (!TraitsOf(request.verb).reduces) {
    request.op = Op::kSum;
    request.prescale = request.postscale = 1.0;
  }
  op->request = std::move(request);
  op->on_done = std::move(on_done);
  const bool on_device = op->request.device() != Device::kHost;  // whose lane takes it from here at once
  const bool driven = op->on_done != nullptr;
  const bool drives = driven && drive_ns > 0 && !registry_.HasDriven();
  bool appended = false;
  bool is_instant;
  {
    OperationsLock lock(registry_.mutex());
    KV_RETURN_IF_ERROR(RefuseNew(*op));
    is_instant = (blocking || drives) && instant_ != nullptr && instant_->Begin(*op);
    if (!is_instant) appended = Enter(op, handle, blocking || drives);
  }
  if (is_instant) {
    const bool met = instant_->Exchange(*op);
    {
      OperationsLock lock(registry_.mutex());
      if (met && complete != nullptr && !TraitsOf(op->request.verb).makes_outputs) {
        *complete = op;
      } else if (met && handle != nullptr) {
        *handle = registry_.Keep(op);
      }
      if (met && driven) registry_.AddDriven();
      instant_->End(op, met);
      if (!met) {
        KV_RETURN_IF_ERROR(RefuseNew(*op));
        appended = Enter(op, handle, /*drives=*/true);
      }
    }
    if (met && driven) registry_.RunCallbacks();
    if (met) return Status();
  }
  if (is_transfer && !blocking) StartTransfer();
  if (drives) {
    DriveFor(*op, drive_ns);
  } else if (driven || (!blocking && appended && (on_device || driver_->AddReady(op->bytes)))) {
    membership_.WakeIdle();
  }
  return Status();
}

bool Engine::Enter(const OperationPtr& op, uint64_t* handle, bool drives) {
  if (handle != nullptr) *handle = registry_.Keep(op);
  if (op->on_done != nullptr) registry_.AddDriven();
  // The caller will drive at once, so that nobody wakes the engine thread, which would take the lease from
  // it. If it is interrupted before, the engine thread's next look sets this right.
  if (drives) membership_.self().driving.store(1, std::memory_order_seq_cst);
  // The time before, the rest after: others need not wait for it.
  const int64_t now_ns = last_operations_->Now(op->bytes);
  const bool appended = Announce(op);
  last_operations_->Submitted(*op, now_ns);
  return appended;
}

Status Engine::RefuseNew(const Operation& op) {
  const bool is_transfer = TraitsOf(op.request.verb).is_transfer;
  if (!registry_.broken().ok()) return registry_.broken();
  if (Status status = WorldStatus(is_transfer); !status.ok()) {
    return membership_.segment->revoked() ? last_operations_->WithFile(status) : status;
  }
  if (registry_.has_joined()) {
    return Status(Code::kInvalidArgument, std::string(NameOf(op.request.verb)) + " '" + op.request.name +
                                              "': rank " + std::to_string(membership_.number()) +
                                              " has joined and has no data until join returns");
  }
  if (!is_transfer && (control_->announcer().pending().contains(op.request.name) ||
                       (instant_ != nullptr && instant_->Carries(op.request.name)))) {
    return Status(Code::kDuplicateName, "'" + op.request.name + "' is already pending on rank " +
                                            std::to_string(membership_.number()) +
                                            ": wait for it before submitting the same name again");
  }
  const bool is_foreign = lane_ == nullptr ? external_ != nullptr : op.request.device() != Device::kHost;
  for (const TensorMeta& tensor : op.request.tensors) {
    if (!is_foreign || tensor.codec == Codec::kNone) continue;
    return Status(Code::kInvalidArgument, std::string(NameOf(op.request.verb)) + " '" + op.request.name +
                                              "': compression " + NameOf(tensor.codec) +
                                              " is done by Kolovod's own engine, but another one (MPI, Gloo "
                                              "or NCCL) carries this tensor and can only add what it "
                                              "knows; use Compression.bf16 or .fp16");
  }
  if (op.request.device() == Device::kHost) return Status();
  if (lane_ == nullptr || op.on_done != nullptr) {
    return Status(Code::kInvalidArgument, std::string(NameOf(op.request.verb)) + " '" + op.request.name +
                                              "': the tensor is on a GPU, and this " +
                                              (lane_ == nullptr ? "world has no backend for those"
                                                                : "call takes those in host memory only"));
  }
  return lane_->Choose(op.gpu);
}

bool Engine::Announce(const OperationPtr& op) {
  if (op->request.verb == Verb::kJoin) {
    registry_.BeginJoin();
    control_->announcer().Join(op);
    return false;
  }
  if (!TraitsOf(op->request.verb).is_transfer) return control_->announcer().Announce(op);
  transfers_->Submit(op);
  control_->announcer().CountBeside(transfers_->pending().size());
  return false;
}

// A rank that leaves with work behind revokes first, so that reason is looked at last. What it has sent can
// still be received.
Status Engine::WorldStatus(bool for_transfer) const {
  int leaver = -1;
  if (!for_transfer && membership_.segment->header().left_count.load(std::memory_order_seq_cst) != 0) {
    for (int r = 0; r < membership_.size; ++r) {
      if (r != membership_.rank && membership_.has_left(r)) leaver = r;
    }
  }
  if (membership_.segment->revoked()) return membership_.segment->RevokedStatus();
  if (leaver < 0) return Status();
  return Status(Code::kRankLeft, membership_.Describe(leaver) + " has left the world (it shut down)");
}

Status Engine::Wait(uint64_t handle, double timeout_s, const std::function<bool()>& interrupted) {
  const OperationPtr op = Find(handle);
  if (op == nullptr) {
    return Status(Code::kInvalidArgument,
                  "handle " + std::to_string(handle) + " is unknown: never given out, or already waited for");
  }
  if (registry_.RunsCallbacksHere() && !op->done.load(std::memory_order_acquire)) {
    return Status(Code::kInvalidArgument, "waiting for '" + op->request.name +
                                              "' inside a completion callback would never end: the thread "
                                              "that runs callbacks is the one that works");
  }
  if (driving_here == this && !op->done.load(std::memory_order_acquire)) {
    return InHandler(op->request.verb, op->request.name);
  }
  if (timeout_s >= 0) {
    registry_.AddDriven();  // the engine thread drives as if the operation had a callback
    NudgeForAsync();
    const Status status = WaitAsleep(op, timeout_s, /*wants_lease=*/false, interrupted);
    if (registry_.DropDriven()) membership_.WakeDriver();  // it may stop
    return status.ok() ? op->status : status;
  }
  while (!op->done.load(std::memory_order_acquire)) {
    Status status;
    if (driver_->TryTakeLease(/*background=*/false, interrupted)) {
      const Engine* const outer = std::exchange(driving_here, this);
      status = driver_->Drive(op.get());
      driving_here = outer;
      driver_->ReleaseLease();
      // It came back to look for signals: their handlers may submit, and wait, themselves.
      const bool looks = status.ok() && interrupted && !op->done.load(std::memory_order_acquire);
      if (looks && interrupted()) status = Interrupted(membership_);
    } else {
      status = WaitForLease(op, interrupted);
    }
    if (!status.ok() && !op->done.load(std::memory_order_acquire)) return status;
  }
  return op->status;
}

Status Engine::WaitForLease(const OperationPtr& op, const std::function<bool()>& interrupted) {
  lease_.AddWanted();
  if (membership_.self().driver_sleeping.load(std::memory_order_seq_cst) != 0) membership_.WakeDriver();
  const Status status = WaitAsleep(op, 0.1, /*wants_lease=*/true, interrupted);
  lease_.DropWanted();
  // It let go for this caller, which may not need the lease any more.
  if (op->done.load(std::memory_order_acquire) &&
      (driver_->MustDrive() || membership_.self().pending.load(std::memory_order_seq_cst) != 0)) {
    membership_.WakeIdle();
  }
  return status.code() == Code::kTimeout ? Status() : status;
}

Status Engine::WaitDriving(uint64_t handle, double timeout_s, const std::function<bool()>& interrupted) {
  const int64_t deadline_ns = NowNs() + static_cast<int64_t>(std::min(timeout_s, 1e8) * 1e9);
  bool is_late = false;
  const Status status = Wait(handle, -1, [&] {
    is_late = NowNs() >= deadline_ns;
    return is_late || (interrupted && interrupted());
  });
  if (!is_late || status.code() != Code::kInterrupted || membership_.segment->revoked()) return status;
  const OperationPtr op = Find(handle);
  return op == nullptr ? status : NotComplete(*op, timeout_s);
}

void Engine::DriveFor(const Operation& op, int64_t drive_ns) {
  if (!driver_->TryTakeLease(/*background=*/false, nullptr)) return membership_.WakeIdle();
  (void)driver_->Drive(&op, NowNs() + drive_ns);  // an error of it is that of every pending operation
  driver_->ReleaseLease();
}

void Engine::StartTransfer() {
  if (driver_->TryTakeLease(/*background=*/false, nullptr)) {
    driver_->MoveTransfers();
    driver_->ReleaseLease();
    return;
  }
  if (membership_.self().driver_sleeping.load(std::memory_order_seq_cst) != 0) membership_.WakeDriver();
  membership_.WakeIdle();
}

// Leaves the driving to the engine thread: a driver cannot give up in the middle of a bucket. Also
// returns early, with kTimeout, when the lease is free for a caller that wants it.
Status Engine::WaitAsleep(const OperationPtr& op, double timeout_s, bool wants_lease,
                          const std::function<bool()>& interrupted) {
  using Clock = Registry::Clock;
  const Clock::time_point deadline =
      Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(std::min(timeout_s, 1e8) * 1e9));
  const auto lease_is_free = [&] { return wants_lease && !lease_.held(); };
  while (!op->done.load(std::memory_order_acquire)) {
    registry_.Sleep(*op, std::min(deadline, Clock::now() + kSignalPeriod), lease_is_free);
    if (op->done.load(std::memory_order_acquire)) break;
    if (interrupted && interrupted()) return Interrupted(membership_);
    if (lease_is_free() || Clock::now() >= deadline) return NotComplete(*op, timeout_s);
  }
  return Status();
}

// Wakes the threads that could bring an operation forward while no caller drives.
void Engine::NudgeForAsync() {
  membership_.WakeIdle();
  if (!membership_.topology.leads() && membership_.segment->rank(0).driving.load() == 0)
    membership_.segment->WakeIdle(0);
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

size_t Engine::Pending() {
  OperationsLock lock(registry_.mutex());
  return driver_->CountPending();
}

void Engine::EngineThread() {
  RankBlock& self = membership_.self();
  while (!stop_.load()) {
    const uint32_t bell = self.idle_bell.load(std::memory_order_seq_cst);
    if (driver_->TryTakeLease(/*background=*/true, nullptr)) {
      waiter_->CheckPeers();
      const Status status = driver_->Drive(nullptr);
      (void)status;  // Drive has failed every pending operation with it
      driver_->ReleaseLease();
    }
    SpreadRevocation();
    stragglers_->Tick();
    waits_->Relay();
    if (stop_.load()) break;
    self.idle_sleeping.store(1, std::memory_order_seq_cst);
    FutexWait(&self.idle_bell, bell, idle_sleep_ns_);
    self.idle_sleeping.store(0, std::memory_order_seq_cst);
  }
}

void Engine::Abort(const std::string& message) {
  membership_.segment->Revoke(Code::kInterrupted,
                              membership_.Describe(membership_.rank) + " aborted: " + message);
}

void Engine::Shutdown() {
  MutexLock shutting(shutdown_mutex_);
  if (shut_down_ || forgotten_.load()) return;
  shut_down_ = true;
  const bool killed = membership_.faults != nullptr &&
                      membership_.faults->killed[static_cast<size_t>(membership_.rank)].load();
  stop_.store(true);   // first: whatever fails here fails with kShutDown
  SpreadRevocation();  // why, before that this rank leaves
  if (!killed) AnnounceLeave();
  membership_.WakeDriver();
  membership_.WakeIdle();
  if (thread_.joinable()) thread_.join();
  if (control_link_ != nullptr) {
    SpreadRevocation();
    control_link_->Stop(kFarewellMs);
  }
  if (broker_ != nullptr) broker_->Close();
  while (!lease_.TryKeep()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  if (links_ != nullptr && !killed) links_->mesh().Farewell(kFarewellMs);
  driver_->Break(Status(Code::kShutDown, "this rank was shut down"));
  lease_.Drop();
}

void Engine::AnnounceLeave() {
  Segment& segment = *membership_.segment;
  std::string unfinished;
  {
    OperationsLock lock(registry_.mutex());
    unfinished = driver_->DescribeUnfinished();
  }
  if (!unfinished.empty() && membership_.size > 1) {
    segment.Revoke(Code::kRankLeft, membership_.Describe(membership_.rank) + " shut down with " + unfinished);
  }
  segment.left(membership_.rank).store(1, std::memory_order_seq_cst);
  segment.header().left_count.fetch_add(1, std::memory_order_seq_cst);
  for (int r = 0; r < membership_.topology.local_size(); ++r) {
    segment.WakeDriver(r);
    segment.WakeIdle(r);
  }
  if (Forwarder* const forwarder = control_->forwarder()) forwarder->TellLeft(membership_.rank);
}

void Engine::SpreadRevocation() {
  if (control_link_ == nullptr || !membership_.segment->revoked()) return;
  control_->forwarder()->TellRevoked(membership_.segment->RevokedStatus());
}

void Engine::Forget() {
  forgotten_.store(true);
  stop_.store(true);
  // The thread object refers to a thread that exists only in the parent.
  if (thread_.joinable()) thread_.detach();
  if (lane_ != nullptr) lane_->Forget();
  if (control_link_ != nullptr) control_link_->Forget();
  if (links_ != nullptr) links_->mesh().Close();
  membership_.segment->Forget();
}

std::vector<uint64_t> Engine::SentBytes() const {
  if (links_ != nullptr) return links_->SentBytes();
  return std::vector<uint64_t>(static_cast<size_t>(membership_.size));
}

EngineStats Engine::Stats() {
  OperationsLock lock(registry_.mutex());
  EngineStats stats;
  static_cast<CompletionStats&>(stats) = registry_.stats();
  if (links_ != nullptr) static_cast<LinkStats&>(stats) = links_->stats();
  stats.control = control_->stats();
  stats.late_reports = stragglers_->reports();
  stats.line_latency_ns = line_latency_ns_;
  return stats;
}

}  // namespace kolovod
