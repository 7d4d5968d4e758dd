// Which ranks share a host. PURE.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

namespace kolovod {

struct Hosts {
  // `host_of[r]`: any number that is equal for ranks of one host.
  explicit Hosts(const std::vector<int>& host_of) : host(host_of.size()), local(host_of.size()) {
    std::map<int, int> numbers;  // in order of first appearance
    for (size_t r = 0; r < host_of.size(); ++r) {
      const auto [found, added] = numbers.emplace(host_of[r], static_cast<int>(ranks.size()));
      if (added) ranks.emplace_back();
      host[r] = found->second;
      std::vector<int>& here = ranks[static_cast<size_t>(host[r])];
      local[r] = static_cast<int>(here.size());
      here.push_back(static_cast<int>(r));
    }
    for (const std::vector<int>& here : ranks) {
      fewest = std::min(fewest, here.size());
      most = std::max(most, here.size());
    }
  }

  // The rank on `at` that deals with the data of, or for, rank `r` of another host: each byte crosses once.
  int Agent(int at, int r) const {
    const std::vector<int>& there = ranks[static_cast<size_t>(at)];
    return there[static_cast<size_t>(local[static_cast<size_t>(r)]) % there.size()];
  }

  // Ranks of one host that follow each other and whose agents, on a host of `agents` ranks, do so too.
  struct Run {
    int first_rank;
    int first_agent;
    int length;
  };
  std::vector<Run> RunsOf(int of, size_t agents) const {
    std::vector<Run> runs;
    const std::vector<int>& there = ranks[static_cast<size_t>(of)];
    for (size_t k = 0; k < there.size(); ++k) {
      const auto agent = static_cast<int>(k % agents);
      if (agent != 0 && k > 0 && there[k] == there[k - 1] + 1) {
        ++runs.back().length;
      } else {
        runs.push_back(Run{there[k], agent, 1});
      }
    }
    return runs;
  }

  std::vector<std::vector<int>> ranks;  // by host: ascending; hosts by their lowest rank
  std::vector<int> host;                // by rank
  std::vector<int> local;               // by rank: its place on its host
  size_t fewest = SIZE_MAX;             // ranks of a host
  size_t most = 0;
};

}  // namespace kolovod
