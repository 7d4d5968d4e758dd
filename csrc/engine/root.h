// Rank 0's part of the control plane: it compares what all ranks have announced in full, decides, and orders
// everything between hosts, so that all logs are alike. On one host cached names are ordered by the ranks
// themselves (control/log.h). All under the lease.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/tree.h"
#include "collectives/select.h"
#include "control/negotiate.h"
#include "control/roll_call.h"
#include "control/tally.h"
#include "engine/host_log.h"
#include "engine/locks.h"
#include "engine/membership.h"
#include "transport/control_link.h"

namespace kolovod {

class Root {
 public:
  // `link`: to other hosts; null: there are none.
  Root(const Membership& membership, HostLog& log, ControlLink* link);

  // Operations without a name may be announced by a slot.
  void UseSlots() { roll_call_.emplace(*membership_.segment, membership_.topology.local_rank); }
  // From a rank of its host, or from what is reached by way of `host`.
  Status Decide(int host, const Note& note) REQUIRES(kLease);
  // All ranks are to estimate with this from the bucket on in whose place it comes.
  void TellLinks(const LinkCost& cost) REQUIRES(kLease);
  // All other hosts are told where a bucket ends.
  void TellBucketEnd(uint64_t bucket, BucketEnd end) REQUIRES(kLease);

 private:
  bool Knows(int host, int rank) const;
  Status DecideRequest(int host, const Note& note) REQUIRES(kLease);
  void Publish(const std::vector<Response>& responses) REQUIRES(kLease);
  // Each host gets the part that concerns its ranks.
  void PublishByHost(Response response) REQUIRES(kLease);
  // `name`, which has this tag, has been announced in full: of a rank that has announced it by its slot, and
  // so does not know, it is demanded again.
  void Recall(const std::string& name, uint64_t tag) REQUIRES(kLease);
  void SendDown(const Note& note);

  const Membership& membership_;
  HostLog& log_;
  ControlLink* const link_;
  const Tree tree_;
  Tally tally_;  // of bits: this host and each child's subtree
  std::optional<RollCall> roll_call_;
  Negotiator negotiator_ GUARDED_BY(kLease);
};

// What a host or a rank has sent that none of ours sends.
Status Malformed(int host, const Note& note);

}  // namespace kolovod
