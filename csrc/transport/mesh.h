// Streams to other ranks, and the waiting for them: what carries bytes between hosts. A stream is made when
// it is first used; until the connection has come, too (connection_broker.h), what is posted is queued.
//
// Sends and receives are posted and make progress together, so nothing deadlocks however they are ordered; to
// one peer they match in the order in which they were posted. Positions that posting returns say later what
// is through, and all before it to that peer.
//
// Where one connection cannot fill a link there are several to a peer, the stripes: the messages of an
// operation, large ones in pieces, go over them by turns, the first one over the first, so both ends agree
// without a word.
#pragma once

#include <sys/uio.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/connection_broker.h"
#include "transport/stream.h"
#include "transport/waiter.h"

namespace kolovod {

struct MeshPeer {
  int fd = -1;                                   // connected stream socket; -1: made on first use, if at all
  std::string description;                       // for messages: "rank 1 on host a (pid 17)"
  std::shared_ptr<const ConnectionKeys> keys{};  // of fd; null: it is not encrypted
};

struct MeshOptions {
  uint32_t epoch = 0;
  // Called at most every 10 ms or so while waiting; an error ends the wait: a revoked world, a signal.
  std::function<Status()> check;
  WaitBudget budget;  // before sleeping in poll(2): a busy wait if cores are free, then yields
  // A host that acknowledges nothing for so long is lost. Longer than on control links: with more on its way
  // TCP sends again ever more rarely, after 0.2, 0.6 and 1.4 s, and the last must have had time.
  int64_t host_lost_ms = 1500;
  // Where connections come from. Null: there are those that were given, and no others.
  std::shared_ptr<ConnectionBroker> broker;
};

struct SendPart {
  int peer;
  const void* data;
  size_t bytes;
};
struct ReceivePart {
  int peer;
  void* data;
  size_t bytes;
};

// Not thread-safe: whoever drives the engine uses it. Counters may be read by any thread.
class Mesh {
 public:
  // Takes the descriptors over, also when it fails. peers[self].fd is not used.
  static Status Create(int self, std::vector<MeshPeer> peers, MeshOptions options,
                       std::unique_ptr<Mesh>* out);

  int rank() const { return self_; }
  int size() const { return static_cast<int>(links_.size()); }

  // The number of the operation in the log. If ranks tell it, data of another operation are an error that
  // says so; else only the order and the sizes of messages are checked.
  void BeginOperation(uint32_t number);
  // Over how many connections the messages to each peer go, 1 to kMostStripes. The same on every rank,
  // between two operations.
  static constexpr int kMostStripes = 8;
  static constexpr size_t kPieceBytes = 256 << 10;  // a longer message goes as several, if there are stripes
  void set_stripes(int stripes);
  // From now on; whoever takes the lease knows how many cores are free.
  void set_budget(WaitBudget budget) { options_.budget = budget; }

  // All of them, concurrently.
  Status Transfer(std::span<const SendPart> sends, std::span<const ReceivePart> receives);

  // Posts one message and starts moving it. A message of no bytes is none. The memory belongs to the mesh
  // until the position that is returned is through, or until a call has failed.
  uint64_t PostSend(int peer, std::span<const iovec> parts);
  uint64_t PostReceive(int peer, std::span<const iovec> parts);
  // Sends a message in an envelope (send, recv), which the peer's receiver takes whenever it comes.
  uint64_t PostEnveloped(int peer, const Envelope& envelope, std::span<const iovec> parts);
  // Who takes those that come; before the first is posted or heard.
  void SetReceiver(Receiver* receiver);
  // `peer` may send some: there is to be a connection to it.
  void Reach(int peer) { (void)Usable(peer); }
  // Whether whoever moves bytes here looks for them on all connections.
  void Listen(bool listening);
  bool Sent(int peer, uint64_t position) const;
  bool Received(int peer, uint64_t position) const;
  Status WaitSent(int peer, uint64_t position);
  Status WaitReceived(int peer, uint64_t position);
  Status WaitAll();

  // Moves what can be moved without waiting. False: nothing is pending or listened to, or the mesh is broken,
  // as the next wait will say. For waits on something else that must not hold the peers up.
  bool Background();

  // What has come between the two calls, from all peers: bytes, headers included, and the time from when the
  // first were here until the last were.
  struct Span {
    size_t bytes;
    int64_t ns;
  };
  void BeginSpan();
  Span EndSpan();

  // After an error streams may have stopped within a message: every later call fails alike.
  bool broken() const { return !broken_.ok(); }
  Status status() const { return broken_; }

  uint64_t sent_bytes(int peer) const { return Count(peer, &StreamCounters::sent_bytes); }
  uint64_t sent_messages(int peer) const { return Count(peer, &StreamCounters::sent_messages); }
  uint64_t received_bytes(int peer) const { return Count(peer, &StreamCounters::received_bytes); }
  uint64_t received_messages(int peer) const { return Count(peer, &StreamCounters::received_messages); }

  // Any thread: how many connections there are.
  int connections() const { return connections_.load(std::memory_order_relaxed); }
  // This rank leaves: waits until what it has sent in envelopes is with the peers' systems, at most so long.
  // What they have sent is thrown away: a connection that is closed with that unread takes back what was
  // sent.
  void Farewell(int64_t limit_ms);
  // In a forked child: closes the descriptors, says nothing to the peers.
  void Close();

 private:
  static constexpr int64_t kCheckPeriodNs = 10'000'000;
  static constexpr int kPollMs = 10;
  static constexpr int64_t kSpreadPeriodNs = 2'000'000;
  static constexpr int64_t kMaxSpreadPeriodNs = 256'000'000;
  static constexpr int64_t kHostCheckPeriodMs = 100;

  Mesh(int self, std::vector<MeshPeer> peers, MeshOptions options);

  // One connection.
  struct Link {
    Link(const std::string& peer, uint32_t epoch, int number, int64_t host_lost_ms)
        : stream(peer, epoch, number, host_lost_ms) {}
    Stream stream;
    bool active = false;  // something is pending
  };
  // What goes one way between this rank and a peer over several connections.
  struct Turns {
    int next = 0;                                            // in this operation: whose turn it is
    uint64_t posted = 0;                                     // messages, or pieces
    uint64_t through = 0;                                    // of them, without a gap
    std::deque<std::pair<const Stream*, uint64_t>> pending;  // with the position on its own stream
  };
  // All connections to a peer.
  struct Links {
    std::array<std::atomic<Link*>, kMostStripes> stripes{};  // null: never used
    Turns sends, receives;
  };
  static constexpr uint64_t kByTurns = uint64_t{1} << 63;  // of a position: it counts messages of Turns

  Link* Find(int peer, int stripe = 0) const {
    const Links* const links = links_[static_cast<size_t>(peer)].load(std::memory_order_acquire);
    return links == nullptr ? nullptr
                            : links->stripes[static_cast<size_t>(stripe)].load(std::memory_order_acquire);
  }
  Links& LinksTo(int peer) const {
    return *links_[static_cast<size_t>(peer)].load(std::memory_order_acquire);
  }
  Stream& stream(int peer) const { return Find(peer)->stream; }
  uint64_t Count(int peer, std::atomic<uint64_t> StreamCounters::* counter) const;
  Link& Make(int peer, int stripe);
  Status Connect(const MadeConnection& made);
  // Null, and the mesh is broken, if there is no such connection, and will be none.
  Link* Usable(int peer, int stripe = 0);
  Link* MakeUsable(int peer, int stripe);
  // Connections that have come.
  Status TakeNews();
  void Activate(Link& link);
  void BeginTurns();
  Turns& TurnsOf(int peer, bool sending) const {
    return sending ? LinksTo(peer).sends : LinksTo(peer).receives;
  }
  // The connection whose turn it is; null as for Usable.
  Link* TakeTurn(int peer, bool sending);
  uint64_t Post(int peer, bool sending, std::span<const iovec> parts);
  uint64_t PostOver(Link& link, bool sending, std::span<const iovec> parts);
  static void Advance(Turns& turns, uint64_t (Stream::*reached)() const);
  template <class Done>
  Status Until(Done done);
  Status Progress(bool* moved);
  Status Pull(Stream& stream, bool* moved);
  // Nothing moved: spins on, yields, or sleeps until a socket is ready. Calls check() when it is time.
  Status Rest(int64_t idle_since_ns, int64_t now_ns, int64_t spin_ns);
  // Peers on this machine that share this core with this rank wait for each other: one of them goes.
  void SpreadOverCores(int64_t now_ns);
  Status Check(int64_t now_ns);
  Status CheckHosts(int64_t now_ns);
  Status Break(Status status);

  const int self_;
  MeshOptions options_;
  std::vector<std::string> descriptions_;    // by peer
  std::vector<std::atomic<Links*>> links_;   // by peer; null: never used
  std::vector<std::unique_ptr<Links>> met_;  // those that there are
  std::vector<std::unique_ptr<Link>> made_;  // all connections
  int unconnected_ = 0;                      // of them
  int stripes_ = 1;
  std::atomic<int> connections_{0};
  uint32_t operation_ = 0;
  Receiver* receiver_ = nullptr;
  bool listening_ = false;
  bool in_span_ = false;
  size_t span_bytes_ = 0;  // after the first that came
  int64_t span_first_ns_ = 0, span_last_ns_ = 0;
  std::vector<Link*> active_;  // with something pending
  SpinGauge spin_gauge_;
  int64_t next_check_ns_ = 0;
  int64_t next_host_check_ns_ = 0;
  int64_t next_spread_ns_ = 0;
  int64_t spread_period_ns_ = kSpreadPeriodNs;
  Status broken_;
};

}  // namespace kolovod
