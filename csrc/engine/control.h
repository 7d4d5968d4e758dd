// From a request to its place in the log, on one rank: announcements out, entries in.
//
// It is made of the parts that a rank has: Announcer (every rank), HostLog (the first rank of a host, its
// leader), Forwarder (a leader in a world of several hosts), Root (rank 0). Announcing runs on the submitting
// thread, everything else under the lease unless it says otherwise.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/log.h"
#include "control/message_ring.h"
#include "engine/announcer.h"
#include "engine/forwarder.h"
#include "engine/host_log.h"
#include "engine/locks.h"
#include "engine/membership.h"
#include "engine/operation.h"
#include "engine/root.h"
#include "transport/control_link.h"

namespace kolovod {

// message_bytes: written into control rings by this rank, both directions.
struct ControlStats : AnnouncerStats {
  uint64_t messages_sent = 0;      // a leader's to other hosts
  uint64_t messages_received = 0;  // and from them
};

class Control {
 public:
  // `mutex`: the engine's. `link`: of a leader in a world of several hosts, else null.
  Control(const Membership& membership, OperationsMutex& mutex, ControlLink* link);

  Announcer& announcer() { return announcer_; }
  const Announcer& announcer() const { return announcer_; }
  // Null unless this rank leads a host of several.
  Forwarder* forwarder() { return forwarder_.get(); }
  ControlStats stats() const REQUIRES(kOperations);
  // Once, before anything is announced: Announcer::SetEagerCopy.
  void SetEagerCopy(std::function<bool(Operation&)> stage);

  // A leader passes on what has arrived, the root negotiates it; every rank moves what waits to be sent.
  Status Pump() REQUIRES(kLease);
  // Is there something that Pump or ReadLog would act on?
  bool HasInput() REQUIRES(kLease);
  // Something has arrived from another host that nobody has read.
  bool HasUnread() const { return link_ != nullptr && link_->HasData(); }
  // The driver goes to sleep, or stops: who reads the link is on its own.
  void LookAway() {
    if (link_ != nullptr) link_->LookAway();
  }
  // Reads the log up to its written end and appends executable operations, in order. `null` stands for an
  // entry without data (an error, a forgotten name), which still has its position.
  Status ReadLog(std::deque<OperationPtr>* ready) REQUIRES(kLease);
  // Wakes the engine threads that a long message waits for.
  void WakeLagging() REQUIRES(kLease);
  // Position after the last entry read.
  uint64_t position() const REQUIRES(kLease) { return position_; }

  // Of bucket `bucket`, which begins at `begin`; nullopt: not decided.
  std::optional<BucketEnd> EndOf(uint64_t bucket, uint64_t begin) const REQUIRES(kLease) {
    return log_.EndOf(bucket, begin);
  }
  // Whether this rank may decide that: on one host whoever comes first, else the root.
  bool MayCloseBucket() const { return topology_.hosts() == 1 || topology_.is_root(); }
  // Proposes `end`; returns the one that holds.
  BucketEnd CloseBucket(uint64_t bucket, uint64_t begin, BucketEnd end) REQUIRES(kLease);
  // Root::TellLinks, of the root.
  void TellLinks(const LinkCost& cost) REQUIRES(kLease) { root_->TellLinks(cost); }

 private:
  Status Lead() REQUIRES(kLease);
  Status ReadLocalRings() REQUIRES(kLease);
  Status ReadLink() REQUIRES(kLease);
  // From a rank of this host: to the root.
  Status PassOn(const Note& note) REQUIRES(kLease);
  // What a rank of this host waits for has changed; its driver, or else its engine thread, looks.
  void Wake(int local_rank);
  // Reads the next response, or the part of it that has come.
  Status TakeResponse() REQUIRES(kLease);

  Segment& segment_;
  const Topology& topology_;
  ControlLink* const link_;
  Log log_;
  Announcer announcer_;
  // Of a leader:
  std::unique_ptr<HostLog> host_log_;
  std::unique_ptr<Forwarder> forwarder_;
  std::unique_ptr<Root> root_;
  std::vector<MessageRingReader> from_ranks_ GUARDED_BY(kLease);

  MessageRingReader responses_in_ GUARDED_BY(kLease);
  std::optional<std::string> arrived_ GUARDED_BY(kLease);  // the next response, whose entry was not read yet
  uint64_t position_ GUARDED_BY(kLease) = 0;
};

}  // namespace kolovod
