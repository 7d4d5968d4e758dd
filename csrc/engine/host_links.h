// What connects this rank to those of other hosts: the mesh that data goes over, and what its links are taken
// to cost. Only in a world of several hosts.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "collectives/hierarchical.h"
#include "engine/locks.h"
#include "engine/membership.h"
#include "transport/connection_broker.h"
#include "transport/mesh.h"
#include "transport/waiter.h"

namespace kolovod {

struct LinkStats {
  uint64_t connections = 0;        // for data, to ranks of other hosts
  uint64_t link_bytes_per_us = 0;  // as all ranks estimate with
  uint64_t link_latency_ns = 0;    // the same
  uint64_t link_revisions = 0;     // how often they were told so since the world has formed
};

class HostLinks {
 public:
  static Status Create(const Membership& membership, Waiter& waiter, std::shared_ptr<ConnectionBroker> broker,
                       std::unique_ptr<HostLinks>* out);

  Mesh& mesh() { return *mesh_; }
  // The verbs among all hosts, over those of this host. Once; it must live as long as this.
  std::unique_ptr<Backend> MakeBackend(std::unique_ptr<Backend> local);

  // By all ranks, when leaders listen to each other already. Every wait ends `timeout_ms` from now.
  // `believed_bytes_per_us`: taken instead of what was measured, unless 0.
  Status Measure(int64_t timeout_ms, double believed_bytes_per_us);
  // From this bucket on all ranks estimate with this.
  void Use(const LinkCost& cost) REQUIRES(kLease);
  void CountRevision() { revisions_.fetch_add(1, std::memory_order_relaxed); }
  // What this rank has learnt of the links: what all should be told, if anything.
  std::optional<LinkCost> Revise() REQUIRES(kLease) { return backend_->Revise(); }

  // Any thread.
  LinkStats stats() const;
  // By rank: bytes of data, without headers, that this rank has sent over the connection to it.
  std::vector<uint64_t> SentBytes() const;

 private:
  HostLinks(const Membership& membership, Waiter& waiter) : membership_(membership), waiter_(waiter) {}

  const Membership& membership_;
  Waiter& waiter_;
  int64_t forming_until_ns_ = 0;  // while links are measured: when that has taken too long
  std::unique_ptr<Mesh> mesh_;
  HierarchicalBackend* backend_ = nullptr;  // the executor's
  std::atomic<uint64_t> revisions_{0};
  std::atomic<double> bytes_per_us_{0}, latency_us_{0};
};

}  // namespace kolovod
