// Which ranks share a host, as one of them sees it.
#pragma once

#include <algorithm>
#include <vector>

namespace kolovod {

// Hosts are numbered in the order of their first ranks. The first rank of a host leads it: it speaks for the
// host to the others. Rank 0 leads the first host and is the root of all.
struct Topology {
  int rank = 0;
  std::vector<int> host_of{0};      // by rank
  std::vector<int> local_ranks{0};  // of this rank's host, ascending
  std::vector<int> leaders{0};      // by host
  int local_rank = 0;               // index in local_ranks

  // `hosts`: any label of its host for each rank, equal for ranks that share one.
  Topology(int rank_here, const std::vector<int>& hosts) : rank(rank_here) {
    host_of.clear();
    local_ranks.clear();
    leaders.clear();
    for (size_t r = 0; r < hosts.size(); ++r) {
      size_t host = 0;
      while (host < leaders.size() && hosts[static_cast<size_t>(leaders[host])] != hosts[r]) ++host;
      if (host == leaders.size()) leaders.push_back(static_cast<int>(r));
      host_of.push_back(static_cast<int>(host));
    }
    for (size_t r = 0; r < hosts.size(); ++r) {
      if (host_of[r] == host()) local_ranks.push_back(static_cast<int>(r));
    }
    local_rank =
        static_cast<int>(std::find(local_ranks.begin(), local_ranks.end(), rank) - local_ranks.begin());
  }

  int size() const { return static_cast<int>(host_of.size()); }
  int host() const { return host_of[static_cast<size_t>(rank)]; }
  int hosts() const { return static_cast<int>(leaders.size()); }
  int local_size() const { return static_cast<int>(local_ranks.size()); }
  bool leads() const { return local_rank == 0; }
  bool is_root() const { return rank == 0; }
  bool on_this_host(int r) const { return host_of[static_cast<size_t>(r)] == host(); }
};

}  // namespace kolovod
