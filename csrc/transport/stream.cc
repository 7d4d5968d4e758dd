#include "transport/stream.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace kolovod {
namespace {

void SetOption(int fd, int level, int name, int value) {
  // Every option here is an improvement, none is needed: a kernel without it still carries the bytes.
  (void)setsockopt(fd, level, name, &value, sizeof(value));
}

bool SameAddress(const sockaddr_storage& a, const sockaddr_storage& b) {
  if (a.ss_family != b.ss_family) return false;
  if (a.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(a).sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(b).sin_addr.s_addr;
  }
  return std::memcmp(&reinterpret_cast<const sockaddr_in6&>(a).sin6_addr,
                     &reinterpret_cast<const sockaddr_in6&>(b).sin6_addr, sizeof(in6_addr)) == 0;
}

uint64_t BytesOf(std::span<const iovec> parts) {
  uint64_t bytes = 0;
  for (const iovec& part : parts) bytes += part.iov_len;
  return bytes;
}

std::string Text(uint32_t sequence) {
  return "message " + std::to_string(sequence & 0xffff) + " of operation " + std::to_string(sequence >> 16);
}

}  // namespace

Stream::~Stream() { Close(); }

size_t Stream::Advance(std::vector<iovec>& parts, size_t* next, size_t bytes) {
  size_t left = bytes;
  while (left > 0 && *next < parts.size()) {
    iovec& part = parts[*next];
    const size_t step = std::min(left, part.iov_len);
    part.iov_base = static_cast<char*>(part.iov_base) + step;
    part.iov_len -= step;
    left -= step;
    if (part.iov_len == 0) ++*next;
  }
  return bytes - left;
}

bool Stream::Lingers() const {
  if (!tcp_ || !sent_enveloped_ || !connected()) return false;
  char unread[4096];
  while (recv(fd_, unread, sizeof(unread), MSG_DONTWAIT) > 0) {
  }
  int unacknowledged = 0;
  return ioctl(fd_, SIOCOUTQ, &unacknowledged) == 0 && unacknowledged > 0;
}

void Stream::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Status Stream::Connect(int fd, const ConnectionKeys* keys) {
  fd_ = fd;
  if (keys != nullptr) sealed_ = std::make_unique<Sealed>(*keys);
  int domain = 0;
  socklen_t length = sizeof(domain);
  const int flags = fcntl(fd_, F_GETFL);
  if (flags < 0 || fcntl(fd_, F_SETFL, flags | O_NONBLOCK) != 0 ||
      getsockopt(fd_, SOL_SOCKET, SO_DOMAIN, &domain, &length) != 0) {
    return Status(Code::kInternal, "the connection to " + peer_ + " (descriptor " + std::to_string(fd_) +
                                       ") cannot be used: " + std::strerror(errno));
  }
  tcp_ = domain == AF_INET || domain == AF_INET6;
  if (!tcp_) return Status();
  TuneTcp();
  // Both ends with one address are one machine.
  sockaddr_storage own{}, other{};
  socklen_t own_length = sizeof(own), other_length = sizeof(other);
  same_machine_ = getsockname(fd_, reinterpret_cast<sockaddr*>(&own), &own_length) == 0 &&
                  getpeername(fd_, reinterpret_cast<sockaddr*>(&other), &other_length) == 0 &&
                  SameAddress(own, other);
  return Status();
}

void Stream::TuneTcp() {
  SetOption(fd_, IPPROTO_TCP, TCP_NODELAY, 1);
  SetKeepalive(fd_, host_lost_ms_);
}

void Stream::BeginOperation(uint32_t number) { send_sequence_ = receive_sequence_ = number << 16; }

uint64_t Stream::Send(std::span<const iovec> parts) {
  const uint64_t bytes = BytesOf(parts);
  if (bytes == 0) return send_end_;
  const MessageHeader header{epoch_, send_sequence_++, bytes};
  return operation_end_ = Queue(header, sizeof(header), parts, Envelope{});
}

uint64_t Stream::SendEnveloped(const Envelope& envelope, std::span<const iovec> parts) {
  sent_enveloped_ = true;
  return Queue(MessageHeader{epoch_, 0, BytesOf(parts) | kEnveloped}, kEnvelopedBytes, parts, envelope);
}

uint64_t Stream::Queue(const MessageHeader& header, size_t front_bytes, std::span<const iovec> parts,
                       const Envelope& envelope) {
  Outgoing& message = outgoing_.emplace_back();
  message.front = {header, envelope};
  message.parts.reserve(parts.size() + 1);
  message.parts.push_back({&message.front, front_bytes});  // a deque's elements stay in place
  for (const iovec& part : parts) {
    if (part.iov_len > 0) message.parts.push_back(part);
  }
  const uint64_t bytes = header.bytes & ~kEnveloped;
  counters_.sent_bytes.fetch_add(bytes, std::memory_order_relaxed);
  counters_.sent_messages.fetch_add(1, std::memory_order_relaxed);
  return send_end_ += front_bytes + bytes;
}

uint64_t Stream::Receive(std::span<const iovec> parts) {
  const uint64_t bytes = BytesOf(parts);
  if (bytes == 0) return receive_end_;
  Incoming& message = incoming_.emplace_back();
  message.expected = MessageHeader{epoch_, receive_sequence_++, bytes};
  message.left = bytes;
  message.parts.reserve(parts.size());
  for (const iovec& part : parts) {
    if (part.iov_len > 0) message.parts.push_back(part);
  }
  return receive_end_ += sizeof(MessageHeader) + bytes;
}

size_t Stream::Gather(std::span<iovec> parts, size_t room, size_t* bytes) const {
  size_t count = 0;
  *bytes = 0;
  for (auto message = outgoing_.begin(); message != outgoing_.end(); ++message) {
    for (size_t i = message->next; i < message->parts.size(); ++i) {
      const bool whole = i > 0;
      const size_t left = room - *bytes;
      if (count == parts.size() || left == 0 || (!whole && left < message->parts[i].iov_len)) return count;
      parts[count] = message->parts[i];
      parts[count].iov_len = std::min(parts[count].iov_len, left);
      *bytes += parts[count++].iov_len;
    }
  }
  return count;
}

void Stream::Taken(size_t bytes) {
  while (bytes > 0) {
    Outgoing& front = outgoing_.front();
    bytes -= Advance(front.parts, &front.next, bytes);
    if (front.next == front.parts.size()) outgoing_.pop_front();
  }
}

Status Stream::Write(std::span<iovec> parts, size_t* bytes) const {
  *bytes = 0;
  msghdr call{};
  call.msg_iov = parts.data();
  call.msg_iovlen = parts.size();
  ssize_t result;
  do {
    result = sendmsg(fd_, &call, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (result < 0 && errno == EINTR);
  if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Status();
  if (result < 0) return Lost("sending to", errno);
  *bytes = static_cast<size_t>(result);
  return Status();
}

Status Stream::Read(std::span<iovec> parts, size_t* bytes) const {
  *bytes = 0;
  msghdr call{};
  call.msg_iov = parts.data();
  call.msg_iovlen = parts.size();
  ssize_t result;
  do {
    result = recvmsg(fd_, &call, MSG_DONTWAIT);
  } while (result < 0 && errno == EINTR);
  if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Status();
  if (result < 0) return Lost("receiving from", errno);
  if (result == 0) return Lost(nullptr, 0);
  *bytes = static_cast<size_t>(result);
  return Status();
}

Status Stream::Push(bool* moved) {
  if (!sending() || !connected()) return Status();
  if (sealed_ != nullptr) return PushSealed(moved);
  iovec parts[kMaxParts];
  size_t bytes = 0;
  const size_t count = Gather(parts, SIZE_MAX, &bytes);
  KV_RETURN_IF_ERROR(Spared(Write({parts, count}, &bytes), /*reading=*/false));
  *moved |= bytes > 0;
  if (outgoing_.empty()) return Status();
  sent_ += bytes;
  Taken(bytes);
  return Status();
}

Status Stream::CheckHeader(const MessageHeader& header) const {
  const MessageHeader& wanted = incoming_.front().expected;
  if (header.epoch != wanted.epoch) {
    return Status(Code::kMismatch, peer_ + " sent data of world " + std::to_string(header.epoch) +
                                       "; this rank is in world " + std::to_string(wanted.epoch));
  }
  if (header.sequence != wanted.sequence) {
    return Status(Code::kMismatch, peer_ + " sent " + Text(header.sequence) + "; this rank expects " +
                                       Text(wanted.sequence) +
                                       ": the ranks no longer execute the same operations");
  }
  if (header.bytes != wanted.bytes) {
    return Status(Code::kMismatch, peer_ + " sent " + std::to_string(header.bytes) + " bytes as " +
                                       Text(header.sequence) + "; this rank expects " +
                                       std::to_string(wanted.bytes));
  }
  return Status();
}

Status Stream::Finished() {
  counters_.received_bytes.fetch_add(Front().expected.bytes, std::memory_order_relaxed);
  counters_.received_messages.fetch_add(1, std::memory_order_relaxed);
  in_payload_ = false;
  if (!enveloped_) {
    incoming_.pop_front();
    return Status();
  }
  enveloped_.reset();
  return receiver_->End(number_);
}

Status Stream::TakeEnvelope(const MessageHeader& header, bool* taken) {
  if (header.epoch != epoch_ || header.sequence != 0 || receiver_ == nullptr) {
    return Status(Code::kMismatch, peer_ + " sent a message of world " + std::to_string(header.epoch) +
                                       (receiver_ == nullptr ? " that nobody expects" : "") +
                                       "; this rank is in world " + std::to_string(epoch_));
  }
  if (inbox_end_ - inbox_begin_ < kEnvelopedBytes) return Status();
  Envelope envelope;
  std::memcpy(&envelope, inbox_ + inbox_begin_ + sizeof(header), sizeof(envelope));
  inbox_begin_ += kEnvelopedBytes;
  Incoming message;
  message.expected = {epoch_, 0, header.bytes & ~kEnveloped};
  message.left = message.expected.bytes;
  KV_RETURN_IF_ERROR(receiver_->Begin(number_, envelope, message.left, &message.parts));
  enveloped_ = std::move(message);
  in_payload_ = true;
  *taken = true;
  return enveloped_->left == 0 ? Finished() : Status();
}

Status Stream::TakeFromInbox(bool* moved) {
  while (reads()) {
    const size_t held = inbox_end_ - inbox_begin_;
    if (!in_payload_) {
      if (held < sizeof(MessageHeader)) return Status();
      MessageHeader header;
      std::memcpy(&header, inbox_ + inbox_begin_, sizeof(header));
      if ((header.bytes & kEnveloped) != 0) {
        bool taken = false;
        KV_RETURN_IF_ERROR(TakeEnvelope(header, &taken));
        if (!taken) return Status();
        *moved = true;
        continue;
      }
      if (IsAhead()) return Status();
      KV_RETURN_IF_ERROR(CheckHeader(header));
      inbox_begin_ += sizeof(header);
      received_ += sizeof(header);
      in_payload_ = true;
      *moved = true;
      continue;
    }
    Incoming& front = Front();
    size_t bytes = static_cast<size_t>(std::min<uint64_t>(held, front.left));
    if (bytes == 0) return Status();
    if (!enveloped_) received_ += bytes;
    front.left -= bytes;
    while (bytes > 0) {
      const size_t step = std::min(bytes, front.parts[front.next].iov_len);
      std::memcpy(front.parts[front.next].iov_base, inbox_ + inbox_begin_, step);
      Advance(front.parts, &front.next, step);
      inbox_begin_ += step;
      bytes -= step;
    }
    *moved = true;
    if (front.left == 0) KV_RETURN_IF_ERROR(Finished());
  }
  return Status();
}

// The rest of the front payload straight to its place, and what follows it into the inbox.
Status Stream::ReadFromSocket(bool* moved) {
  iovec parts[kMaxParts + 1];
  size_t count = 0;
  uint64_t direct = 0;
  if (in_payload_) {
    const Incoming& front = Front();
    for (size_t i = front.next; i < front.parts.size() && count < kMaxParts; ++i) {
      direct += front.parts[i].iov_len;
      parts[count++] = front.parts[i];
    }
  }
  const bool whole = !in_payload_ || direct == Front().left;
  if (inbox_begin_ == inbox_end_) inbox_begin_ = inbox_end_ = 0;
  if (inbox_begin_ > 0) {  // part of a header
    std::memmove(inbox_, inbox_ + inbox_begin_, inbox_end_ - inbox_begin_);
    inbox_end_ -= inbox_begin_;
    inbox_begin_ = 0;
  }
  if (whole) parts[count++] = {inbox_ + inbox_end_, kInboxBytes - inbox_end_};
  if (direct == 0 && inbox_end_ == kInboxBytes) return Status();  // no room: the peer is ahead
  size_t bytes = 0;
  KV_RETURN_IF_ERROR(Spared(Read({parts, count}, &bytes), /*reading=*/true));
  *moved |= bytes > 0;
  const uint64_t placed = std::min<uint64_t>(bytes, direct);
  inbox_end_ += bytes - placed;
  if (placed == 0) return Status();
  Incoming& front = Front();
  Advance(front.parts, &front.next, placed);
  front.left -= placed;
  if (!enveloped_) received_ += placed;
  return front.left == 0 ? Finished() : Status();
}

bool Stream::IsAhead() const {
  if (in_payload_ || !incoming_.empty() || inbox_end_ - inbox_begin_ < sizeof(MessageHeader)) return false;
  MessageHeader header;
  std::memcpy(&header, inbox_ + inbox_begin_, sizeof(header));
  return (header.bytes & kEnveloped) == 0;
}

Status Stream::Spared(const Status& status, bool reading) {
  if (status.code() != Code::kRankLost || receiving() || enveloped_ || sent_ < operation_end_) return status;
  outgoing_.clear();
  if (sealed_ != nullptr) sealed_->begin = sealed_->end = 0;
  sent_ = send_end_;
  if (reading) listening_ = false;
  if (reading && receiver_ != nullptr) receiver_->Closed(number_, status);
  return Status();
}

Status Stream::Pull(bool* moved) {
  if (sealed_ != nullptr) return PullSealed(moved);
  KV_RETURN_IF_ERROR(TakeFromInbox(moved));
  if (!reads() || !connected()) return Status();
  KV_RETURN_IF_ERROR(ReadFromSocket(moved));
  return TakeFromInbox(moved);
}

Status Stream::Lost(const char* doing, int error) const {
  if (doing == nullptr || error == ECONNRESET || error == EPIPE) {
    return Status(Code::kRankLost,
                  peer_ +
                      " closed its connection in the middle of an operation: its process ended or shut "
                      "down");
  }
  if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH) {
    return Status(Code::kRankLost, "the host of " + peer_ + " does not answer any more (" +
                                       std::strerror(error) + "): it is down, or the network between is");
  }
  return Status(Code::kRankLost, std::string("the connection failed while ") + doing + " " + peer_ + ": " +
                                     std::strerror(error));
}

Status Stream::CheckHost(int64_t now_ns, int64_t period_ms) {
  if (!tcp_) return Status();
  const std::optional<HostSigns> signs = ReadHostSigns(fd_);
  if (!signs || !watch_.Look(*signs, now_ns, period_ms, host_lost_ms_)) return Status();
  return Status(Code::kRankLost, "the host of " + peer_ + " has acknowledged nothing for " +
                                     std::to_string(watch_.silent_ms()) +
                                     " ms: it is down, or the network between is (KOLOVOD_HOST_LOST_S)");
}

int Stream::PeerCore() const {
  int core = -1;
  socklen_t length = sizeof(core);
  // On the loopback interface the sender's core also does the receiver's part of the protocol.
  if (!same_machine_ || getsockopt(fd_, SOL_SOCKET, SO_INCOMING_CPU, &core, &length) != 0) return -1;
  return core;
}

void Stream::Drop() {
  outgoing_.clear();
  incoming_.clear();
  enveloped_.reset();
  listening_ = false;
  in_payload_ = false;
  if (sealed_ != nullptr) sealed_->begin = sealed_->end = 0;
  sent_ = send_end_;
  received_ = receive_end_;
}

}  // namespace kolovod
