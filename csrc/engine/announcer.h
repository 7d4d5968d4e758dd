// One rank's part of the control plane: it announces what is submitted here, keeps it until it is complete,
// and finds it again when the log names it.
//
// A name that was announced before is one increment of a counter in shared memory, an operation without a
// name is announced by its eager slot (control/roll_call.h), everything else by a message to the leader of
// this host.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/line_history.h"
#include "control/log.h"
#include "control/message.h"
#include "control/message_ring.h"
#include "control/roll_call.h"
#include "engine/locks.h"
#include "engine/membership.h"
#include "engine/operation.h"

namespace kolovod {

struct AnnouncerStats {
  uint64_t full_announcements = 0;  // messages with name, dtype and shape
  uint64_t bit_announcements = 0;   // one increment of a counter
  uint64_t slot_announcements = 0;  // without a name and without a message (control/roll_call.h)
  uint64_t instant = 0;        // carried out without an announcement of their own (engine/instant_path.h)
  uint64_t message_bytes = 0;  // of the messages
};

class Announcer {
 public:
  Announcer(const Membership& membership, OperationsMutex& mutex, Log& log);

  // Registers the operation as pending and tells the world; true if it went into the log at once (this rank
  // was the last to announce it).
  bool Announce(const OperationPtr& op) REQUIRES(kOperations);
  // Registers a join as pending; it is announced once nothing else is.
  void Join(const OperationPtr& op) REQUIRES(kOperations);
  // By name.
  const std::unordered_map<std::string, OperationPtr>& pending() const REQUIRES(kOperations) {
    return pending_;
  }
  void Erase(const std::string& name) REQUIRES(kOperations);
  // How many operations were pending and are no more.
  uint64_t passed() const REQUIRES(kOperations) { return passed_; }
  // An operation that was never pending is complete.
  void CountInstant(const Operation& op) REQUIRES(kOperations);
  // Whether what the ranks have said in `rows` and `splits` fits the request.
  bool RowsAreSound(const Operation& op) const;
  // So many operations are pending of which it does not know.
  void CountBeside(size_t count) REQUIRES(kOperations);
  AnnouncerStats stats() const REQUIRES(kOperations) { return stats_; }

  // Called before an operation with a tag is announced; true: the slot of the tag is claimed for it. There
  // are slots, then. Once, before anything is announced.
  void SetEagerCopy(std::function<bool(Operation&)> stage) {
    eager_copy_ = std::move(stage);
    roll_call_.emplace(*membership_.segment, membership_.topology.local_rank);
  }

  // The entry at `position` of the log is the bit `id`. *op: null if the operation is announced in full now.
  Status TakeBit(uint32_t id, uint64_t position, OperationPtr* op) REQUIRES(kLease) EXCLUDES(kOperations);
  // The entry there is this response: appends what is to be executed, or null.
  Status Apply(const Response& response, uint64_t position, std::deque<OperationPtr>* ready) REQUIRES(kLease)
      EXCLUDES(kOperations);

  // Messages to the leader that were not sent yet. There is one for which there is room.
  bool CanSend() const;
  // Sends what there is room for; true: something was sent. Of a rank that does not lead.
  bool Flush() REQUIRES(kLease) EXCLUDES(kOperations);
  // Of the leader itself: what it has announced.
  std::vector<Note> TakeOwnNotes() REQUIRES(kLease) EXCLUDES(kOperations);

 private:
  struct Cached {
    int32_t id;
    std::string body;  // the request it stands for, encoded
    std::vector<std::vector<int64_t>> rows;
    std::shared_ptr<const Splits> splits;
    uint64_t position;      // in the log, where it was given out
    uint32_t announced{0};  // by this bit since then
  };

  void Register(const OperationPtr& op) REQUIRES(kOperations);
  void CountPending() REQUIRES(kOperations);
  void SendInFull(const OperationPtr& op, std::string body) REQUIRES(kOperations);
  // Of an operation without a name whose slot is claimed; as Announce.
  bool AnnounceBySlot(const OperationPtr& op, std::string body) REQUIRES(kOperations);
  // The log entry of such a one: null if it is not the same on all ranks, which all announce it in full then.
  OperationPtr TakeBySlot(OperationPtr op) REQUIRES(kOperations);
  // To the leader of this host.
  void Tell(Note note) REQUIRES(kOperations);
  Status Execute(const OperationPtr& op, const Response& response, uint64_t position) REQUIRES(kOperations);
  void Forget(const OperationPtr& op) REQUIRES(kOperations);
  // What this rank contributes while it has joined: zeros. Null for a response that is malformed.
  static OperationPtr MakeZeros(const Response& response);

  const Membership& membership_;
  const bool leads_;
  const int hosts_;
  OperationsMutex& mutex_;
  Log& log_;
  std::function<bool(Operation&)> eager_copy_;
  std::optional<RollCall> roll_call_;

  std::unordered_map<std::string, OperationPtr> pending_ GUARDED_BY(kOperations);
  size_t beside_ GUARDED_BY(kOperations) = 0;
  uint64_t passed_ GUARDED_BY(kOperations) = 0;
  std::unordered_map<std::string, Cached> cache_ GUARDED_BY(kOperations);
  std::vector<OperationPtr> by_id_ GUARDED_BY(kOperations);  // after the names' ids, by slot
  OperationPtr join_ GUARDED_BY(kOperations);                // not announced yet
  bool some_have_joined_ GUARDED_BY(kOperations) = false;
  LineHistory lines_ GUARDED_BY(kOperations);
  AnnouncerStats stats_ GUARDED_BY(kOperations);
  const std::unique_ptr<MessageRingWriter> to_leader_;   // a leader has none; Push and Flush: kOperations
  std::vector<Note> own_notes_ GUARDED_BY(kOperations);  // of a leader
  std::atomic<bool> outgoing_{false};                    // something waits in one of these two
};

}  // namespace kolovod
