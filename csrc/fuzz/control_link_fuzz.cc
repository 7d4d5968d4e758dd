// A connection between leaders: frames, read while they arrive (transport/control_link.h).
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "control/message.h"
#include "fuzz/fuzz.h"
#include "transport/control_link.h"

using namespace kolovod;

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
    if (urgent.empty()) fuzz::Require(bytes.substr(0, seen.size()) == seen, "frames are what was sent");
  }
  close(pair[1]);
  return 0;
}
