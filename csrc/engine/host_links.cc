#include "engine/host_links.h"

#include <algorithm>
#include <string>

namespace kolovod {

Status HostLinks::Create(const Membership& membership, Waiter& waiter,
                         std::shared_ptr<ConnectionBroker> broker, std::unique_ptr<HostLinks>* out) {
  std::unique_ptr<HostLinks> links(new HostLinks(membership, waiter));
  std::vector<MeshPeer> peers;
  for (int r = 0; r < membership.size; ++r) peers.push_back({-1, membership.Describe(r)});
  MeshOptions options;
  options.epoch = membership.epoch;
  options.host_lost_ms = membership.config.host_lost_ms * 4 / 3;
  options.check = [self = links.get()] {
    if (self->forming_until_ns_ > 0 && NowNs() > self->forming_until_ns_) {
      return Status(Code::kTimeout, "a rank of another host has connected, but sent nothing within " +
                                        std::to_string(self->membership_.config.start_timeout_ms) + " ms");
    }
    Waiter& waits = self->waiter_;
    return waits.MustStop() ? waits.Stopped() : waits.Periodic(/*in_bucket=*/true);
  };
  // The peer waits for the connection as well: it must hear that there will be none.
  broker->set_on_failure(
      [segment = membership.segment](const std::string& text) { segment->Revoke(Code::kRankLost, text); });
  options.broker = std::move(broker);
  KV_RETURN_IF_ERROR(Mesh::Create(membership.rank, std::move(peers), std::move(options), &links->mesh_));
  waiter.set_background([mesh = links->mesh_.get()] { return mesh->Background(); });
  *out = std::move(links);
  return Status();
}

std::unique_ptr<Backend> HostLinks::MakeBackend(std::unique_ptr<Backend> local) {
  TcpOptions tcp;
  tcp.algorithm =
      static_cast<Algorithm>(std::clamp<int64_t>(membership_.config.tcp_algorithm, 0, kAlgorithmCount - 1));
  tcp.stripes = static_cast<int>(std::clamp<int64_t>(membership_.config.connections, 0, Mesh::kMostStripes));
  auto between =
      std::make_unique<HierarchicalBackend>(std::move(local), *mesh_, membership_.topology.host_of, tcp);
  backend_ = between.get();
  return between;
}

Status HostLinks::Measure(int64_t timeout_ms, double believed_bytes_per_us) {
  // A host that stops now is waited for no longer than for one that never came.
  forming_until_ns_ = NowNs() + timeout_ms * 1'000'000;
  const Status measured = backend_->MeasureLinks();
  forming_until_ns_ = 0;
  if (!measured.ok()) return measured;
  LinkCost cost = backend_->cost();
  if (believed_bytes_per_us > 0) cost.bytes_per_us = believed_bytes_per_us;
  backend_->Watch(cost);
  AssumeHeld(kLease);  // nobody drives before the world has formed
  Use(cost);
  return measured;
}

void HostLinks::Use(const LinkCost& cost) {
  backend_->set_cost(cost);
  bytes_per_us_.store(cost.bytes_per_us, std::memory_order_relaxed);
  latency_us_.store(cost.latency_us, std::memory_order_relaxed);
}

LinkStats HostLinks::stats() const {
  return {static_cast<uint64_t>(mesh_->connections()), static_cast<uint64_t>(bytes_per_us_.load()),
          static_cast<uint64_t>(1000 * latency_us_.load()), revisions_.load()};
}

std::vector<uint64_t> HostLinks::SentBytes() const {
  std::vector<uint64_t> bytes;
  for (int r = 0; r < membership_.size; ++r) bytes.push_back(mesh_->sent_bytes(r));
  return bytes;
}

}  // namespace kolovod
