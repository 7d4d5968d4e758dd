// From a request to its place in the log, on one rank: announcements out, entries in.
//
// Two halves. `Announce` runs on the submitting thread under the engine's mutex; everything else is
// called by the holder of the lease, and takes that mutex where it touches what both share.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/config.h"
#include "control/log.h"
#include "control/negotiate.h"
#include "control/ring.h"
#include "engine/operation.h"
#include "transport/liveness.h"
#include "transport/segment.h"

namespace kolovod {

struct ControlStats {
  uint64_t full_announcements = 0;  // messages with name, dtype and shape
  uint64_t bit_announcements = 0;   // one increment of a counter
  uint64_t message_bytes = 0;       // written into control rings by this rank, both directions
};

class Control {
 public:
  // `mutex` is the engine's; it guards the members marked so.
  // `ranks`: what messages call each rank.
  Control(Segment& segment, int rank, std::vector<int> ranks, uint32_t epoch, const Config& config,
          std::mutex& mutex, LoopbackFaults* faults);

  // Under the mutex. Registers the operation as pending and tells the world; true if it went into the
  // log at once (this rank was the last to announce it).
  bool Announce(const OperationPtr& op);
  // Under the mutex. Registers a join as pending; it is announced once nothing else is.
  void Join(const OperationPtr& op);
  // Under the mutex.
  const std::unordered_map<std::string, OperationPtr>& pending() const { return pending_; }
  void Erase(const std::string& name);
  ControlStats stats() const { return stats_; }

  // Lease. Rank 0 negotiates what has arrived; every rank moves what waits to be sent.
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
  Log& log() { return log_; }

 private:
  struct Cached {
    int32_t id;
    std::string body;  // the request it stands for, encoded
    std::vector<std::vector<int64_t>> rows;
  };

  void SendInFull(const OperationPtr& op, std::string body);
  Status Negotiate();
  Status DrainResponses();
  void Publish(std::vector<Response> responses);
  Status Apply(const Response& response, std::deque<OperationPtr>* ready);
  void Forget(const OperationPtr& op);
  // What this rank contributes while it has joined: zeros. Null for a response that is malformed.
  static OperationPtr MakeZeros(const Response& response);

  Segment& segment_;
  const int rank_;
  std::mutex& mutex_;
  LoopbackFaults* const faults_;
  Log log_;

  std::unordered_map<std::string, OperationPtr> pending_;  // guarded by mutex_
  std::unordered_map<std::string, Cached> cache_;          // guarded by mutex_
  std::vector<OperationPtr> by_id_;                        // guarded by mutex_
  OperationPtr join_;                                      // guarded by mutex_; not announced yet
  std::unique_ptr<RingWriter> to_sequencer_;               // guarded by mutex_; rank 0 has none
  std::vector<Request> inbox_;                             // guarded by mutex_; rank 0's own requests
  std::atomic<bool> outgoing_{false};                      // something waits in to_sequencer_ or inbox_
  ControlStats stats_;                                     // guarded by mutex_

  // Lease only.
  std::unique_ptr<Negotiator> negotiator_;
  std::vector<RingReader> from_ranks_;
  std::unique_ptr<RingWriter> responses_out_;
  RingReader responses_in_;
  std::deque<std::string> arrived_;  // responses whose log entry was not read yet
  uint64_t position_ = 0;
};

}  // namespace kolovod
