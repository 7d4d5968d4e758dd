// Messages from one rank to another (send, recv): matched at the receiver (matching.h), with no other rank in
// between. The protocol is that of MPI implementations: what is little goes at once (eager), of more the
// sender tells (an offer), and whoever receives it reads it from the sender's memory, or asks for it.
//
// Ranks of one host write into each other's inboxes (transport/inbox.h); between hosts messages go in
// envelopes over the connections that operations of all use, too.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/topology.h"
#include "engine/locks.h"
#include "engine/operation.h"
#include "p2p/departures.h"
#include "p2p/matching.h"
#include "p2p/outbox.h"
#include "transport/inbox.h"
#include "transport/mesh.h"
#include "transport/peer_memory.h"

namespace kolovod {

struct PointToPointOptions {
  Topology topology{0, {0}};
  std::vector<int> numbers;      // what messages call the ranks
  bool reads_peers = false;      // the ranks of this host can read each other's memory
  Mesh* mesh = nullptr;          // null: one host
  std::function<bool()> died{};  // whether a rank of this host has died, and the world is over
};

// Under the lease, except where it says otherwise.
class PointToPoint : public Receiver {
 public:
  // `mutex`: the engine's.
  PointToPoint(Segment& segment, OperationsMutex& mutex, PointToPointOptions options);

  // Registers a send or a recv.
  void Submit(const OperationPtr& op) REQUIRES(kOperations);
  // By number, those that are not done.
  const std::map<uint64_t, OperationPtr>& pending() const REQUIRES(kOperations) { return pending_; }
  void Erase(const Operation& op) REQUIRES(kOperations);

  // What this rank and another have told each other so far. Nothing is on its way from there to here if its
  // `sent` is our `seen`, and its `answered` our `answers`.
  struct Exchanged {
    std::atomic<uint64_t> sent{0};      // messages, or offers of them
    std::atomic<uint64_t> seen{0};      // of the other's; counted once the recv that takes it is marked
    std::atomic<uint64_t> answered{0};  // offers
    std::atomic<uint64_t> answers{0};   // to ours; counted once the send is marked
  };
  // Any thread; by rank.
  const std::vector<Exchanged>& exchanged() const { return exchanged_; }

  // Any thread: some wait for another host.
  bool WaitsElsewhere() const { return elsewhere_.load(std::memory_order_seq_cst) > 0; }

  // Whether Progress could do something, or there is something to take.
  bool HasWork();
  // Moves what can be moved without waiting. An error is the end of the world.
  Status Progress();
  // Takes the operations that have become done, with their status.
  std::vector<OperationPtr> TakeDone() { return std::exchange(done_, {}); }
  // Rank `rank` has left. What it has sent before can still be received.
  void Left(int rank, const Status& status);
  // Memory of others is not touched any more.
  void Drop();

  Status Begin(int peer, const Envelope& envelope, uint64_t bytes, std::vector<iovec>* places) override;
  Status End(int peer) override;
  void Closed(int peer, const Status& status) override;

  // What goes at once, at most; and how much of it may be on its way to one rank, unreceived.
  static constexpr size_t kEagerHereBytes = kMailBytes;
  static constexpr size_t kEagerElsewhereBytes = 64 << 10;
  static constexpr uint64_t kMostUnreceivedBytes = 4 << 20;

 private:
  static constexpr uint64_t kMessageBytes = 128;  // what one without data counts
  static constexpr int kMailAtOnce = 256;
  static constexpr size_t kMostTextBytes = 1 << 10;

  // From a stream, whose payload is on its way.
  struct Arriving {
    Envelope envelope;
    uint64_t bytes = 0;
    OperationPtr taker{};
    bool placed = false;  // straight in its memory; else in
    std::unique_ptr<char[]> data{};
  };
  struct Receiving {
    OperationPtr op;
    uint64_t received = 0;
  };
  bool here(int rank) const { return options_.topology.on_this_host(rank); }
  std::string Name(int rank) const {
    return "rank " + std::to_string(options_.numbers[static_cast<size_t>(rank)]);
  }
  bool Elsewhere(const Operation& op) const;
  Status Start(const OperationPtr& op);
  void StartSend(const OperationPtr& op);
  Status StartReceive(const OperationPtr& op);
  // What is to be received is in `arrival`, which came before.
  Status Accept(const OperationPtr& op, const Arrival& arrival);
  Status AcceptOffer(const OperationPtr& op, const Envelope& offer);
  // Why that message cannot be received by this, or OK.
  Status Fits(const Operation& op, const Envelope& envelope) const;
  Status Take(const Envelope& envelope, const char* data, size_t bytes);
  Status TakeMessage(const Envelope& envelope, const char* data, size_t bytes);
  Status TakeData(const Envelope& envelope, const char* data, size_t bytes);
  Exchanged& With(int rank) { return exchanged_[static_cast<size_t>(rank)]; }
  // One writer, who has the lease.
  static void Count(std::atomic<uint64_t>& what) { what.store(what.load(std::memory_order_relaxed) + 1); }
  // An eager message has been received: its sender may send more.
  void Credit(int source, uint64_t bytes);
  Status Malformed(const Envelope& envelope) const;
  bool Readable(const void* data, size_t bytes) const;

  Status ReadMail();
  void Finish(const OperationPtr& op, Status status);
  void FinishSend(uint64_t id, Status status);
  Status MoveElsewhere(Mesh& mesh);
  bool MustJudge() const;
  // Fails what waits for ranks that are gone.
  Status JudgeDepartures();
  // For whom the operation waits in vain; null: it does not.
  const Departures::Departure* FindCulprit(const Operation& op, int64_t now_ns) const;
  static Status Lost(const Operation& op, const Departures::Departure& departure);
  OperationPtr FindReceive(uint64_t id, int source) const;

  Segment& segment_;
  OperationsMutex& mutex_;
  const PointToPointOptions options_;
  const int rank_;
  Inbox inbox_;
  PeerMemory peers_;
  Outbox outbox_;

  uint64_t next_id_ GUARDED_BY(kOperations) = 0;
  std::map<uint64_t, OperationPtr> pending_ GUARDED_BY(kOperations);
  std::vector<OperationPtr> fresh_ GUARDED_BY(kOperations);  // not started yet
  std::atomic<bool> has_fresh_{false};
  std::atomic<int> elsewhere_{0};

  Matching matching_;
  std::unordered_map<uint64_t, OperationPtr> sends_;     // not through yet
  std::unordered_map<uint64_t, OperationPtr> receives_;  // that wait for a message
  std::unordered_map<uint64_t, Receiving> receiving_;    // that wait for their data
  std::map<int, Arriving> arriving_;                     // by peer
  std::vector<uint64_t> unreceived_;                     // by rank: sent eagerly
  std::vector<uint64_t> uncredited_;                     // by rank: received, and not told yet
  std::vector<Exchanged> exchanged_;
  bool listens_ = false;  // to other hosts
  Departures departures_;
  bool judge_ = false;       // of them something is new, or of what is pending
  int64_t judge_at_ns_ = 0;  // when time alone makes another one gone; 0: never
  std::vector<OperationPtr> done_;
};

}  // namespace kolovod
