#include "transport/cores.h"

#include <cstddef>

namespace kolovod {

bool ShouldLeaveCore(int self, int own, const std::vector<int>& peers, const cpu_set_t& allowed) {
  if (own < 0 || own >= CPU_SETSIZE) return false;
  int drivers[CPU_SETSIZE] = {};
  ++drivers[own];
  for (size_t r = 0; r < peers.size(); ++r) {
    const int core = peers[r];
    if (static_cast<int>(r) == self || core < 0 || core >= CPU_SETSIZE) continue;
    if (static_cast<int>(r) < self && core == own) return false;
    ++drivers[core];
  }
  for (int other = 0; other < CPU_SETSIZE; ++other) {
    if (CPU_ISSET(static_cast<size_t>(other), &allowed) && drivers[own] >= drivers[other] + 2) return true;
  }
  return false;
}

bool LeaveSharedCore(int self, const std::vector<int>& peers) {
  const int own = sched_getcpu();
  cpu_set_t allowed;
  if (own < 0 || own >= CPU_SETSIZE || sched_getaffinity(0, sizeof(allowed), &allowed) != 0 ||
      !ShouldLeaveCore(self, own, peers, allowed)) {
    return false;
  }
  cpu_set_t elsewhere = allowed;
  CPU_CLR(static_cast<size_t>(own), &elsewhere);
  if (sched_setaffinity(0, sizeof(elsewhere), &elsewhere) != 0) return false;
  sched_setaffinity(0, sizeof(allowed), &allowed);
  return true;
}

}  // namespace kolovod
