// Delays every packet: `delay NANOSECONDS A0 B0 A1 B1 ...` makes TAP devices of these names in the
// network namespace that it is started in, and passes what leaves one of a pair to the other so much
// later, in order. Says "up" when they are there; ends with its standard input.
//
// Large packets pass whole (virtio headers carry what is needed to cut them), so that a fast link
// costs few calls.
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

namespace {

constexpr size_t kPacketBytes = 70'000;  // 64 KiB and headers
constexpr size_t kHeldBytes = 32 << 20;  // per direction; what comes then is lost
constexpr int kPacketsAtOnce = 64;       // of one direction, before the others are looked at

struct Packet {
  int64_t due_ns;
  std::vector<char> bytes;
};

struct Lane {
  int from;
  int to;
  std::deque<Packet> held;
  size_t held_bytes = 0;
};

int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

[[noreturn]] void Fail(const char* what, const char* name) {
  std::fprintf(stderr, "delay: %s %s: %s\n", what, name, std::strerror(errno));
  std::exit(1);
}

int OpenTap(const char* name) {
  const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) Fail("opening", "/dev/net/tun");
  ifreq request{};
  request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
  std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  if (ioctl(fd, TUNSETIFF, &request) < 0) Fail("making", name);
  if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6) < 0) Fail("preparing", name);
  return fd;
}

void Take(Lane& lane, int64_t delay_ns) {
  static char buffer[kPacketBytes];
  for (int count = 0; count < kPacketsAtOnce; ++count) {
    const ssize_t size = read(lane.from, buffer, sizeof buffer);
    if (size <= 0) return;  // nothing more, or the device is down
    if (lane.held_bytes + size > kHeldBytes) continue;
    lane.held.push_back({NowNs() + delay_ns, std::vector<char>(buffer, buffer + size)});
    lane.held_bytes += size;
  }
}

void Give(Lane& lane, int64_t now_ns) {
  while (!lane.held.empty() && lane.held.front().due_ns <= now_ns) {
    const Packet& packet = lane.held.front();
    // A device that is down or full loses the packet, as a cable or a switch does.
    [[maybe_unused]] const ssize_t written = write(lane.to, packet.bytes.data(), packet.bytes.size());
    lane.held_bytes -= packet.bytes.size();
    lane.held.pop_front();
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4 || argc % 2 != 0) {
    std::fprintf(stderr, "usage: delay NANOSECONDS A0 B0 [A1 B1 ...]\n");
    return 2;
  }
  const int64_t delay_ns = std::atoll(argv[1]);
  prctl(PR_SET_TIMERSLACK, 1);
  std::vector<Lane> lanes;
  for (int index = 2; index < argc; index += 2) {
    const int a = OpenTap(argv[index]);
    const int b = OpenTap(argv[index + 1]);
    lanes.push_back({a, b, {}});
    lanes.push_back({b, a, {}});
  }
  std::printf("up\n");
  std::fflush(stdout);
  std::vector<pollfd> polled{{STDIN_FILENO, POLLIN, 0}};
  for (const Lane& lane : lanes) polled.push_back({lane.from, POLLIN, 0});
  while (true) {
    int64_t next_ns = INT64_MAX;
    const int64_t now_ns = NowNs();
    for (Lane& lane : lanes) {
      Give(lane, now_ns);
      if (!lane.held.empty()) next_ns = std::min(next_ns, lane.held.front().due_ns);
    }
    const int64_t wait_ns = std::clamp<int64_t>(next_ns - now_ns, 0, 1'000'000'000);
    const timespec timeout{wait_ns / 1'000'000'000, wait_ns % 1'000'000'000};
    if (ppoll(polled.data(), polled.size(), &timeout, nullptr) < 0 && errno != EINTR) return 1;
    if (polled[0].revents != 0) return 0;
    for (size_t index = 0; index < lanes.size(); ++index) {
      if (polled[index + 1].revents & POLLIN) Take(lanes[index], delay_ns);
    }
  }
}
