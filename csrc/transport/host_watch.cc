#include "transport/host_watch.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>

namespace kolovod {
namespace {

constexpr int64_t kLeastKeepaliveMs = 4000;  // a second, and four probes
constexpr int64_t kMostProbes = 60;

void Set(int fd, int level, int name, int64_t value) {
  const auto number = static_cast<int>(value);
  (void)setsockopt(fd, level, name, &number, sizeof(number));  // fails on AF_UNIX, where it means nothing
}

}  // namespace

std::optional<HostSigns> ReadHostSigns(int fd) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return std::nullopt;
  HostSigns signs;
  signs.unacknowledged = info.tcpi_unacked > 0;
  signs.sent_ms = info.tcpi_last_data_sent;
  // Data that acknowledge nothing new do not count as an acknowledgement.
  signs.heard_ms = std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv);
  signs.received_ms = info.tcpi_last_data_recv;
  signs.probes = info.tcpi_probes;
  signs.round_trip_ms = info.tcpi_rtt / 1000;
  return signs;
}

void SetKeepalive(int fd, int64_t limit_ms) {
  const int64_t wait_ms = std::max(limit_ms, kLeastKeepaliveMs);
  const int64_t period_s = 1 + wait_ms / (kMostProbes * 1000);
  Set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  Set(fd, IPPROTO_TCP, TCP_KEEPIDLE, period_s);
  Set(fd, IPPROTO_TCP, TCP_KEEPINTVL, period_s);
  Set(fd, IPPROTO_TCP, TCP_KEEPCNT, (wait_ms + period_s * 1000 - 1) / (period_s * 1000));
}

bool HostWatch::Look(const HostSigns& signs, int64_t now_ns, int64_t period_ms, int64_t limit_ms) {
  const int64_t since_ms = looked_ns_ == 0 ? period_ms : (now_ns - looked_ns_) / 1'000'000;
  const int64_t step_ms = std::min(since_ms, 2 * period_ms);
  looked_ns_ = now_ns;
  // Nothing that has left since it was last heard: then it owes nothing. Where a window is closed data leave
  // ever more rarely, and what lies between says nothing.
  const bool owes = signs.unacknowledged && signs.sent_ms < signs.heard_ms;
  const bool probed = signs.probes >= kLeastProbes;
  if (!owes && !probed) {
    silent_ms_ = 0;
    asked_ = 0;
    return false;
  }
  const bool heard = signs.heard_ms <= since_ms;
  const bool sent = owes && signs.sent_ms <= since_ms;
  if (heard || asked_ == 0) {
    silent_ms_ = owes ? std::min(signs.sent_ms, step_ms) : 0;
    asked_ = 1;
  } else {
    silent_ms_ += step_ms;
    asked_ += sent ? 1 : 0;
  }
  return silent_ms_ >= limit_ms + signs.round_trip_ms && (probed || asked_ >= kLeastAsked);
}

}  // namespace kolovod
