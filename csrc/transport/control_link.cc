#include "transport/control_link.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/types.h"
#include "transport/cores.h"
#include "transport/waiter.h"

namespace kolovod {
namespace {

constexpr size_t kHeader = 2 * sizeof(uint32_t);  // length, epoch
constexpr size_t kReadBytes = 16 << 10;
constexpr int kAsideMs = 2;  // a driver that has not looked for so long does something else
// A packet that is lost costs one of these, not the host: so many until it is lost, a second apart at most.
constexpr int64_t kBeatsUntilLost = 8;
constexpr int64_t kMaxBeatMs = 1000;
constexpr int kMostUnread = 300;
// With so much on its way, which TCP sends again, a beat would only wait behind it.
constexpr int kEnoughUnsentBytes = 512;

void Prepare(int fd, int64_t host_lost_ms) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));  // fails on AF_UNIX, where it means nothing
  SetKeepalive(fd, host_lost_ms);
}

}  // namespace

ControlLink::ControlLink(std::vector<ControlLinkPeer> peers, uint32_t epoch, int64_t host_lost_ms)
    : peers_(std::move(peers)),
      epoch_(epoch),
      host_lost_ms_(host_lost_ms),
      beat_ms_(std::clamp<int64_t>(host_lost_ms / kBeatsUntilLost, 1, kMaxBeatMs)),
      pulses_(peers_.size()) {
  for (const ControlLinkPeer& link : peers_) {
    Prepare(link.fd, host_lost_ms);
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
    if (peer.fd < 0) continue;
    // A socket that is closed with something unread, a beat at the least, takes back what was sent.
    char unread[kReadBytes];
    while (recv(peer.fd, unread, sizeof(unread), MSG_DONTWAIT) > 0) {
    }
    close(peer.fd);
  }
  if (bell_ >= 0) close(bell_);
}

void ControlLink::Start(Events events) {
  events_ = std::move(events);
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "kv-control");
    AskForShortTurns();
    Read();
  });
}

void ControlLink::Stop(int patience_ms) {
  leaving_.store(true);
  // A beat of the peer that meets a closed socket ends it, and what is not there by then.
  const auto unsent = [this] {
    MutexLock lock(mutex_);
    for (size_t peer = 0; peer < peers_.size(); ++peer) {
      if (outgoing_[peer].ended) continue;
      if (!outgoing_[peer].bytes.empty()) return true;
      const std::optional<HostSigns> signs = ReadHostSigns(peers_[peer].fd);
      if (signs && signs->unacknowledged) return true;
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
  if (outgoing_[peer].ended) return;
  sent_frames_.fetch_add(1, std::memory_order_relaxed);
  PushFrame(peer, payload);
}

void ControlLink::PushFrame(size_t peer, const std::string& payload) {
  Outgoing& outgoing = outgoing_[peer];
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

int64_t ControlLink::WatchHosts(bool awake) {
  const int64_t now_ns = NowNs();
  const int64_t left_ns = next_beat_ns_ - now_ns;
  if (left_ns > (awake ? beat_ms_ * 500'000 : 0)) return left_ns / 1'000'000 + 1;
  int64_t next_ms = beat_ms_;
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    const std::optional<HostSigns> signs = ReadHostSigns(peers_[peer].fd);
    if (!signs) continue;  // not TCP: the other end is on this machine
    HostWatch& watch = pulses_[peer].watch;
    if (watch.Look(*signs, now_ns, beat_ms_, host_lost_ms_)) {
      MutexLock lock(read_mutex_);
      End(peer, "its host has acknowledged nothing for " + std::to_string(watch.silent_ms()) +
                    " ms: it is down, or the network between is (KOLOVOD_HOST_LOST_S)");
      continue;
    }
    if (watch.silent_ms() > 0) {
      const int64_t left_ms = host_lost_ms_ + signs->round_trip_ms - watch.silent_ms();
      if (left_ms > 0) next_ms = std::min(left_ms, next_ms);
    }
    Beat(peer, *signs);
  }
  next_beat_ns_ = now_ns + next_ms * 1'000'000;
  return next_ms;
}

void ControlLink::Beat(size_t peer, const HostSigns& signs) {
  Pulse& pulse = pulses_[peer];
  pulse.unread = signs.received_ms <= 2 * beat_ms_ ? 0 : pulse.unread + 1;
  if (pulse.unread > kMostUnread || leaving_.load()) return;  // the kernel probes once a second
  int unsent_bytes = 0;
  if (ioctl(peers_[peer].fd, SIOCOUTQ, &unsent_bytes) != 0 || unsent_bytes > kEnoughUnsentBytes) return;
  MutexLock lock(mutex_);
  Outgoing& outgoing = outgoing_[peer];
  if (!outgoing.ended && outgoing.bytes.empty()) PushFrame(peer, {});
}

void ControlLink::Read() {
  std::vector<pollfd> polled;
  uint64_t seen = 0;
  bool awake = false;  // something came
  while (!stop_.load()) {
    const int64_t beat_ms = WatchHosts(std::exchange(awake, false));
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
    if (poll(polled.data(), polled.size(), aside ? kAsideMs : static_cast<int>(beat_ms)) <= 0) continue;
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
        awake = true;
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
    if (length == 0) {  // a beat
      at += kHeader;
      continue;
    }
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
  if (std::exchange(incoming_[peer].ended, true)) return;
  {
    MutexLock lock(mutex_);
    outgoing_[peer].ended = true;
  }
  events_.lost(peers_[peer].host, reason);
}

}  // namespace kolovod
