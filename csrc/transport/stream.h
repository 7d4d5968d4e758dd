// One connection of the data plane: messages queued for sending and places posted for receiving, moved as far
// as the socket allows and never further. The wire format is in docs/wire.md.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "transport/envelope.h"
#include "transport/host_watch.h"
#include "transport/sealer.h"

namespace kolovod {

// In front of every message, little-endian. `sequence` is the operation's number in the upper 16 bits and the
// message's within it, on this connection and in this direction, in the lower: both ends count alike, so what
// differs has diverged.
//
// With kEnveloped in `bytes` it is a message of one rank to the other, which no operation of all expects: an
// envelope and `bytes` without that bit follow, and `sequence` is 0.
inline constexpr uint64_t kEnveloped = uint64_t{1} << 63;
struct MessageHeader {
  uint32_t epoch;
  uint32_t sequence;
  uint64_t bytes;
};
static_assert(sizeof(MessageHeader) == 16);

// Counted since the connection was made; may be read by any thread.
struct StreamCounters {
  std::atomic<uint64_t> sent_bytes{0};  // payload, without headers
  std::atomic<uint64_t> sent_messages{0};
  std::atomic<uint64_t> received_bytes{0};
  std::atomic<uint64_t> received_messages{0};
};

// Not thread-safe: whoever drives the engine uses it.
class Stream {
 public:
  // `peer` is for messages: "rank 1 on a"; `number` is its rank. Its host is lost when it acknowledges
  // nothing for `host_lost_ms`.
  Stream(std::string peer, uint32_t epoch, int number = 0, int64_t host_lost_ms = 1500)
      : peer_(std::move(peer)), epoch_(epoch), number_(number), host_lost_ms_(host_lost_ms) {}
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Takes `fd` over, a connected stream socket: TCP, or AF_UNIX in tests. Once. What was queued before moves
  // from then on. With `keys` everything is sealed; null: nothing is.
  Status Connect(int fd, const ConnectionKeys* keys = nullptr);
  bool connected() const { return fd_ >= 0; }

  // Messages count from 0 again.
  void BeginOperation(uint32_t number);

  // Queues one message that gathers or scatters `parts`; nothing at all if they hold no bytes. The memory
  // must stay until the position that is returned has been reached.
  uint64_t Send(std::span<const iovec> parts);
  uint64_t Receive(std::span<const iovec> parts);
  // Queues one message in an envelope; its memory must stay as that of others.
  uint64_t SendEnveloped(const Envelope& envelope, std::span<const iovec> parts);
  // Who takes those that come. Null: they are an error.
  void set_receiver(Receiver* receiver) { receiver_ = receiver; }
  // Whether Pull reads although nothing is expected, for envelopes. Ends when the peer closes.
  void Listen(bool listening) { listening_ = listening; }

  // What was sent in envelopes is not all with the peer's system yet. Throws away what has come.
  bool Lingers() const;

  // Positions of the streams: everything queued up to there is through.
  uint64_t sent() const { return sent_; }
  uint64_t received() const { return received_; }
  bool sending() const { return sent_ != send_end_; }
  bool receiving() const { return received_ != receive_end_; }
  bool listening() const { return listening_ && !IsAhead(); }

  // A system call each (a few where records are sealed), so that sending and receiving take turns; `moved` is
  // set when bytes moved. A message is written only after its header was what this end expects.
  Status Push(bool* moved);
  Status Pull(bool* moved);

  // Looks whether the peer's host still answers (host_watch.h); to be called every `period_ms` or so.
  Status CheckHost(int64_t now_ns, int64_t period_ms);

  // The core that the peer last sent from, if it is a process of this machine; else -1.
  int PeerCore() const;

  // Forgets everything queued: memory of others is not touched any more.
  void Drop();
  // Closes the descriptor without a word to the peer; for the destructor and for forked children.
  void Close();

  int fd() const { return fd_; }
  int number() const { return number_; }
  const std::string& peer() const { return peer_; }
  StreamCounters& counters() { return counters_; }

 private:
  struct Outgoing {
    struct {
      MessageHeader header;
      Envelope envelope;
    } front;                   // with the envelope, or without
    std::vector<iovec> parts;  // what is left of it and of the payload
    size_t next = 0;
  };
  struct Incoming {
    MessageHeader expected;
    std::vector<iovec> parts;
    size_t next = 0;
    uint64_t left = 0;  // payload bytes
  };
  static constexpr size_t kEnvelopedBytes = sizeof(MessageHeader) + sizeof(Envelope);
  // What a connection has besides if it is encrypted.
  struct Sealed {
    explicit Sealed(const ConnectionKeys& keys) : sealer(keys.cipher, keys.send), reader(keys) {}
    Sealer sealer;
    std::unique_ptr<char[]> record{new char[kRecordBytes]};  // the one that is on its way out
    size_t begin = 0, end = 0;                               // what is left of it
    uint64_t plain = 0;                                      // bytes that it was made of
    SealedReader reader;
  };

  // Goes on by `bytes` within parts[*next...], or to their end; what is used up is left behind. Returns by
  // how much it went on.
  static size_t Advance(std::vector<iovec>& parts, size_t* next, size_t bytes);
  void TuneTcp();
  uint64_t Queue(const MessageHeader& header, size_t front_bytes, std::span<const iovec> parts,
                 const Envelope& envelope);
  // The message that is being read, or will be next.
  Incoming& Front() { return enveloped_ ? *enveloped_ : incoming_.front(); }
  bool reads() const { return enveloped_ || listening_ || !incoming_.empty(); }
  // The inbox has the header of one, and perhaps all of its envelope.
  Status TakeEnvelope(const MessageHeader& header, bool* taken);
  // What comes next is of an operation that this rank has not come to.
  bool IsAhead() const;
  // The peer may close its connection while no message of an operation is on its way or expected: it has
  // left, or died, which the engine hears from others. What goes to it in envelopes is dropped, what has come
  // from it can still be read.
  Status Spared(const Status& status, bool reading);
  // Of what is queued, as much as one call may take; whole headers only if `room` is limited.
  size_t Gather(std::span<iovec> parts, size_t room, size_t* bytes) const;
  // The front of the queue has been taken.
  void Taken(size_t bytes);
  // One system call. 0: the socket takes, or has, nothing now.
  Status Write(std::span<iovec> parts, size_t* bytes) const;
  Status Read(std::span<iovec> parts, size_t* bytes) const;
  Status SealNext();
  Status PushSealed(bool* moved);
  Status OpenArrived(bool* moved);
  Status PullSealed(bool* moved);
  Status Refuse(const Status& status) const;
  // What the inbox has for the messages that are expected goes to its place.
  Status TakeFromInbox(bool* moved);
  Status CheckHeader(const MessageHeader& header) const;
  Status Lost(const char* doing, int error) const;
  Status ReadFromSocket(bool* moved);
  Status Finished();

  // Headers are read through here together with the beginning of their payload: one system call for a small
  // message. Larger would mean copying more of what could go straight to its place.
  static constexpr size_t kInboxBytes = 4096;
  static constexpr int kRecordsPerPush = 4;
  static constexpr size_t kMaxParts = 64;  // per system call

  int fd_ = -1;
  const std::string peer_;
  const uint32_t epoch_;
  const int number_;
  const int64_t host_lost_ms_;
  HostWatch watch_;
  Receiver* receiver_ = nullptr;
  bool sent_enveloped_ = false;
  bool listening_ = false;
  bool tcp_ = false;
  bool same_machine_ = false;
  uint32_t send_sequence_ = 0;
  uint32_t receive_sequence_ = 0;
  uint64_t sent_ = 0, send_end_ = 0;
  uint64_t operation_end_ = 0;  // of what is sent: where the last message of an operation ends
  uint64_t received_ = 0, receive_end_ = 0;
  std::deque<Outgoing> outgoing_;
  std::deque<Incoming> incoming_;
  std::optional<Incoming> enveloped_;  // in the middle of such a message
  bool in_payload_ = false;            // of Front()
  size_t inbox_begin_ = 0, inbox_end_ = 0;
  char own_inbox_[kInboxBytes];
  char* inbox_ = own_inbox_;  // if records are sealed, the one that was opened last
  std::unique_ptr<Sealed> sealed_;
  StreamCounters counters_;
};

}  // namespace kolovod
