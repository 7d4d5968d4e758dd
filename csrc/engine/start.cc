// How an engine comes to life: attached to its segment, its control plane and its backend made.

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "collectives/hierarchical.h"
#include "engine/engine.h"
#include "transport/cores.h"

namespace kolovod {

namespace {

constexpr uint32_t kFarLineNs = 200;  // one way; 60 to 160 between cores that share a cache, 250 else
constexpr size_t kOverlapBytes = 1 << 20;

int64_t UsableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
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
      switchboard_(std::move(options.switchboard)),
      use_external_(options.external),
      driver_sleep_ns_(options.driver_sleep_ns),
      idle_sleep_ns_(options.idle_sleep_ns),
      believed_bytes_per_us_(options.believed_bytes_per_us),
      last_operations_prefix_(std::move(options.last_operations_prefix)),
      stacks_(std::move(options.stacks)) {
  told_left_.resize(static_cast<size_t>(topology_.local_size()));
  if (topology_.hosts() == 1 || !topology_.leads()) return;
  std::vector<UplinkPeer> peers;
  for (const int host : Tree(topology_.hosts(), topology_.host()).neighbours) {
    const auto h = static_cast<size_t>(host);
    peers.push_back(
        {host, options.uplink_fds[h], options.uplink_keys.empty() ? nullptr : options.uplink_keys[h]});
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
  engine->thread_ = std::thread([e = engine.get()] {
    AskForShortTurns();
    e->EngineThread();
  });
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
  auto peers = std::make_unique<PeerMemory>(*segment_, topology_.local_rank);
  peers->Announce();
  bool attached = false;
  waiter_ =
      std::make_unique<Waiter>(*segment_, topology_, *liveness_, stop_,
                               faults_ == nullptr ? nullptr : &faults_->killed[static_cast<size_t>(rank_)]);
  waiter_->set_sleep_ns(driver_sleep_ns_);
  waiter_->Configure(WaitBudget{}, interrupted);
  while (true) {
    if (!attached && header.magic.load(std::memory_order_seq_cst) != 0) {
      const Status fits = segment_->CheckHeader(epoch_, &config_);
      if (!fits.ok()) return Status(fits.code(), liveness_->Describe(rank_) + " " + fits.message());
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
  if (config_.peer_read_bytes == 0) peers = nullptr;
  if (peers != nullptr) KV_RETURN_IF_ERROR(ProbePeers(*peers, deadline_ns));
  const bool reads_peers = peers != nullptr && peers->usable();
  // With a core for every engine thread beside every computing one, communication overlaps the backward
  // pass. Without, it would take the core that computes, and pay for the switching: then it waits until
  // somebody waits (docs/decisions/0003).
  kick_bytes_ = config_.kick_bytes > 0                        ? static_cast<size_t>(config_.kick_bytes)
                : config_.cores >= 2 * topology_.local_size() ? kOverlapBytes
                                                              : SIZE_MAX;
  LimitUnusedOutputs(static_cast<size_t>(config_.unused_output_bytes));
  records_ = std::make_unique<RecordRing>(segment_->records(topology_.local_rank), &self().unrecorded);
  MakeLateWatch();
  control_ = std::make_unique<Control>(*segment_, topology_, ranks_, epoch_, config_, mutex_, faults_.get(),
                                       uplink_.get());
  ProbeLatency();
  KV_RETURN_IF_ERROR(MakeBackend(std::move(peers)));
  transfers_ = std::make_unique<PointToPoint>(
      *segment_, mutex_, PointToPointOptions{topology_, ranks_, reads_peers, mesh_.get(), [this] {
                                               return waiter_->CheckPeers() || segment_->revoked();
                                             }});
  if (uplink_ != nullptr) StartUplink();
  return hierarchical_ == nullptr ? Status() : MeasureLinks();
}

Status Engine::ProbePeers(PeerMemory& peers, int64_t deadline_ns) {
  peers.Probe();
  while (!peers.AllHaveProbed()) {
    if (segment_->revoked() || waiter_->CheckPeers()) return segment_->RevokedStatus();
    KV_RETURN_IF_ERROR(waiter_->Periodic(/*in_bucket=*/false));
    if (NowNs() > deadline_ns) {
      return Status(Code::kTimeout, "not every rank of this host has begun within " +
                                        std::to_string(config_.start_timeout_ms) + " ms");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return Status();
}

Status Engine::MakeBackend(std::unique_ptr<PeerMemory> peer_memory) {
  std::function<void()> before_post;
  if (faults_ != nullptr) before_post = [this] { faults_->Pause(rank_); };
  backend_ =
      std::make_unique<ShmBackend>(*segment_, topology_.local_rank, config_, *waiter_, std::move(before_post),
                                   stats_.line_latency_ns > kFarLineNs, std::move(peer_memory));
  if (topology_.hosts() > 1) {
    KV_RETURN_IF_ERROR(MakeMesh());
    TcpOptions tcp;
    tcp.algorithm =
        static_cast<Algorithm>(std::clamp<int64_t>(config_.tcp_algorithm, 0, kAlgorithmCount - 1));
    auto between = std::make_unique<HierarchicalBackend>(std::move(backend_), *mesh_, topology_.host_of, tcp);
    waiter_->set_background([this] { return mesh_->Background(); });
    hierarchical_ = between.get();
    backend_ = std::move(between);
  }
  if (topology_.hosts() == 1 && !use_external_) {
    eager_ = std::make_unique<EagerSlots>(*segment_, topology_.local_rank);
    control_->SetStage([this](Operation& op) { return Stage(op); });
  }
  if (use_external_) {
    auto external = std::make_unique<ExternalBackend>(std::move(backend_), rank_, *segment_, *waiter_, stop_);
    external_ = external.get();
    backend_ = std::move(external);
  }
  return Status();
}

// When leaders listen to each other already: of a rank that fails here all are to hear.
Status Engine::MeasureLinks() {
  // A host that stops now is waited for no longer than for one that never came.
  forming_until_ns_ = NowNs() + config_.start_timeout_ms * 1'000'000;
  const Status measured = hierarchical_->MeasureLinks();
  forming_until_ns_ = 0;
  if (measured.ok()) {
    LinkCost cost = hierarchical_->cost();
    if (believed_bytes_per_us_ > 0) cost.bytes_per_us = believed_bytes_per_us_;
    hierarchical_->Watch(cost);
    UseLinks(cost);
    return measured;
  }
  segment_->Revoke(measured.code(), measured.message());
  SpreadRevocation();
  return segment_->RevokedStatus();
}

void Engine::UseLinks(const LinkCost& cost) {
  hierarchical_->set_cost(cost);
  link_bytes_per_us_.store(cost.bytes_per_us, std::memory_order_relaxed);
}

Status Engine::MakeMesh() {
  std::vector<MeshPeer> peers;
  for (int r = 0; r < size_; ++r) peers.push_back({-1, liveness_->Describe(r)});
  MeshOptions options;
  options.epoch = epoch_;
  options.check = [this] {
    if (forming_until_ns_ > 0 && NowNs() > forming_until_ns_) {
      return Status(Code::kTimeout, "a rank of another host has connected, but sent nothing within " +
                                        std::to_string(config_.start_timeout_ms) + " ms");
    }
    return waiter_->MustStop() ? waiter_->Stopped() : waiter_->Periodic(/*in_bucket=*/true);
  };
  options.switchboard = switchboard_;
  // The peer waits for the connection as well: it must hear that there will be none.
  switchboard_->set_on_failure(
      [segment = segment_](const std::string& text) { segment->Revoke(Code::kRankLost, text); });
  return Mesh::Create(rank_, std::move(peers), std::move(options), &mesh_);
}

void Engine::StartUplink() {
  Uplink::Events events;
  control_->set_on_late([this](const Note& note) { late_->Hear(note); });
  events.read = [this](const Uplink::Frame& frame) { return control_->Relay(frame); };
  events.arrived = [this] {
    segment_->RingDriver(topology_.local_rank);
    if (self().driving.load(std::memory_order_seq_cst) == 0) segment_->RingIdle(topology_.local_rank);
  };
  events.lost = [this](int host, const std::string& reason) {
    control_->Lost(host, reason, liveness_->Describe(topology_.leaders[static_cast<size_t>(host)]));
  };
  uplink_->Start(std::move(events));
  waiter_->set_before_sleep([this] { uplink_->LookAway(); });
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

}  // namespace kolovod
