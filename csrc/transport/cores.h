// Ranks that wait for each other on one core look busy to the scheduler's balancer, which may leave them
// there for seconds while another core has less to do (docs/design/engine.md).
#pragma once

#include <sched.h>

#include <vector>

namespace kolovod {

// PURE. `own`: the core that this rank runs on; `peers[r]`: the core that rank r drives on, -1 if it does not
// drive or is on another machine; peers[self] is not looked at. True if `own` has two driving ranks more than
// some other core in `allowed`, and this rank is the lowest of them: exactly one of them goes.
bool ShouldLeaveCore(int self, int own, const std::vector<int>& peers, const cpu_set_t& allowed);

// Leaves the core that the caller runs on for another one that it may use, if by that rule it should: forbids
// it for a moment, which migrates at once, and allows it again. True: it went.
bool LeaveSharedCore(int self, const std::vector<int>& peers);

// Of the calling thread: asks the scheduler for short turns soon after waking, instead of long ones later
// (Linux 6.12 and newer; elsewhere nothing happens). A thread that moves bytes in the background would else
// wait for milliseconds, with an idle link, until whoever computes on its core has had a turn.
void AskForShortTurns();

}  // namespace kolovod
