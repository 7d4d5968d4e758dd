// One connection of the data plane: messages queued for sending and places posted for receiving, moved as far
// as the socket allows and never further. The wire format is in docs/wire.md.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "transport/sealer.h"

namespace kolovod {

// In front of every message, little-endian. `sequence` is the operation's number in the upper 16 bits and the
// message's within it, on this connection and in this direction, in the lower: both ends count alike, so what
// differs has diverged.
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
  // `peer` is for messages: "rank 1 on a".
  Stream(std::string peer, uint32_t epoch) : peer_(std::move(peer)), epoch_(epoch) {}
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Takes `fd` over, a connected stream socket: TCP, or AF_UNIX in tests. Once. What was queued before moves
  // from then on. With `keys` everything is sealed; null: nothing is.
  Status Connect(int fd, const RecordKeys* keys = nullptr);
  bool connected() const { return fd_ >= 0; }

  // Messages count from 0 again.
  void BeginOperation(uint32_t number);

  // Queues one message that gathers or scatters `parts`; nothing at all if they hold no bytes. The memory
  // must stay until the position that is returned has been reached.
  uint64_t Send(std::span<const iovec> parts);
  uint64_t Receive(std::span<const iovec> parts);

  // Positions of the streams: everything queued up to there is through.
  uint64_t sent() const { return sent_; }
  uint64_t received() const { return received_; }
  bool sending() const { return sent_ != send_end_; }
  bool receiving() const { return received_ != receive_end_; }

  // A system call each (a few where records are sealed), so that sending and receiving take turns; `moved` is
  // set when bytes moved. A message is written only after its header was what this end expects.
  Status Push(bool* moved);
  Status Pull(bool* moved);

  // Looks whether the peer's host still answers: bytes that nobody acknowledges, retransmitted in vain for
  // `limit_ms`. (TCP_USER_TIMEOUT would also cut off a host that answers but whose process is late in
  // reading.)
  Status CheckHost(int64_t limit_ms);

  // The core that the peer last sent from, if it is a process of this machine; else -1.
  int PeerCore() const;

  // Forgets everything queued: memory of others is not touched any more.
  void Drop();
  // Closes the descriptor without a word to the peer; for the destructor and for forked children.
  void Close();

  int fd() const { return fd_; }
  const std::string& peer() const { return peer_; }
  StreamCounters& counters() { return counters_; }

 private:
  struct Outgoing {
    MessageHeader header;
    std::vector<iovec> parts;  // what is left of header and payload
    size_t next = 0;
  };
  struct Incoming {
    MessageHeader expected;
    std::vector<iovec> parts;
    size_t next = 0;
    uint64_t left = 0;  // payload bytes
  };
  // What a connection has besides if it is encrypted.
  struct Sealed {
    explicit Sealed(const RecordKeys& keys) : sealer(keys.cipher, keys.send), reader(keys) {}
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
  void Finished();

  // Headers are read through here together with the beginning of their payload: one system call for a small
  // message. Larger would mean copying more of what could go straight to its place.
  static constexpr size_t kInboxBytes = 4096;
  static constexpr int kRecordsPerPush = 4;
  static constexpr size_t kMaxParts = 64;  // per system call

  int fd_ = -1;
  const std::string peer_;
  const uint32_t epoch_;
  bool tcp_ = false;
  bool same_machine_ = false;
  uint32_t send_sequence_ = 0;
  uint32_t receive_sequence_ = 0;
  uint64_t sent_ = 0, send_end_ = 0;
  uint64_t received_ = 0, receive_end_ = 0;
  std::deque<Outgoing> outgoing_;
  std::deque<Incoming> incoming_;
  bool in_payload_ = false;  // of incoming_.front()
  size_t inbox_begin_ = 0, inbox_end_ = 0;
  char own_inbox_[kInboxBytes];
  char* inbox_ = own_inbox_;  // if records are sealed, the one that was opened last
  std::unique_ptr<Sealed> sealed_;
  StreamCounters counters_;
};

}  // namespace kolovod
