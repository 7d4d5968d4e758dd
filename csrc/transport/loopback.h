// N ranks in one process over the real segment code, with faults: for tests, and public as
// kolovod.testing.loopback.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "base/topology.h"
#include "base/tree.h"
#include "transport/connection_broker.h"
#include "transport/liveness.h"
#include "transport/segment.h"

namespace kolovod {

class LoopbackWorld {
 public:
  // `hosts[r]`: a label of rank r's host; ranks of different hosts are connected by sockets.
  static Status Create(const std::vector<int>& hosts, const Config& config,
                       std::shared_ptr<LoopbackWorld>* out) {
    std::vector<int> ranks;
    for (size_t r = 0; r < hosts.size(); ++r) ranks.push_back(static_cast<int>(r));
    return Create(std::move(ranks), hosts, config, nullptr, out);
  }

  // A process set: some ranks of this world, which share its fate and its faults.
  Status MakeSet(std::vector<int> members, std::shared_ptr<LoopbackWorld>* out) {
    std::vector<int> labels;
    for (int rank : members) labels.push_back(hosts[static_cast<size_t>(rank)]);
    KV_RETURN_IF_ERROR(Create(std::move(members), std::move(labels), config, this, out));
    MutexLock lock(mutex_);
    sets_.push_back(*out);
    return Status();
  }

  // The rank does nothing more, as a process that was killed, and its peers can see that it is dead.
  void Kill(int rank) {
    ForEach(rank, [](LoopbackWorld& world, int index) {
      world.faults->killed[static_cast<size_t>(index)].store(true);
      const Topology topology(index, world.hosts);
      Segment& segment = *world.SegmentOf(index);
      segment.WakeDriver(topology.local_rank);
      segment.WakeIdle(topology.local_rank);
    });
  }
  void Delay(int rank, int us) {
    ForEach(rank, [us](LoopbackWorld& world, int index) {
      world.faults->delay_us[static_cast<size_t>(index)].store(us);
    });
  }
  void Drop(int rank, int count) {
    ForEach(rank, [count](LoopbackWorld& world, int index) {
      world.faults->drop[static_cast<size_t>(index)].store(count);
    });
  }

  int size() const { return static_cast<int>(ranks.size()); }
  const std::shared_ptr<Segment>& SegmentOf(int rank) { return segments[hosts[static_cast<size_t>(rank)]]; }
  // Connected sockets for the engine of `rank`, which takes them over.
  std::vector<int> TakeControlLinks(int rank) {
    return std::exchange(control_links_[static_cast<size_t>(rank)], {});
  }
  // The same, as long as they were not taken.
  const std::vector<int>& ControlLinksOf(int rank) { return control_links_[static_cast<size_t>(rank)]; }
  // Gives it connections for data.
  const std::shared_ptr<ConnectionBroker>& BrokerOf(int rank) {
    return exchange_->brokers[static_cast<size_t>(rank)];
  }
  ~LoopbackWorld() {
    for (const std::vector<int>& fds : control_links_) {
      for (int fd : fds) {
        if (fd >= 0) close(fd);
      }
    }
  }

  Config config;
  std::vector<int> ranks;  // numbers in the world
  std::vector<int> hosts;
  std::map<int, std::shared_ptr<Segment>> segments;  // by host label
  std::shared_ptr<LoopbackFaults> faults;
  double believed_bytes_per_us = 0;  // of the links between hosts, when the world begins; 0: as measured

 private:
  static Status Create(std::vector<int> ranks, std::vector<int> hosts, const Config& config,
                       const LoopbackWorld* world, std::shared_ptr<LoopbackWorld>* out) {
    const auto size = static_cast<int>(ranks.size());
    auto made = std::make_shared<LoopbackWorld>();
    made->config = config;
    made->ranks = std::move(ranks);
    made->hosts = std::move(hosts);
    made->faults = std::make_shared<LoopbackFaults>(size);
    for (int host : made->hosts) {
      std::shared_ptr<Segment>& segment = made->segments[host];
      const auto local = std::count(made->hosts.begin(), made->hosts.end(), host);
      if (segment == nullptr) {
        KV_RETURN_IF_ERROR(Segment::Map(-1, SegmentLayout(static_cast<int>(local), size, config), &segment));
        if (world != nullptr) segment->BelongTo(world->segments.at(host));
      }
    }
    KV_RETURN_IF_ERROR(made->Connect());
    *out = std::move(made);
    return Status();
  }

  Status Connect() {
    const Topology topology(0, hosts);
    const auto n = static_cast<size_t>(size());
    exchange_ = std::make_shared<Exchange>();
    for (int r = 0; r < size(); ++r) {
      exchange_->brokers.push_back(
          std::make_shared<ConnectionBroker>([r, weak = std::weak_ptr(exchange_)](int peer, int stripe) {
            if (const std::shared_ptr<Exchange> exchange = weak.lock()) exchange->Connect(r, peer, stripe);
          }));
    }
    control_links_.assign(n, std::vector<int>(topology.leaders.size(), -1));
    if (topology.hosts() == 1) return Status();
    for (size_t host = 1; host < topology.leaders.size(); ++host) {
      const auto parent = static_cast<size_t>(Tree::ParentOf(static_cast<int>(host)));
      const auto leader = static_cast<size_t>(topology.leaders[host]);
      const auto above = static_cast<size_t>(topology.leaders[parent]);
      KV_RETURN_IF_ERROR(MakePair(&control_links_[above][host], &control_links_[leader][parent]));
    }
    return Status();
  }

  static Status MakePair(int* a, int* b) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
      return Status(Code::kInternal, "no more sockets for a loopback world");
    }
    *a = pair[0];
    *b = pair[1];
    return Status();
  }

  // Calls visit(world, index of the rank there) for this world and the sets that the rank is in.
  template <class Visit>
  void ForEach(int rank, Visit visit) {
    visit(*this, rank);
    MutexLock lock(mutex_);
    for (const auto& set : sets_) {
      const auto found = std::find(set->ranks.begin(), set->ranks.end(), rank);
      if (found != set->ranks.end()) visit(*set, static_cast<int>(found - set->ranks.begin()));
    }
  }

  // Connects two ranks when the first of them wants that.
  struct Exchange {
    void Connect(int a, int b, int stripe) {
      MutexLock lock(mutex);
      if (!connected.insert({std::min(a, b), std::max(a, b), stripe}).second) return;
      int fds[2];
      const Status status = MakePair(&fds[0], &fds[1]);
      for (const int end : {0, 1}) {
        ConnectionBroker& at = *brokers[static_cast<size_t>(end == 0 ? a : b)];
        status.ok() ? at.Connected({end == 0 ? b : a, fds[end], nullptr, stripe})
                    : at.Failed(status.message());
      }
    }
    std::vector<std::shared_ptr<ConnectionBroker>> brokers;  // by rank
    Mutex mutex;
    std::set<std::tuple<int, int, int>> connected GUARDED_BY(mutex);
  };

  std::vector<std::vector<int>> control_links_;  // by rank, by host; those that were not taken
  std::shared_ptr<Exchange> exchange_;
  Mutex mutex_;
  std::vector<std::shared_ptr<LoopbackWorld>> sets_ GUARDED_BY(mutex_);
};

}  // namespace kolovod
