// A leader's part of the control plane between hosts: it passes messages on along the tree of leaders
// (base/tree.h).
//
//   rank --ring--> leader --link----> ... --> root: negotiates, orders
//   rank <--log--- leader <--link---- ... <-- root
//
// Whoever reads the control link passes on, before the driver sees the frame: a leader that computes, or is
// in the middle of a bucket, holds nobody up. What goes to a driver is queued after it went to the children,
// and they are read under the same lock, so whatever a child answers comes later than what it answers to.
//
// Up go requests as they are, and a bit once all of the subtree have announced it: one message for each
// connection, however many hosts. Down goes what the root says, as it is; what is for one host alone, to the
// child behind which that is. The end of the world, and what concerns stragglers and waits, goes in all
// directions, since the way by the root may be what is broken.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "base/tree.h"
#include "control/message.h"
#include "control/tally.h"
#include "engine/host_log.h"
#include "engine/locks.h"
#include "engine/membership.h"
#include "transport/control_link.h"

namespace kolovod {

class Forwarder {
 public:
  Forwarder(const Membership& membership, HostLog& log, ControlLink& link);

  // Called with what leaders tell each other about stragglers and waits. Before the link is started.
  void set_on_news(std::function<void(const Note&)> on_news) { on_news_ = std::move(on_news); }

  // From whoever reads the link: passes the frame on in the tree. True: this host has no more to do with it.
  bool Forward(const ControlLink::Frame& frame);
  // From whoever reads the link, too: the connection to `leader`, which leads `host`, has ended.
  void Lost(int host, const std::string& reason, const std::string& leader);

  // Of a leader that is not the root. From a rank of this host, for the root.
  Status PassUp(const Note& note) REQUIRES(kLease);
  // From the root, by way of the parent.
  Status Obey(int host, const Note& note) REQUIRES(kLease);

  // Tells the other hosts that a rank of this one has left; something about stragglers or waits; or (the
  // first time only) that the world is over. Any thread.
  void TellLeft(int rank);
  void TellLeaders(const Note& note);
  void TellRevoked(const Status& status);

 private:
  // From a child's subtree, or from the root. True: no more to do here.
  bool ForwardUp(const Note& note, const std::string& payload);
  bool ForwardDown(const Note& note, const std::string& payload);
  // Of a response for one host: the child by way of which it goes there; -1: it stays here.
  int ChildTowards(int leader) const;
  void SendToOthers(int host, const std::string& payload);
  // Returns only after the others were told, also where another thread tells them: a caller that says next
  // that its rank leaves must not be heard first, since the leaving would then be taken for the reason.
  void TellRevokedOnce(const std::function<void()>& send) EXCLUDES(telling_);

  const Membership& membership_;
  HostLog& log_;
  ControlLink& link_;
  const Tree tree_;
  Tally tally_;  // of bits: this host and each child's subtree
  std::function<void(const Note&)> on_news_;
  std::vector<std::atomic<bool>> leaving_;  // by host: its leader has said that it leaves
  Mutex telling_;
  bool told_revoked_ GUARDED_BY(telling_) = false;  // the other hosts know that the world is over
};

}  // namespace kolovod
