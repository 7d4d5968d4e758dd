#include "engine/formation.h"

#include <sched.h>

#include <chrono>
#include <thread>

namespace kolovod {

namespace {

int64_t UsableCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

Status Formation::Attach() {
  Config& config = membership_.config;
  Segment& segment = *membership_.segment;
  if (membership_.topology.leads()) {
    if (config.cores <= 0) config.cores = UsableCores();
    segment.WriteHeader(membership_.epoch, config);
  }
  const int64_t deadline_ns = NowNs() + config.start_timeout_ms * 1'000'000;
  peers_ = std::make_unique<PeerMemory>(segment, membership_.topology.local_rank);
  peers_->Announce();
  KV_RETURN_IF_ERROR(Meet(deadline_ns));
  if (config.peer_read_bytes == 0) peers_ = nullptr;
  return peers_ == nullptr ? Status() : ProbePeers(deadline_ns);
}

Status Formation::Meet(int64_t deadline_ns) {
  Segment& segment = *membership_.segment;
  SegmentHeader& header = segment.header();
  bool attached = false;
  while (true) {
    if (!attached && header.magic.load(std::memory_order_seq_cst) != 0) {
      const Status fits = segment.CheckHeader(membership_.epoch, &membership_.config);
      if (!fits.ok())
        return Status(fits.code(), membership_.Describe(membership_.rank) + " " + fits.message());
      membership_.self().attached.store(1, std::memory_order_seq_cst);
      header.attached.fetch_add(1, std::memory_order_seq_cst);
      attached = true;
    }
    if (attached && header.attached.load() == static_cast<uint32_t>(membership_.topology.local_size())) {
      return Status();
    }
    if (segment.revoked() || waiter_.CheckPeers()) return segment.RevokedStatus();
    KV_RETURN_IF_ERROR(waiter_.Periodic(/*in_bucket=*/false));
    if (NowNs() > deadline_ns) {
      return Status(Code::kTimeout, MissingRanks() + " did not attach the shared segment within " +
                                        std::to_string(membership_.config.start_timeout_ms) + " ms");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

Status Formation::ProbePeers(int64_t deadline_ns) {
  peers_->Probe();
  while (!peers_->AllHaveProbed()) {
    Segment& segment = *membership_.segment;
    if (segment.revoked() || waiter_.CheckPeers()) return segment.RevokedStatus();
    KV_RETURN_IF_ERROR(waiter_.Periodic(/*in_bucket=*/false));
    if (NowNs() > deadline_ns) {
      return Status(Code::kTimeout, "not every rank of this host has begun within " +
                                        std::to_string(membership_.config.start_timeout_ms) + " ms");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return Status();
}

std::string Formation::MissingRanks() const {
  const Topology& topology = membership_.topology;
  std::string missing;
  for (int r = 0; r < topology.local_size(); ++r) {
    if (membership_.segment->rank(r).attached.load() != 0) continue;
    if (!missing.empty()) missing += ", ";
    missing += membership_.Describe(topology.local_ranks[static_cast<size_t>(r)]);
  }
  return missing.empty() ? "no rank" : missing;
}

// Ranks 0 and 1 pass a cache line to and fro: do their cores share a cache? Rank 0 publishes the best of
// several rounds; nobody waits longer than a few milliseconds for it.
uint32_t Formation::MeasureLineLatencyNs() {
  Segment& segment = *membership_.segment;
  SegmentHeader& header = segment.header();
  const int local = membership_.topology.local_rank;
  const int ranks = membership_.topology.local_size();
  if (ranks < 2 || membership_.config.cores < ranks) return 0;
  constexpr int kRounds = 400;
  const int64_t deadline_ns = NowNs() + 3'000'000;
  if (local <= 1) {
    std::atomic<uint32_t>& mine = membership_.self().ping;
    std::atomic<uint32_t>& other = segment.rank(1 - local).ping;
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
  return published > 0 ? published - 1 : 0;
}

}  // namespace kolovod
