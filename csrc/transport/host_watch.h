// Whether the other host of a TCP connection still answers: its kernel, that is, which acknowledges data also
// while the process there computes, is stopped or gets no core (docs/design/network.md). So silence counts
// only while something that has left is to be acknowledged.
#pragma once

#include <cstdint>
#include <optional>

namespace kolovod {

// What the kernel knows of a connection.
struct HostSigns {
  bool unacknowledged = false;  // data have left that nobody has acknowledged
  int64_t sent_ms = 0;          // since data left, again or for the first time
  int64_t heard_ms = 0;         // since anything came: data, or an acknowledgement of whatever
  int64_t received_ms = 0;      // since data came
  int probes = 0;               // of an idle connection or a closed window, in a row that nobody has answered
  int64_t round_trip_ms = 0;
};

// Of the connection `fd`; nullopt: it is not TCP.
std::optional<HostSigns> ReadHostSigns(int fd);

// The kernel itself looks after a connection on which nothing is to be acknowledged: it ends some time after
// nobody has answered for `limit_ms`, five seconds at least. (TCP_USER_TIMEOUT would do for all, but also
// ends a connection whose other host answers that its process has no room.)
void SetKeepalive(int fd, int64_t limit_ms);

class HostWatch {
 public:
  // Looks once every `period_ms` or so. True: the host has been silent for `limit_ms` and a round trip,
  // though it was asked several times. What passes between two looks counts for two periods at most, so that
  // a process or machine that itself stood still takes nobody for lost.
  bool Look(const HostSigns& signs, int64_t now_ns, int64_t period_ms, int64_t limit_ms);
  // At the last look.
  int64_t silent_ms() const { return silent_ms_; }

 private:
  static constexpr int kLeastAsked = 3;   // looks since one of which data have left
  static constexpr int kLeastProbes = 3;  // these go seldom: the last has had no time

  int64_t looked_ns_ = 0;
  int64_t silent_ms_ = 0;
  int asked_ = 0;
};

}  // namespace kolovod
