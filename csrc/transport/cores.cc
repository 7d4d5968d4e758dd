#include "transport/cores.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

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

void AskForShortTurns() {
  struct Attributes {  // of sched_setattr(2), for which the C library has no header everywhere
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns, deadline_ns, period_ns;
  };
  static_assert(sizeof(Attributes) == 48);
  constexpr uint64_t kTurnNs = 100'000;  // the least that the kernel grants
  Attributes attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0) return;
  if (attributes.policy != SCHED_OTHER) return;
  attributes.size = sizeof(attributes);
  attributes.runtime_ns = kTurnNs;
  (void)syscall(SYS_sched_setattr, 0, &attributes, 0);  // an older kernel refuses, or takes no notice
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
