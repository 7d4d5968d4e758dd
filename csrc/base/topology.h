// Which ranks share a host, as one of them sees it.
#pragma once

#include <vector>

#include "base/hosts.h"

namespace kolovod {

// The first rank of a host leads it: it speaks for the host to the others. Rank 0 leads the first host and is
// the root of all.
struct Topology {
  // `labels`: for each rank any number of its host, equal for ranks that share one.
  Topology(int rank_here, const std::vector<int>& labels) : rank(rank_here) {
    const Hosts hosts(labels);
    host_of = hosts.host;
    local_ranks = hosts.ranks[static_cast<size_t>(host())];
    local_of = hosts.local;
    local_rank = local_of[static_cast<size_t>(rank)];
    for (size_t h = 0; h < hosts.ranks.size(); ++h) {
      leaders.push_back(hosts.ranks[h].front());
      if (hosts.ranks[h].size() <= static_cast<size_t>(local_rank)) continue;
      if (h < static_cast<size_t>(host())) ++cross_rank;
      ++cross_size;
    }
  }

  int size() const { return static_cast<int>(host_of.size()); }
  int host() const { return host_of[static_cast<size_t>(rank)]; }
  int hosts() const { return static_cast<int>(leaders.size()); }
  int local_size() const { return static_cast<int>(local_ranks.size()); }
  bool leads() const { return local_rank == 0; }
  bool is_root() const { return rank == 0; }
  bool on_this_host(int r) const { return host_of[static_cast<size_t>(r)] == host(); }

  int rank;
  std::vector<int> host_of;      // by rank; hosts are numbered in the order of their first ranks
  std::vector<int> local_ranks;  // of this rank's host, ascending
  std::vector<int> local_of;     // by rank: its index among those of its host
  std::vector<int> leaders;      // by host
  int local_rank;                // index in local_ranks
  int cross_rank = 0;            // index of this host among those that have this local rank
  int cross_size = 0;            // how many hosts have it
};

}  // namespace kolovod
