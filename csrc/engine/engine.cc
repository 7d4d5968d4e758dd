#include "engine/engine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "collectives/hierarchical.h"
#include "engine/validate.h"

namespace kolovod {

namespace {

constexpr uint32_t kFarLineNs = 200;  // one way; 60 to 160 between cores that share a cache, 250 else
constexpr size_t kOverlapBytes = 1 << 20;
constexpr const char* kUnnamed = "unnamed.";
constexpr const char* kJoin = "unnamed.join";  // one name: ranks that join have submitted unequally much
constexpr int kFarewellMs = 500;               // for the last words to other hosts
constexpr int64_t kIdlePeriodNs = 100'000'000;

int64_t UsableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

Status NotComplete(const Operation& op, double after_s) {
  return Status(Code::kTimeout, std::string(NameOf(op.request.verb)) + " '" + op.request.name +
                                    "' is not complete after " + std::to_string(after_s) +
                                    " s; it is still pending and may be waited for again");
}

std::vector<int> RanksOf(std::vector<int> ranks, int size) {
  if (!ranks.empty()) return ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(r);
  return ranks;
}
}  // namespace

Engine::Engine(EngineOptions options)
    : rank_(options.rank),
      size_(options.size),
      topology_(options.rank,
                options.hosts.empty() ? std::vector<int>(static_cast<size_t>(options.size)) : options.hosts),
      ranks_(RanksOf(std::move(options.ranks), options.size)),
      epoch_(options.epoch),
      config_(options.config),
      segment_(std::move(options.segment)),
      liveness_(std::move(options.liveness)),
      faults_(std::move(options.faults)),
      use_external_(options.external),
      last_operations_prefix_(std::move(options.last_operations_prefix)),
      stacks_(std::move(options.stacks)) {
  mesh_fds_ = std::move(options.mesh_fds);
  told_left_.resize(static_cast<size_t>(topology_.local_size()));
  if (topology_.hosts() == 1 || !topology_.leads()) return;
  std::vector<UplinkPeer> peers;
  for (size_t host = 0; host < topology_.leaders.size(); ++host) {
    peers.push_back({options.uplink_fds[host], liveness_->Describe(topology_.leaders[host])});
  }
  uplink_ = std::make_unique<Uplink>(std::move(peers), epoch_);
}

Status Engine::Create(EngineOptions options, std::unique_ptr<Engine>* out,
                      const std::function<bool()>& interrupted) {
  const int on_host = options.segment->layout().size;
  if (on_host < 1 || on_host > kMaxSources || options.rank < 0 || options.rank >= options.size) {
    return Status(Code::kInvalidArgument, "rank " + std::to_string(options.rank) + " of size " +
                                              std::to_string(options.size) + ", " + std::to_string(on_host) +
                                              " of them on this host: need 0 <= rank < size, and at most " +
                                              std::to_string(kMaxSources) + " on one host");
  }
  std::unique_ptr<Engine> engine(new Engine(std::move(options)));
  KV_RETURN_IF_ERROR(engine->Attach(interrupted));
  engine->thread_ = std::thread([e = engine.get()] { e->EngineThread(); });
  *out = std::move(engine);
  return Status();
}

Status Engine::Attach(const std::function<bool()>& interrupted) {
  SegmentHeader& header = segment_->header();
  if (topology_.leads()) {
    if (config_.cores <= 0) config_.cores = UsableCores();
    segment_->WriteHeader(epoch_, config_);
  }
  const int64_t deadline_ns = NowNs() + config_.start_timeout_ms * 1'000'000;
  bool attached = false;
  waiter_ =
      std::make_unique<Waiter>(*segment_, topology_, *liveness_, stop_,
                               faults_ == nullptr ? nullptr : &faults_->killed[static_cast<size_t>(rank_)]);
  waiter_->Configure(WaitBudget{}, interrupted);
  while (true) {
    if (!attached && header.magic.load(std::memory_order_seq_cst) == kSegmentMagic) {
      KV_RETURN_IF_ERROR(segment_->CheckHeader(epoch_, &config_));
      self().attached.store(1, std::memory_order_seq_cst);
      header.attached.fetch_add(1, std::memory_order_seq_cst);
      attached = true;
    }
    if (attached && header.attached.load() == static_cast<uint32_t>(topology_.local_size())) break;
    if (segment_->revoked() || waiter_->CheckPeers()) return segment_->RevokedStatus();
    KV_RETURN_IF_ERROR(waiter_->Periodic(/*in_bucket=*/false));
    if (NowNs() > deadline_ns) {
      return Status(Code::kTimeout, MissingRanks() + " did not attach the shared segment within " +
                                        std::to_string(config_.start_timeout_ms) + " ms");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  // With a core for every engine thread beside every computing one, communication overlaps the backward
  // pass. Without, it would take the core that computes, and pay for the switching: then it waits until
  // somebody waits (docs/decisions/0003).
  kick_bytes_ = config_.kick_bytes > 0                        ? static_cast<size_t>(config_.kick_bytes)
                : config_.cores >= 2 * topology_.local_size() ? kOverlapBytes
                                                              : SIZE_MAX;
  records_ = std::make_unique<RecordRing>(segment_->records(topology_.local_rank), &self().unrecorded);
  MakeLateWatch();
  control_ = std::make_unique<Control>(*segment_, topology_, ranks_, epoch_, config_, mutex_, faults_.get(),
                                       uplink_.get());
  ProbeLatency();
  KV_RETURN_IF_ERROR(MakeBackend(std::move(mesh_fds_)));
  if (uplink_ != nullptr) StartUplink();
  return Status();
}

Status Engine::MakeBackend(std::vector<int> mesh_fds) {
  const std::atomic<int>* delay_us =
      faults_ == nullptr ? nullptr : &faults_->delay_us[static_cast<size_t>(rank_)];
  backend_ = std::make_unique<ShmBackend>(*segment_, topology_.local_rank, config_, *waiter_, delay_us,
                                          stats_.line_latency_ns > kFarLineNs);
  if (topology_.hosts() > 1) {
    std::vector<MeshPeer> peers;
    for (int r = 0; r < size_; ++r)
      peers.push_back({mesh_fds[static_cast<size_t>(r)], liveness_->Describe(r)});
    MeshOptions options;
    options.epoch = epoch_;
    options.check = [this] {
      return waiter_->MustStop() ? waiter_->Stopped() : waiter_->Periodic(/*in_bucket=*/true);
    };
    KV_RETURN_IF_ERROR(Mesh::Create(rank_, std::move(peers), std::move(options), &mesh_));
    TcpOptions tcp;
    tcp.algorithm =
        static_cast<Algorithm>(std::clamp<int64_t>(config_.tcp_algorithm, 0, kAlgorithmCount - 1));
    backend_ = std::make_unique<HierarchicalBackend>(std::move(backend_), *mesh_, topology_.host_of, tcp);
    waiter_->set_background([this] { return mesh_->Background(); });
  }
  if (use_external_) {
    auto external = std::make_unique<ExternalBackend>(std::move(backend_), *segment_, *waiter_, stop_);
    external_ = external.get();
    backend_ = std::move(external);
  }
  return Status();
}

void Engine::StartUplink() {
  Uplink::Events events;
  control_->set_on_late([this](const Note& note) { late_->Hear(note); });
  events.urgent = [this](const Uplink::Frame& frame) { return control_->Urgent(frame); };
  events.arrived = [this] {
    segment_->RingDriver(topology_.local_rank);
    if (self().driving.load(std::memory_order_seq_cst) == 0) segment_->RingIdle(topology_.local_rank);
  };
  events.lost = [this](int host, const std::string& reason) {
    control_->Lost(host, reason, liveness_->Describe(topology_.leaders[static_cast<size_t>(host)]));
  };
  uplink_->Start(std::move(events));
}

std::string Engine::MissingRanks() {
  std::string missing;
  for (int r = 0; r < topology_.local_size(); ++r) {
    if (segment_->rank(r).attached.load() != 0) continue;
    if (!missing.empty()) missing += ", ";
    missing += liveness_->Describe(topology_.local_ranks[static_cast<size_t>(r)]);
  }
  return missing.empty() ? "no rank" : missing;
}

// Ranks 0 and 1 pass a cache line to and fro: do their cores share a cache? Rank 0 publishes the best of
// several rounds; nobody waits longer than a few milliseconds for it.
void Engine::ProbeLatency() {
  SegmentHeader& header = segment_->header();
  const int local = topology_.local_rank;
  if (topology_.local_size() < 2 || config_.cores < topology_.local_size()) return;
  constexpr int kRounds = 400;
  const int64_t deadline_ns = NowNs() + 3'000'000;
  if (local <= 1) {
    std::atomic<uint32_t>& mine = self().ping;
    std::atomic<uint32_t>& other = segment_->rank(1 - local).ping;
    int64_t best_ns = 0;
    int64_t last_ns = NowNs();
    for (uint32_t i = 1; i <= kRounds; ++i) {
      if (local == 0) mine.store(i, std::memory_order_seq_cst);
      while (other.load(std::memory_order_acquire) < i && NowNs() < deadline_ns) CpuRelax();
      if (other.load(std::memory_order_acquire) < i) break;
      if (local == 1) mine.store(i, std::memory_order_seq_cst);
      if (i % 50 == 0) {
        const int64_t now_ns = NowNs();
        const int64_t one_way_ns = (now_ns - last_ns) / 100;
        if (best_ns == 0 || one_way_ns < best_ns) best_ns = one_way_ns;
        last_ns = now_ns;
      }
    }
    if (local == 0) header.line_latency_ns.store(static_cast<uint32_t>(best_ns) + 1);
  }
  while (header.line_latency_ns.load() == 0 && NowNs() < deadline_ns + 2'000'000) CpuRelax();
  const uint32_t published = header.line_latency_ns.load();
  stats_.line_latency_ns = published > 0 ? published - 1 : 0;
}

Engine::~Engine() {
  // Without a control plane, Attach had failed and there is no world to leave.
  if (control_ != nullptr && !forgotten_.load()) Shutdown();
  for (int fd : mesh_fds_) {
    if (fd >= 0) close(fd);
  }
}

Status Engine::Submit(Request request, std::vector<SubmittedTensor> tensors, bool blocking, uint64_t* handle,
                      Callback on_done) {
  if (forgotten_.load()) return Status(Code::kShutDown, "this process was forked from a rank");
  if (request.name.starts_with(kUnnamed)) {
    return Status(Code::kInvalidArgument, "the name '" + request.name +
                                              "' is not to be had: names that begin with '" +
                                              std::string(kUnnamed) + "' are the engine's own");
  }
  const bool is_join = request.verb == Verb::kJoin;
  if (is_join) {
    request.name = kJoin;
    request.cacheable = false;
  } else if (request.name.empty()) {
    // Before anything is refused, so that the ranks' numbers stay level.
    request.name = kUnnamed + std::to_string(next_unnamed_.fetch_add(1));
    request.cacheable = false;
  }
  KV_RETURN_IF_ERROR(Validate(request, tensors, ranks_));
  auto op = std::make_shared<Operation>();
  for (SubmittedTensor& tensor : tensors) {
    const size_t count = ElementsOf(tensor.meta);
    op->counts.push_back(count);
    op->inputs.push_back(tensor.in);
    op->outputs.push_back(tensor.out);
    op->out_bytes.push_back(tensor.out_bytes);
    op->bytes += count * SizeOf(tensor.meta.dtype);
    request.tensors.push_back(std::move(tensor.meta));
  }
  if (!IsReduction(request.verb)) {
    request.op = Op::kSum;
    request.prescale = request.postscale = 1.0;
  }
  op->request = std::move(request);
  op->on_done = std::move(on_done);
  const bool driven = op->on_done != nullptr;
  bool appended;
  const auto r = static_cast<size_t>(rank_);
  {
    std::lock_guard lock(mutex_);
    if (!broken_.ok()) return broken_;
    if (Status status = WorldStatus(); !status.ok()) {
      return segment_->revoked() ? WithLastOperations(status) : status;
    }
    if (joined_) {
      return Status(Code::kInvalidArgument, std::string(NameOf(op->request.verb)) + " '" + op->request.name +
                                                "': rank " + std::to_string(ranks_[r]) +
                                                " has joined and has no data until join returns");
    }
    if (control_->pending().contains(op->request.name)) {
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
    if (blocking) self().driving.store(1, std::memory_order_seq_cst);
    joined_ = is_join;
    // The time before, the rest after: others need not wait for it.
    const int64_t now_ns = RecordNs(op->bytes);
    if (is_join) {
      control_->Join(op);
      appended = false;
    } else {
      appended = control_->Announce(op);
    }
    KeepRecord(*op, now_ns);
  }
  if (driven) {
    segment_->RingIdle(topology_.local_rank);
  } else if (!blocking && appended && ready_bytes_.fetch_add(op->bytes) + op->bytes >= kick_bytes_) {
    ready_bytes_.store(0);
    segment_->RingIdle(topology_.local_rank);
  }
  return Status();
}

// A rank that leaves with work behind revokes first, so that reason is looked at last.
Status Engine::WorldStatus() {
  int leaver = -1;
  if (segment_->header().left_count.load(std::memory_order_seq_cst) != 0) {
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
    KV_RETURN_IF_ERROR(WaitAsleep(op, timeout_s, /*wants_lease=*/false, interrupted));
    return op->status;
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
      if (driven_.load() > 0) segment_->RingIdle(topology_.local_rank);
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

// Leaves the driving to the engine thread: a driver cannot give up in the middle of a bucket. Also
// returns early, with kTimeout, when the lease is free for a caller that wants it.
Status Engine::WaitAsleep(const OperationPtr& op, double timeout_s, bool wants_lease,
                          const std::function<bool()>& interrupted) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline =
      Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(std::min(timeout_s, 1e8) * 1e9));
  while (!op->done.load(std::memory_order_acquire)) {
    if (!wants_lease) NudgeForAsync();
    {
      std::unique_lock lock(mutex_);
      ++sleeping_callers_;
      const Clock::time_point wake =
          std::min(deadline, Clock::now() + std::chrono::milliseconds(wants_lease ? 100 : 20));
      changed_.wait_until(lock, wake, [&] {
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
  return control_->pending().size();
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
    FutexWait(&self().idle_bell, bell, kIdlePeriodNs);
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
  while (lease_.exchange(true)) std::this_thread::sleep_for(std::chrono::microseconds(50));
  Break(Status(Code::kShutDown, "this rank was shut down"));
  lease_.store(false);
}

void Engine::AnnounceLeave() {
  std::string pending;
  {
    // The driving thread may have seen `stop_` first, and failed them already.
    std::lock_guard lock(mutex_);
    const size_t count = control_->pending().size() + abandoned_.size();
    if (count > 0) {
      pending = std::to_string(count) + " operation(s) pending there, among them '" +
                (abandoned_.empty() ? control_->pending().begin()->first : abandoned_.front()) + "'";
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
  if (uplink_ == nullptr || !segment_->revoked() || spread_.exchange(true)) return;
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
  return stats;
}

}  // namespace kolovod
