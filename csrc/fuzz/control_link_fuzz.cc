// A connection between leaders: frames, read while they arrive (transport/control_link.h).
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "control/message.h"
#include "fuzz/fuzz.h"
#include "transport/control_link.h"

using namespace kolovod;

namespace {

// Whole frames that have a payload.
std::string WithoutBeats(std::string_view bytes) {
  std::string frames;
  while (bytes.size() >= 8) {
    uint32_t length;
    std::memcpy(&length, bytes.data(), sizeof(length));
    if (bytes.size() - 8 < length) break;
    if (length > 0) frames += bytes.substr(0, 8 + size_t{length});
    bytes.remove_prefix(8 + size_t{length});
  }
  return frames;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr uint32_t kEpoch = 1;
  const std::string_view bytes(reinterpret_cast<const char*>(data), std::min<size_t>(size, 60'000));
  int pair[2];
  fuzz::Require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "sockets are to be had");
  std::atomic<bool> lost{false};
  std::string urgent;  // under the control_link's reading lock
  {
    ControlLink control_link({ControlLinkPeer{1, pair[0]}}, kEpoch);
    ControlLink::Events events;
    events.read = [&](const ControlLink::Frame& frame) {
      const auto note = DecodeNote(frame.payload);
      if (!note || note->kind != Note::Kind::kRevoked) return false;
      urgent += frame.payload;
      return true;
    };
    events.arrived = [] {};
    events.lost = [&](int, const std::string&) { lost.store(true); };
    control_link.Start(std::move(events));
    if (!bytes.empty()) {
      fuzz::Require(send(pair[1], bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
                    "it is sent");
    }
    shutdown(pair[1], SHUT_WR);
    std::string seen;
    // The end of the connection is an event, too, so this ends.
    while (!lost.load()) control_link.Look();
    for (const ControlLink::Frame& frame : control_link.Take()) {
      const auto length = static_cast<uint32_t>(frame.payload.size());
      seen.append(reinterpret_cast<const char*>(&length), sizeof(length));
      seen.append(reinterpret_cast<const char*>(&kEpoch), sizeof(kEpoch));
      seen += frame.payload;
    }
    if (urgent.empty()) {
      const std::string frames = WithoutBeats(bytes);
      fuzz::Require(frames.compare(0, seen.size(), seen) == 0, "frames are what was sent");
    }
  }
  close(pair[1]);
  return 0;
}
