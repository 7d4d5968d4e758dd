// From a request to its place in the log, on one rank: announcements out, entries in.
//
// Two halves. `Announce` runs on the submitting thread under the engine's mutex; everything else is
// called by the holder of the lease, and takes that mutex where it touches what both share.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/config.h"
#include "base/topology.h"
#include "base/tree.h"
#include "control/log.h"
#include "control/negotiate.h"
#include "control/ring.h"
#include "control/roll_call.h"
#include "control/tally.h"
#include "engine/operation.h"
#include "transport/liveness.h"
#include "transport/segment.h"
#include "transport/uplink.h"

namespace kolovod {

struct ControlStats {
  uint64_t full_announcements = 0;  // messages with name, dtype and shape
  uint64_t bit_announcements = 0;   // one increment of a counter
  uint64_t slot_announcements = 0;  // without a name and without a message (control/roll_call.h)
  uint64_t message_bytes = 0;       // written into control rings by this rank, both directions
  uint64_t messages_sent = 0;       // a leader's to other hosts
  uint64_t messages_received = 0;   // and from them
};

class Control {
 public:
  // `mutex` is the engine's; it guards the members marked so.
  // `ranks`: what messages call each rank. `uplink`: of a leader in a world of several hosts, else null.
  Control(Segment& segment, const Topology& topology, std::vector<int> ranks, uint32_t epoch,
          const Config& config, std::mutex& mutex, LoopbackFaults* faults, Uplink* uplink);

  // Under the mutex. Registers the operation as pending and tells the world; true if it went into the
  // log at once (this rank was the last to announce it).
  bool Announce(const OperationPtr& op);
  // Under the mutex. So many operations are pending of which it does not know.
  void CountBeside(size_t count);
  // Under the mutex. Registers a join as pending; it is announced once nothing else is.
  void Join(const OperationPtr& op);
  // Under the mutex.
  const std::unordered_map<std::string, OperationPtr>& pending() const { return pending_; }
  void Erase(const std::string& name);
  ControlStats stats() const;

  // Lease. A leader passes on what has arrived, the root negotiates it; every rank moves what waits to be
  // sent.
  Status Pump();
  // Lease. Is there something that Pump or ReadLog would act on?
  bool HasInput();
  // Lease. Reads the log up to its written end and appends executable operations, in order. `null`
  // stands for an entry without data (an error, a forgotten name), which still has its position.
  Status ReadLog(std::deque<OperationPtr>* ready);
  // Lease. Wakes the engine threads that a long message waits for.
  void RingLagging();
  // Lease: position after the last entry read.
  uint64_t position() const { return position_; }
  // Lease. Where bucket `bucket`, which begins at `begin`, ends; nullopt: not decided.
  std::optional<uint64_t> SealedEnd(uint64_t bucket, uint64_t begin) const {
    return log_.SealedEnd(bucket, begin);
  }
  // Lease. Whether this rank may decide that: on one host whoever comes first, else the root.
  bool MaySeal() const { return topology_.hosts() == 1 || topology_.is_root(); }
  // Lease. Proposes `end`; returns the one that holds.
  uint64_t Seal(uint64_t bucket, uint64_t begin, uint64_t end);
  // Lease, root. All ranks are to estimate with this from the bucket on in whose place it comes.
  void TellLinks(const LinkCost& cost);
  // A leader tells the other hosts that a rank of its own has left, or something about late ranks, or (the
  // first time only) that the world is over. Any thread.
  void TellLeft(int rank);
  void TellLeaders(const Note& note);
  void TellRevoked(const Status& status);
  // Called under the mutex before an operation with a tag is announced; true: the slot of the tag is claimed
  // for it. There are slots, then.
  void SetStage(std::function<bool(Operation&)> stage) {
    stage_ = std::move(stage);
    roll_call_.emplace(segment_, topology_.local_rank);
  }
  // Called by whoever reads the uplink with what leaders tell each other about late ranks. Before it is
  // started.
  void set_on_late(std::function<void(const Note&)> on_late) { on_late_ = std::move(on_late); }
  // From whoever reads the uplink: passes the frame on in the tree. True: this host has no more to do with
  // it.
  bool Relay(const Uplink::Frame& frame);
  void Lost(int host, const std::string& reason, const std::string& leader);

 private:
  struct Cached {
    int32_t id;
    std::string body;  // the request it stands for, encoded
    std::vector<std::vector<int64_t>> rows;
    std::shared_ptr<const Splits> splits;
    uint64_t position;      // in the log, where it was given out
    uint32_t announced{0};  // by this bit since then
  };

  void Register(const OperationPtr& op);
  void CountPending();
  void SendInFull(const OperationPtr& op, std::string body);
  // Of an operation without a name whose slot is claimed; as Announce.
  bool AnnounceBySlot(const OperationPtr& op, std::string body);
  // The log entry of such a one: null if it is not the same on all ranks, which all announce it in full then.
  OperationPtr TakeBySlot(OperationPtr op);
  // To the leader of this host. Under the mutex.
  void Tell(Note note);
  Status Lead();
  Status ReadLocalRings();
  Status ReadUplink();
  // Leader: from a rank of this host.
  Status PassOn(const Note& note);
  // Root: from a rank of its host, or from what is reached by way of `host`. Other leaders: from the root, by
  // way of their parent.
  Status Decide(int host, const Note& note);
  // Root: `name`, which has this tag, has been announced in full.
  void Recall(const std::string& name, uint64_t tag);
  Status Obey(int host, const Note& note);
  // A leader that is not the root, from a child's subtree, or from the root. True: no more to do here.
  bool RelayUp(const Note& note, const std::string& payload);
  bool RelayDown(const Note& note, const std::string& payload);
  // Of a response for one host: the child by way of which it goes there; -1: it stays here.
  int ChildTowards(int leader) const;
  void SendDown(const std::string& payload) { uplink_->Send(tree_.children, payload); }
  void SendToOthers(int host, const std::string& payload);
  void MarkLeft(int rank);
  void Publish(const std::vector<Response>& responses);
  // Each host gets the part that concerns its ranks.
  void PublishByHost(Response response);
  void PushResponse(const std::string& body);
  // Appends what is complete, in the order that holds on all hosts.
  void AppendInOrder();
  void RingUndriven();
  // What a rank of this host waits for has changed; its driver, or else its engine thread, looks.
  void Wake(int local_rank);
  // Does something wait to be sent, for which there is room?
  bool CanSend();
  // Reads the next response, or the part of it that has come.
  Status TakeResponse();
  Status Apply(const Response& response, std::deque<OperationPtr>* ready);
  void Forget(const OperationPtr& op);
  // What this rank contributes while it has joined: zeros. Null for a response that is malformed.
  static OperationPtr MakeZeros(const Response& response);

  Segment& segment_;
  const Topology topology_;
  const Tree tree_;
  const int rank_;
  Uplink* const uplink_;
  std::mutex& mutex_;
  LoopbackFaults* const faults_;
  Log log_;

  std::unordered_map<std::string, OperationPtr> pending_;  // guarded by mutex_
  size_t beside_ = 0;                                      // guarded by mutex_
  std::unordered_map<std::string, Cached> cache_;          // guarded by mutex_
  std::vector<OperationPtr> by_id_;                        // guarded by mutex_; after the names' ids, by slot
  OperationPtr join_;                                      // guarded by mutex_; not announced yet
  bool some_have_joined_ = false;                          // guarded by mutex_
  std::unique_ptr<RingWriter> to_leader_;                  // guarded by mutex_; a leader has none
  std::vector<Note> inbox_;                                // guarded by mutex_; a leader's own notes
  std::atomic<bool> outgoing_{false};                      // something waits in to_leader_ or inbox_
  ControlStats stats_;                                     // guarded by mutex_

  std::function<bool(Operation&)> stage_;
  std::optional<RollCall> roll_call_;
  std::function<void(const Note&)> on_late_;
  std::vector<std::atomic<bool>> leaving_;  // by host: its leader has said that it leaves
  std::atomic<bool> told_revoked_{false};   // the other hosts know that the world is over
  std::unique_ptr<Tally> tally_;            // of a leader with several hosts

  // Lease only. Of leaders:
  std::vector<RingReader> from_ranks_;
  std::unique_ptr<RingWriter> responses_out_;
  std::deque<int64_t> order_;  // not in the log yet: a cached name's id, or what leader.cc names
  int complete_ = 0;           // responses that are in the ring and not in the log
  // Of the root:
  std::unique_ptr<Negotiator> negotiator_;

  RingReader responses_in_;
  std::optional<std::string> arrived_;  // the next response, whose log entry was not read yet
  uint64_t position_ = 0;
};

}  // namespace kolovod
