// The verbs among several hosts: inside a host through another backend (shared memory), between hosts over a
// mesh. Every byte crosses between two hosts once, and all ranks of a host carry their share.
//
// Allreduce, two hosts of two ranks; lane l is the ranks with place l on their hosts:
//
//   1 inside    reduce-scatter: of every block, rank l of each host has slice l
//   2 between   lane l exchanges slice l among the hosts (pairwise.h)
//   3 inside    allgather
//
// The steps of three blocks in a row overlap: while block k crosses, k+1 is reduced and k-1 gathered. There
// are as many lanes as the smallest host has ranks. Added are first the ranks of a host, in their order, then
// the hosts, in the order of their lowest ranks, whatever the size of a tensor or a bucket.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/hosts.h"
#include "collectives/backend.h"
#include "collectives/link_watch.h"
#include "collectives/tcp.h"

namespace kolovod {

// Not thread-safe. A wait inside the host must keep the mesh moving (Waiter::set_background with
// Mesh::Background): peers may need what this rank has posted before they can join in.
class HierarchicalBackend : public Backend {
 public:
  // `local`: among the ranks of this host, numbered as in Hosts. `mesh`: to all ranks, also those of this
  // host. `host_of[r]` is equal for ranks of one host. The same table and options on every rank.
  HierarchicalBackend(std::unique_ptr<Backend> local, Mesh& mesh, const std::vector<int>& host_of,
                      const TcpOptions& options);
  ~HierarchicalBackend() override;

  Status Allreduce(const FusedRange& range) override;
  Status Broadcast(const Piece& piece, DType dtype, int root, const std::string& name) override;
  Status Allgather(const void* in, char* out, const std::vector<size_t>& bytes) override;
  Status Alltoall(const char* in, char* out, const Splits& rows, size_t row_bytes) override;
  Status Reducescatter(const FusedRange& range, const std::vector<size_t>& counts) override;

  // By all ranks, before the first verb: rank 0 measures its link to the second host, and everybody takes
  // that for the cost of all links.
  Status MeasureLinks();
  const LinkCost& cost() const { return options_.cost; }
  // From now on; between two verbs, the same on every rank.
  void set_cost(const LinkCost& cost);
  // What they are taken to cost is compared from now on with what operations take.
  void Watch(const LinkCost& cost) { watch_ = LinkWatch(cost); }
  // What this rank has learnt of the links since: what all should be told, if anything.
  std::optional<LinkCost> Revise() { return watch_.Revise(); }

  const Hosts& hosts() const { return hosts_; }
  // How often an algorithm ran between hosts; may be read by any thread.
  uint64_t runs(Algorithm algorithm) const {
    return flat_.runs(algorithm) + (lane_ == nullptr ? 0 : lane_->runs(algorithm));
  }
  // Among this rank's lane, respectively among all ranks: what goes between hosts without shared memory.
  const TcpBackend* lane() const { return lane_.get(); }
  const TcpBackend& flat() const { return flat_; }

 private:
  class Block;

  Status AllreduceBetween(const FusedRange& range);

  // Of one lane, in a block of an allreduce whose blocks overlap.
  size_t OverlappingBytes() const;
  size_t local_size() const { return hosts_.ranks[static_cast<size_t>(host_)].size(); }
  // Nobody shares a host, or the partial sums of a host would not fit the dtype.
  bool GoesFlat(DType dtype, Op op) const;
  // Reducescatter inside the host of the parts of one run's ranks; the agents receive them in `out`.
  Status ReduceRun(const FusedRange& range, const Hosts::Run& run, const std::vector<size_t>& counts,
                   size_t begin, char* out);
  Status AlltoallInside(const char* in, char* out, const Splits& rows, size_t row_bytes,
                        const std::vector<size_t>& in_at, const std::vector<size_t>& out_at);

  const std::unique_ptr<Backend> local_;
  Mesh& mesh_;
  const Hosts hosts_;
  const int rank_;
  const int host_;
  const int place_;  // on its host
  TcpOptions options_;
  TcpBackend flat_;
  std::unique_ptr<TcpBackend> lane_;  // null: this rank is in none
  Scratch scratch_;
  LinkWatch watch_;
};

}  // namespace kolovod
