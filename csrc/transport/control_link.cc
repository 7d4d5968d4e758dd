#include "transport/control_link.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/types.h"
#include "transport/cores.h"

namespace kolovod {
namespace {

constexpr size_t kHeader = 2 * sizeof(uint32_t);  // length, epoch
constexpr size_t kReadBytes = 16 << 10;
constexpr int kPollMs = 1000;
constexpr int kAsideMs = 2;  // a driver that has not looked for so long does something else

void Prepare(int fd) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  // These fail on AF_UNIX, where they mean nothing.
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  const int seconds = 1, probes = 4, user_timeout_ms = 5000;
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof(seconds));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof(seconds));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout_ms, sizeof(user_timeout_ms));
}

}  // namespace

ControlLink::ControlLink(std::vector<ControlLinkPeer> peers, uint32_t epoch)
    : peers_(std::move(peers)), epoch_(epoch) {
  for (const ControlLinkPeer& link : peers_) {
    Prepare(link.fd);
    incoming_.emplace_back();
    outgoing_.emplace_back();
    if (link.keys == nullptr) continue;
    incoming_.back().reader = std::make_unique<SealedReader>(*link.keys);
    outgoing_.back().sealer = std::make_unique<Sealer>(link.keys->cipher, link.keys->send);
  }
  bell_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

ControlLink::~ControlLink() {
  Stop(0);
  for (const ControlLinkPeer& peer : peers_) {
    if (peer.fd >= 0) close(peer.fd);
  }
  if (bell_ >= 0) close(bell_);
}

void ControlLink::Start(Events events) {
  events_ = std::move(events);
  thread_ = std::thread([this] {
    AskForShortTurns();
    Read();
  });
}

void ControlLink::Stop(int patience_ms) {
  const auto unsent = [this] {
    MutexLock lock(mutex_);
    for (const Outgoing& outgoing : outgoing_) {
      if (!outgoing.ended && !outgoing.bytes.empty()) return true;
    }
    return false;
  };
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(patience_ms);
  while (!stop_.load() && Clock::now() < deadline && unsent()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  stop_.store(true);
  eventfd_write(bell_, 1);
  if (thread_.joinable()) thread_.join();
}

void ControlLink::Forget() {
  if (thread_.joinable()) thread_.detach();
  for (ControlLinkPeer& peer : peers_) {
    if (peer.fd >= 0) close(peer.fd);
    peer.fd = -1;
  }
}

void ControlLink::Send(std::span<const int> hosts, const std::string& payload) {
  MutexLock lock(mutex_);
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    if (std::find(hosts.begin(), hosts.end(), peers_[peer].host) != hosts.end()) Push(peer, payload);
  }
}

void ControlLink::Push(size_t peer, const std::string& payload) {
  Outgoing& outgoing = outgoing_[peer];
  if (outgoing.ended) return;
  const auto length = static_cast<uint32_t>(payload.size());
  const bool waited = !outgoing.bytes.empty();
  std::string sealed;  // the frame, until it is
  std::string& frame = outgoing.sealer == nullptr ? outgoing.bytes : sealed;
  frame.append(reinterpret_cast<const char*>(&length), sizeof(length));
  frame.append(reinterpret_cast<const char*>(&epoch_), sizeof(epoch_));
  frame += payload;
  if (outgoing.sealer != nullptr &&
      !outgoing.sealer->Append(frame.data(), frame.size(), &outgoing.bytes).ok()) {
    // As good as gone: the peer will find a record that does not open, and say so.
    outgoing.ended = true;
    shutdown(peers_[peer].fd, SHUT_RDWR);
    return;
  }
  sent_frames_.fetch_add(1, std::memory_order_relaxed);
  if (waited) return;
  Flush(peer);
  if (!outgoing.bytes.empty()) eventfd_write(bell_, 1);
}

// Moves what the socket takes. An error shows itself to the reader too, which says so.
void ControlLink::Flush(size_t peer) {
  auto& [sealer, bytes, written, ended] = outgoing_[peer];
  while (written < bytes.size()) {
    const ssize_t n = send(peers_[peer].fd, bytes.data() + written, bytes.size() - written, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    written += static_cast<size_t>(n);
  }
  if (written == bytes.size()) {
    bytes.clear();
    written = 0;
  }
}

std::deque<ControlLink::Frame> ControlLink::Take() {
  MutexLock lock(mutex_);
  has_data_.store(false, std::memory_order_relaxed);
  return std::exchange(arrived_, {});
}

void ControlLink::Read() {
  std::vector<pollfd> polled;
  uint64_t seen = 0;
  while (!stop_.load()) {
    const uint64_t looks = looks_.load(std::memory_order_relaxed);
    const bool aside = looks != std::exchange(seen, looks) && looking_.load(std::memory_order_seq_cst);
    aside_.store(aside, std::memory_order_seq_cst);
    polled.assign(1, pollfd{bell_, POLLIN, 0});
    {
      MutexLock lock(mutex_);
      for (size_t peer = 0; peer < peers_.size(); ++peer) {
        const int events = (aside ? 0 : POLLIN) | (outgoing_[peer].bytes.empty() ? 0 : POLLOUT);
        const int fd = outgoing_[peer].ended || events == 0 ? -1 : peers_[peer].fd;
        polled.push_back(pollfd{fd, static_cast<short>(events), 0});
      }
    }
    if (poll(polled.data(), polled.size(), aside ? kAsideMs : kPollMs) <= 0) continue;
    if (polled[0].revents != 0) {
      eventfd_t rings;
      eventfd_read(bell_, &rings);
    }
    bool arrived = false;
    for (size_t i = 0; i < peers_.size() && !stop_.load(); ++i) {
      const short happened = polled[i + 1].revents;
      if (happened & POLLOUT) {
        MutexLock lock(mutex_);
        Flush(i);
      }
      if (happened & ~POLLOUT) {
        MutexLock lock(read_mutex_);
        arrived = Receive(i) || arrived;
      }
    }
    if (arrived) events_.arrived();
  }
}

bool ControlLink::Look() {
  if (HasData()) return true;
  if (!read_mutex_.try_lock()) return false;
  looks_.fetch_add(1, std::memory_order_relaxed);
  looking_.store(true, std::memory_order_relaxed);
  for (size_t peer = 0; peer < peers_.size(); ++peer) Receive(peer);
  read_mutex_.unlock();
  return HasData();
}

// Whichever of the two stores comes first, the thread looks at the sockets again.
void ControlLink::LookAway() {
  looking_.store(false, std::memory_order_seq_cst);
  if (aside_.load(std::memory_order_seq_cst)) eventfd_write(bell_, 1);
}

// True: there is a new frame for the driver.
bool ControlLink::Receive(size_t peer) {
  Incoming& incoming = incoming_[peer];
  bool arrived = false;
  char plain[kReadBytes];
  while (!incoming.ended) {
    const std::span<char> room = incoming.reader == nullptr ? plain : incoming.reader->Room();
    const ssize_t n = recv(peers_[peer].fd, room.data(), room.size(), 0);
    const int error = n < 0 ? errno : 0;
    if (n > 0 && incoming.reader == nullptr) {
      incoming.bytes.append(plain, static_cast<size_t>(n));
    } else if (n > 0) {
      incoming.reader->Arrived(static_cast<size_t>(n));
      const Status opened = Open(incoming);
      if (!opened.ok()) {
        End(peer, opened.message());
        return arrived;
      }
    }
    if (error == EINTR) continue;
    if (error == EAGAIN || error == EWOULDBLOCK) return arrived;
    if (n <= 0) {
      End(peer, n == 0 ? "its connection was closed" : std::strerror(error));
      return arrived;
    }
    if (!Parse(peer)) {
      End(peer, "it sent bytes that no leader of this world can have written");
      return arrived;
    }
    arrived = arrived || HasData();
    if (static_cast<size_t>(n) < room.size()) return arrived;
  }
  return arrived;
}

Status ControlLink::Open(Incoming& incoming) {
  for (;;) {
    size_t bytes = 0;
    KV_RETURN_IF_ERROR(incoming.reader->Next(&bytes));
    if (bytes == 0) return Status();
    std::span<char> plain;
    KV_RETURN_IF_ERROR(incoming.reader->Open(&plain));
    incoming.bytes.append(plain.data(), plain.size());
  }
}

bool ControlLink::Parse(size_t peer) {
  std::string& bytes = incoming_[peer].bytes;
  size_t at = 0;
  while (bytes.size() - at >= kHeader) {
    uint32_t length;
    uint32_t epoch;
    std::memcpy(&length, bytes.data() + at, sizeof(length));
    std::memcpy(&epoch, bytes.data() + at + sizeof(length), sizeof(epoch));
    if (length > kMaxFrameBytes || epoch != epoch_) return false;
    if (bytes.size() - at - kHeader < length) break;
    Frame frame{peers_[peer].host, bytes.substr(at + kHeader, length)};
    at += kHeader + length;
    received_frames_.fetch_add(1, std::memory_order_relaxed);
    if (events_.read(frame)) continue;
    MutexLock lock(mutex_);
    arrived_.push_back(std::move(frame));
    has_data_.store(true, std::memory_order_seq_cst);
  }
  bytes.erase(0, at);
  return true;
}

void ControlLink::End(size_t peer, const std::string& reason) {
  incoming_[peer].ended = true;
  {
    MutexLock lock(mutex_);
    outgoing_[peer].ended = true;
  }
  events_.lost(peers_[peer].host, reason);
}

}  // namespace kolovod
